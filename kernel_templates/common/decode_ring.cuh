// SPDX-License-Identifier: Apache-2.0
// What the kernels for few tokens share: the warp-private ring through which a warp feeds itself with weights, scales
// and x, slab by slab of 128 k, and the blocks that only hold a place.
#pragma once

#include "common/copy.cuh"
#include "common/tile_space.cuh"
#include "ptx/grid.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// A dependent launch is padded to as many blocks on every multiprocessor. The blocks without work stay until the
/// kernel ahead has finished, so that two of the next blocks do not share one multiprocessor while another has none.
template <Specialization kSpec>
__device__ __forceinline__ bool is_idle_block(unsigned long long m) {
  if constexpr (kSpec.target.sm >= 90) {
    const unsigned token_tiles = static_cast<unsigned>((m + kSpec.tile.block_m - 1) / kSpec.tile.block_m);
    if (blockIdx.x < column_tiles(kSpec) * token_tiles * kSpec.tile.cluster_k) return false;
    launch_dependents();
    wait_for_grids_ahead();
    return true;
  }
  return false;
}

/// The turn of the main loop in which dependents may start: with or just before the last fetch, so that what they
/// prefetch queues behind what this grid still needs. Earlier it delays this grid, where both fit a multiprocessor;
/// later the next grid's start shows. (Measured: one turn earlier is better up to 8 tokens, not for 16.)
template <Specialization kSpec>
inline constexpr unsigned kTriggerTurn = max_u(ceil_div(kSpec.k / kSpec.tile.block_k,
                                                        kSpec.tile.warps_k* kSpec.tile.cluster_k),
                                               kSpec.tile.block_m > 8 ? 1 : 2) -
                                         (kSpec.tile.block_m > 8 ? 1 : 2);

/// One stage of a warp's ring: weights [chunk][vector][lane slot] 16 bytes, x [token tile] kXTileBytes,
/// scales [block_n] f16.
template <Specialization kSpec>
struct DecodeStage {
  static constexpr unsigned kChunks = kSpec.tile.block_n / kChunkN;
  static constexpr unsigned kTokenTiles = ceil_div(kSpec.tile.block_m, 8);
  static constexpr unsigned kXOffset = kChunks * chunk_slab_bytes(kSpec.tile);
  static constexpr unsigned kScaleOffset = kXOffset + kTokenTiles * kXTileBytes<kSpec>;
  static constexpr unsigned kScaleLanes = kSpec.tile.block_n / 8;
  static_assert(kScaleLanes <= kWarpSize);

  /// Requests the weights and scales of slab `slab`. Every lane of the warp calls it.
  __device__ __forceinline__ static void fetch_weights(unsigned stage, const QkvParams& params, const BlockTile& tile,
                                                       unsigned slab, unsigned lane) {
#pragma unroll
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (unsigned v = 0; v < kSpec.tile.block_k / 32; ++v) {
        copy_weight_vector<kSpec>(stage + chunk * chunk_slab_bytes(kSpec.tile), params.weights[tile.matrix], tile.n,
                                  tile.column0 + chunk * kChunkN, slab, v, lane);
      }
    }
    if (lane < kScaleLanes) {
      const unsigned column = tile.column0 + lane * 8;
      const unsigned valid = column >= tile.n ? 0 : (tile.n - column < 8 ? tile.n - column : 8);
      const unsigned long long offset =
          static_cast<unsigned long long>(slab * kSpec.tile.block_k / kSpec.group_size) * tile.n + column;
      copy_vector<kSpec.aligned, false, 2>(stage + kScaleOffset + lane * 16,
                                           static_cast<const unsigned short*>(params.scales[tile.matrix]) + offset,
                                           valid);
    }
  }

  /// Requests the x of slab `slab`.
  __device__ __forceinline__ static void fetch_x(unsigned stage, const QkvParams& params, const BlockTile& tile,
                                                 unsigned slab, unsigned lane) {
    const unsigned short* x = block_x<kSpec>(params, tile);
    constexpr unsigned kRows = kXRows<kSpec>, kOctets = kRows * kOctetsPerSlab<kSpec>;
#pragma unroll
    for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma unroll
      for (unsigned i = 0; i < ceil_div(kOctets, kWarpSize); ++i) {
        const unsigned item = lane + i * kWarpSize;
        if (kOctets % kWarpSize != 0 && item >= kOctets) break;
        // Eight lanes take 128 bytes of one token; first the lower halves of all tokens, then the upper ones.
        const unsigned row = item / 8 % kRows, octet = item % 8 + item / (8 * kRows) * 8;
        copy_x_octet<kSpec>(stage + kXOffset + token_tile * kXTileBytes<kSpec> + x_offset<kSpec>(row, octet), x,
                            token_tile * 8 + row, tile.tokens, slab, octet);
      }
    }
  }
};

}  // namespace qkvjit
