// SPDX-License-Identifier: Apache-2.0
// mma.sync m16n8k16, f16 inputs, f32 accumulators (PTX ISA: "Matrix Fragments for mma.m16n8k16"). With
// g = lane/4 and t = lane%4 a lane holds
//
//   a (16 x 16, row x k)   a[0] (g, 2t..2t+1)   a[1] (g+8, 2t..)   a[2] (g, 2t+8..)   a[3] (g+8, 2t+8..)
//   b (16 x 8,  k x col)   b0   (2t..2t+1, g)   b1   (2t+8.., g)
//   c (16 x 8,  row x col) c[0] (g, 2t) c[1] (g, 2t+1) c[2] (g+8, 2t) c[3] (g+8, 2t+1)
//
// Here rows are output columns (weights) and the n side counts tokens, so a single token wastes nothing.
#pragma once

namespace qkvjit {

__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// m16n8k32, signed 8-bit inputs, int32 accumulators that wrap. Four bytes a register, the first lowest:
///
///   a (16 x 32)  a[0] (g, 4t..4t+3)  a[1] (g+8, 4t..)  a[2] (g, 4t+16..)  a[3] (g+8, 4t+16..)
///   b (32 x 8)   b0   (4t..4t+3, g)  b1   (4t+16.., g)            c as above
__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace qkvjit
