// SPDX-License-Identifier: Apache-2.0
// From f32 sums to f16 outputs: rounding, ragged edges, and the reduction over warps that split K.
#pragma once

#include "common/tile_space.cuh"
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
      const unsigned low = f32_to_f16x2(sum[0], sum[1]), high = f32_to_f16x2(sum[2], sum[3]);
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(row + column), "r"(low), "r"(high) : "memory");
    }
  } else {
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
      if (column + i < n) row[column + i] = f32_to_f16(sum[i]);
  }
}

/// Shared-memory address of four consecutive sums: f32 [warps_k][block_m][block_n].
template <Specialization kSpec>
__device__ __forceinline__ unsigned partial_address(unsigned base, unsigned warp_k, unsigned token, unsigned column) {
  return base + ((warp_k * kSpec.tile.block_m + token) * kSpec.tile.block_n + column) * 4;
}

/// Adds the partial sums of all K warps, always in the order 0, 1, 2 …, and stores the outputs. Every thread of the
/// block calls it after a barrier.
template <Specialization kSpec>
__device__ __forceinline__ void reduce_and_store(unsigned base, void* output, const BlockTile& tile) {
  constexpr unsigned kQuads = kSpec.tile.block_n / 4;
#pragma unroll 1
  for (unsigned item = threadIdx.x; item < kSpec.tile.block_m * kQuads; item += kBlockThreads<kSpec>) {
    const unsigned token = item / kQuads, column = item % kQuads * 4;
    if (token >= tile.tokens) break;  // items ascend in token
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (unsigned warp_k = 0; warp_k < kSpec.tile.warps_k; ++warp_k) {
      const Vector4 part = load_shared_16(partial_address<kSpec>(base, warp_k, token, column));
      sum[0] += __uint_as_float(part.x);
      sum[1] += __uint_as_float(part.y);
      sum[2] += __uint_as_float(part.z);
      sum[3] += __uint_as_float(part.w);
    }
    store_columns_4<kSpec>(output, tile.n, tile.token0 + token, tile.column0 + column, sum);
  }
}

}  // namespace qkvjit
