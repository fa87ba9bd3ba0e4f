// SPDX-License-Identifier: Apache-2.0
// wgmma m64nNk16, f16 inputs, f32 accumulators, A from registers (PTX ISA: "Asynchronous Warpgroup Level Matrix
// Instructions"). Four warps multiply together; warp w holds the rows 16w … 16w+15 of A and D. With g = lane/4 and
// t = lane%4 a lane of it holds, row counted from 16w,
//
//   a (64 x 16, row x k)   a[0] (g, 2t..2t+1)   a[1] (g+8, 2t..)   a[2] (g, 2t+8..)   a[3] (g+8, 2t+8..)
//   c (64 x N,  row x col) c[j][0] (g, 8j+2t) c[j][1] (g, 8j+2t+1) c[j][2] (g+8, 8j+2t) c[j][3] (g+8, 8j+2t+1)
//
// that is the fragments of mma m16n8k16. Rows are output columns (weights), columns of D are tokens. B, the x of N
// tokens, is read from shared memory: rows of one token's 64 k, K-major, 128-byte swizzle:
//
//   byte 128*r + 16*(o ^ (r%8))   octet o (8 k) of token r; each eight rows (1024 bytes) begin at a multiple of 1024
#pragma once

#include "ptx/wgmma_shapes.cuh"

namespace qkvjit {

/// Orders this thread's writes to registers before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most kPending of the newest groups are unfinished.
template <unsigned kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from reading `c` before a wgmma_wait that stands ahead. No instruction.
__device__ __forceinline__ void wgmma_results(float (&c)[4]) {
  asm volatile("" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])::"memory");
}

/// Describes B (PTX ISA: "Matrix-descriptor-encode"). Upper half: 1024 bytes, in units of 16, between groups of eight
/// rows, and at bit 62 the 128-byte swizzle. Lower half: the shared address in units of 16, and 1 for a stride that the
/// swizzle does not use. Sixteen k further the address is 32 bytes larger: add 32 >> 4 to the lower half.
__device__ __forceinline__ unsigned wgmma_descriptor_low(unsigned address) { return address >> 4 | 1u << 16; }

__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned low) {
  unsigned long long descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "n"(0x40000040));
  return descriptor;
}

}  // namespace qkvjit
