// SPDX-License-Identifier: Apache-2.0
// wgmma with the A operand in registers, one PTX instruction a function (PTX ISA: "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate"), and the mbarriers that feed it. sm_90a only. With g = lane/4, t = lane%4, warp w of the
// warpgroup holds rows 16w … 16w+15 of the 64:
//
//   a (64 x 16)  a[0] (g, 2t..2t+1)  a[1] (g+8, 2t..)  a[2] (g, 2t+8..)  a[3] (g+8, 2t+8..)
//   d (64 x N)   of columns 8j … 8j+7: d[4j] (g, 2t)  d[4j+1] (g, 2t+1)  d[4j+2] (g+8, 2t)  d[4j+3] (g+8, 2t+1)
#pragma once

namespace qkvjit {

/// Shared-memory descriptor of a B operand, K-major with the 128-byte swizzle: rows of 128 bytes, eight of which make
/// 1024; octet o (16 bytes) of row r stands at o ^ (r%8). `address` moves by 32 bytes for the next 16 k.
__device__ __forceinline__ unsigned long long b_descriptor(unsigned address) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62, kStride1024 = 64ull << 32, kLeading = 1ull << 16;
  return kSwizzle128 | kStride1024 | kLeading | (address & 0x3ffffu) >> 4;
}

/// Before the first wgmma, and after its registers were written by anything else.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most kPending of the newest groups run.
template <unsigned kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define QKVJIT_D8(d, i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

/// d += a * b for 24 … 64 columns (tokens), f16 in, f32 sums.
__device__ __forceinline__ void wgmma_m64k16(float (&d)[12], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, %16, 1, 1, 1, 0;"
      : QKVJIT_D8(d, 0), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_m64k16(float (&d)[16], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : QKVJIT_D8(d, 0), QKVJIT_D8(d, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_m64k16(float (&d)[24], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, %28, 1, 1, 1, 0;"
      : QKVJIT_D8(d, 0), QKVJIT_D8(d, 8), QKVJIT_D8(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_m64k16(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, "
      "%34, %35}, %36, 1, 1, 1, 0;"
      : QKVJIT_D8(d, 0), QKVJIT_D8(d, 8), QKVJIT_D8(d, 16), QKVJIT_D8(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef QKVJIT_D8

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Waits for the end of the phase of that parity; a fresh barrier is in phase 0, and the one before, 1, has ended.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra "
      "ended_%=;\nbra again_%=;\nended_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
/// Makes this thread's ordinary shared-memory writes visible to wgmma and the copy engine.
__device__ __forceinline__ void fence_shared_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace qkvjit
