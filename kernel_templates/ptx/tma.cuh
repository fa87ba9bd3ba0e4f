// SPDX-License-Identifier: Apache-2.0
// Copies by the tensor memory accelerator of sm_90, one PTX instruction a function (PTX ISA: "Data Movement and
// Conversion Instructions: Bulk copy / Tensor copy", "mbarrier.arrive", "setmaxnreg"). A copy counts its bytes down on
// an mbarrier of the block that receives it, which was told before how many to expect.
#pragma once

#include "ptx/mbarrier.cuh"
#include "qkv_params.h"

namespace qkvjit {

/// One arrival that adds `bytes` to what the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// One arrival on the barrier that has this address in block `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_at_rank(unsigned barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 mapped;\n"
      "mapa.shared::cluster.u32 mapped, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [mapped];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// Shows initialised barriers to the other blocks of the cluster and to the copies.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// `bytes`, a multiple of 16, from global memory.
__device__ __forceinline__ void bulk_copy(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// The box of `map` whose first element is (column, row); what lies beyond the tensor reads as zero.
__device__ __forceinline__ void tensor_copy(unsigned destination, const TensorMap& map, unsigned column, unsigned row,
                                            unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          destination),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

/// The same into every block of the cluster whose bit is set in `ranks`, at this address, on its barrier of this
/// address.
__device__ __forceinline__ void tensor_copy_multicast(unsigned destination, const TensorMap& map, unsigned column,
                                                      unsigned row, unsigned barrier, unsigned short ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ranks)
      : "memory");
}

/// The warpgroup's registers a thread from here on; all its warps call it.
template <unsigned kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <unsigned kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Waits for `threads` threads at hardware barrier `id`; 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(unsigned id, unsigned threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace qkvjit
