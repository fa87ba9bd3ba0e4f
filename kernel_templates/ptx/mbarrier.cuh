// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory, one PTX instruction a function (PTX ISA: "mbarrier", "membar / fence.proxy"). A barrier
// counts arrivals; when all it expects have come, its phase ends and the next begins. A waiter names the phase by its
// parity: 0 for the first, third, … one. Only kernels for sm_90 and newer call these.
#pragma once

namespace qkvjit {

inline constexpr unsigned kMbarrierBytes = 8;

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// One arrival; publishes what this thread wrote, and read, before.
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Whether the phase of `parity` has ended; the hardware may wait a while before it says no.
__device__ __forceinline__ bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

/// Shows this thread's writes to shared memory, cp.async ones that were waited for too, to the asynchronous proxy, by
/// which wgmma reads its operands.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace qkvjit
