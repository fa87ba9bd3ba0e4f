// SPDX-License-Identifier: Apache-2.0
// What blocks and grids say to each other on sm_90 and newer, one PTX instruction a function (PTX ISA:
// "griddepcontrol", "barrier.cluster", "mapa", "Distributed shared memory"). Only kernels for such targets call them.
#pragma once

#include "ptx/memory.cuh"

namespace qkvjit {

/// Lets the next kernel of the stream start, where it was launched as a dependent one, as soon as every block of this
/// grid has said so. It orders nothing: whoever needs this grid's results waits for its end.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/// Waits until the grids ahead have finished and their writes can be seen; returns at once in an ordinary launch.
__device__ __forceinline__ void wait_for_grids_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// First half of a barrier over all threads of the cluster; orders no memory: for "all blocks have started".
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/// First half of a barrier that publishes this thread's writes, to distributed shared memory too.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/// `address`, a shared address of this block, in block `rank` of the cluster.
__device__ __forceinline__ unsigned map_to_rank(unsigned address, unsigned rank) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

/// 16 bytes into the shared memory of a block of the cluster.
__device__ __forceinline__ void store_cluster_16(unsigned mapped, Vector4 v) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(mapped), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace qkvjit
