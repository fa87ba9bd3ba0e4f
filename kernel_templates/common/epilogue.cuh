// SPDX-License-Identifier: Apache-2.0
// From f32 sums to f16 outputs: rounding, ragged edges, and the reduction over warps and
// blocks that split K.
#pragma once

#include "common/tile_space.cuh"
#include "ptx/grid.cuh"
#include "ptx/memory.cuh"
#include "ptx/numeric.cuh"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// Rounds four consecutive columns of one token and stores those below n. The caller checks the token.
template <Specialization kSpec>
__device__ __forceinline__ void store_columns_4(void* output, unsigned n, unsigned long long token, unsigned column,
                                                const float (&sum)[4]) {
  unsigned short* row = static_cast<unsigned short*>(output) + token * n;
  if constexpr (kSpec.aligned) {
    if (column < n) {
      store_global_8(row + column, {f32_to_f16x2(sum[0], sum[1]), f32_to_f16x2(sum[2], sum[3])});
    }
  } else {
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
      if (column + i < n) row[column + i] = f32_to_f16(sum[i]);
  }
}

/// Shared-memory address of four consecutive partial sums of a warp, whose sums begin at `warp_sums`.
template <Specialization kSpec>
__device__ __forceinline__ unsigned partial_address(unsigned warp_sums, unsigned token, unsigned column) {
  return warp_sums + (token * partial_pitch(kSpec.tile) + column) * 4;
}

/// Four consecutive sums over all K warps of the block, always in the order 0, 1, 2 …. The sums of one warp stand
/// `warp_stride` bytes behind those of the one before.
template <Specialization kSpec>
__device__ __forceinline__ void add_partials(unsigned base, unsigned warp_stride, unsigned token, unsigned column,
                                             float (&sum)[4]) {
  sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
#pragma unroll
  for (unsigned warp_k = 0; warp_k < kSpec.tile.warps_k; ++warp_k) {
    const Vector4 part = load_shared_16(partial_address<kSpec>(base + warp_k * warp_stride, token, column));
    sum[0] += __uint_as_float(part.x);
    sum[1] += __uint_as_float(part.y);
    sum[2] += __uint_as_float(part.z);
    sum[3] += __uint_as_float(part.w);
  }
}

/// Adds the partial sums of all K warps and stores the outputs. Every thread of the block calls it after a barrier.
template <Specialization kSpec>
__device__ __forceinline__ void reduce_and_store(unsigned base, unsigned warp_stride, void* output,
                                                 const BlockTile& tile) {
  constexpr unsigned kQuads = kSpec.tile.block_n / 4;
#pragma unroll 1
  for (unsigned item = threadIdx.x; item < kSpec.tile.block_m * kQuads; item += kBlockThreads<kSpec>) {
    const unsigned token = item / kQuads, column = item % kQuads * 4;
    if (token >= tile.tokens) break;  // items ascend in token
    float sum[4];
    add_partials<kSpec>(base, warp_stride, token, column, sum);
    store_columns_4<kSpec>(output, tile.n, tile.token0 + token, tile.column0 + column, sum);
  }
}

/// The same over a cluster whose blocks split K: block r owns the r-th part of the columns, gets the sums of every
/// block for them in `inbox` (f32 [rank][block_m][block_n / cluster_k]) and adds them in the order of the ranks. The
/// caller has arrived (relaxed) at the cluster's barrier once, at its start. Every thread calls it after a block
/// barrier.
template <Specialization kSpec>
__device__ __forceinline__ void reduce_cluster_and_store(unsigned base, unsigned warp_stride, unsigned inbox,
                                                         unsigned rank, void* output, const BlockTile& tile) {
  constexpr unsigned kRanks = kSpec.tile.cluster_k;
  constexpr unsigned kQuads = kSpec.tile.block_n / 4, kOwnedQuads = kQuads / kRanks;
  static_assert(kOwnedQuads * kRanks == kQuads);
  cluster_wait();  // every block has started, so its shared memory may be written
#pragma unroll 1
  for (unsigned item = threadIdx.x; item < kSpec.tile.block_m * kQuads; item += kBlockThreads<kSpec>) {
    const unsigned token = item / kQuads, quad = item % kQuads;
    if (token >= tile.tokens) break;
    float sum[4];
    add_partials<kSpec>(base, warp_stride, token, quad * 4, sum);
    const unsigned slot = inbox + ((rank * kSpec.tile.block_m + token) * kOwnedQuads + quad % kOwnedQuads) * 16;
    store_cluster_16(map_to_rank(slot, quad / kOwnedQuads), {__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                                                             __float_as_uint(sum[2]), __float_as_uint(sum[3])});
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll 1
  for (unsigned item = threadIdx.x; item < kSpec.tile.block_m * kOwnedQuads; item += kBlockThreads<kSpec>) {
    const unsigned token = item / kOwnedQuads, quad = item % kOwnedQuads;
    if (token >= tile.tokens) break;
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (unsigned r = 0; r < kRanks; ++r) {
      const Vector4 part = load_shared_16(inbox + ((r * kSpec.tile.block_m + token) * kOwnedQuads + quad) * 16);
      sum[0] += __uint_as_float(part.x);
      sum[1] += __uint_as_float(part.y);
      sum[2] += __uint_as_float(part.z);
      sum[3] += __uint_as_float(part.w);
    }
    store_columns_4<kSpec>(output, tile.n, tile.token0 + token, tile.column0 + (rank * kOwnedQuads + quad) * 4, sum);
  }
}

}  // namespace qkvjit
