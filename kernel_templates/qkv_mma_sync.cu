// SPDX-License-Identifier: Apache-2.0
// Many tokens, any GPU from sm_80 on: a block computes block_m tokens x block_n columns with mma.sync. A ring of
// `stages` slabs of 128 k is filled by cp.async; warps share x and, along tokens, the weights of a slab.
//
//   weights in a stage   [chunk of 32 columns][vector][lane slot] 16 bytes   (common/copy.cuh)
//   x in a stage         [tile of eight tokens] kXTileBytes                       (x_offset there)
//
// Warps that split a slab's steps (warps_k) add their sums at the end in fixed order.
// Arithmetic: "rounded", w = rn_f16(q*s), summed in f32.
#include "common/copy.cuh"
#include "common/dequantize.cuh"
#include "common/epilogue.cuh"
#include "common/tile_space.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

template <Specialization kSpec>
struct MmaSyncStage {
  static constexpr unsigned kChunks = kSpec.tile.block_n / kChunkN;
  static constexpr unsigned kXOffset = kChunks * chunk_slab_bytes(kSpec.tile);
  static constexpr unsigned kThreads = kBlockThreads<kSpec>;

  /// Requests slab `slab`. Every thread of the block calls it.
  __device__ __forceinline__ static void fetch(unsigned stage, const QkvParams& params, const BlockTile& tile,
                                               unsigned slab) {
    constexpr unsigned kVectors = kChunks * 4, kWarps = kThreads / kWarpSize;
    const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (unsigned i = 0; i < ceil_div(kVectors, kWarps); ++i) {
      const unsigned vector = warp + i * kWarps;
      if (kVectors % kWarps == 0 || vector < kVectors) {
        const unsigned chunk = vector / 4, v = vector % 4;
        copy_weight_vector<kSpec>(stage + chunk * chunk_slab_bytes(kSpec.tile), params.weights[tile.matrix], tile.n,
                                  tile.column0 + chunk * kChunkN, slab, v, lane);
      }
    }
    const unsigned short* x = block_x<kSpec>(params, tile);
    constexpr unsigned kOctets = kSpec.tile.block_m * kOctetsPerSlab<kSpec>;
#pragma unroll
    for (unsigned i = 0; i < ceil_div(kOctets, kThreads); ++i) {
      const unsigned item = threadIdx.x + i * kThreads;
      if (kOctets % kThreads == 0 || item < kOctets) {
        const unsigned token = item / kOctetsPerSlab<kSpec>, octet = item % kOctetsPerSlab<kSpec>;
        copy_x_octet<kSpec>(stage + kXOffset + token / 8 * kXTileBytes<kSpec> + x_offset<kSpec>(token % 8, octet), x,
                            token, tile.tokens, slab, octet);
      }
    }
  }
};

/// The weights of one step, [chunk][word of load_step_words][register], times the group's scales.
template <Specialization kSpec, unsigned kChunks>
struct WeightFragments {
  unsigned words[kChunks][4][4];

  __device__ __forceinline__ void dequantize(unsigned chunk_slabs, unsigned lane, unsigned step,
                                             const unsigned (&scales)[kChunks][4]) {
#pragma unroll
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      unsigned packed[4];
      load_step_words<kSpec>(chunk_slabs + chunk * chunk_slab_bytes(kSpec.tile), lane, step, packed);
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) {
        constexpr bool kPrepacked = kSpec.layout == WeightLayout::prepacked;
        if constexpr (kPrepacked) {
          dequantize_split_pairs(packed[i], words[chunk][i]);
        } else {
          dequantize_natural_pairs(packed[i], words[chunk][i]);
        }
#pragma unroll
        for (unsigned pair = 0; pair < 4; ++pair) {
          const unsigned column = kPrepacked ? i / 2 * 2 + pair % 2 : i;
          words[chunk][i][pair] = mul_f16x2(words[chunk][i][pair], scales[chunk][column]);
        }
      }
    }
  }
};

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>, kSpec.tile.min_blocks)
    qkv_mma_sync(const __grid_constant__ QkvParams params) {
  using Stage = MmaSyncStage<kSpec>;
  constexpr TileConfig kTile = kSpec.tile;
  constexpr unsigned kChunks = Stage::kChunks / kTile.warps_n;           // of one warp
  constexpr unsigned kTokenTiles = kTile.block_m / (8 * kTile.warps_m);  // of one warp
  constexpr unsigned kSteps = kStepsPerSlab<kSpec> / kTile.warps_k;      // of one warp
  constexpr unsigned kSlabs = kSpec.k / kSlabK, kStages = kTile.stages, kStageBytes = stage_bytes(kSpec);
  static_assert(kChunks * kTile.warps_n * kChunkN == kTile.block_n);
  static_assert(kTokenTiles * kTile.warps_m * 8 == kTile.block_m);
  static_assert(kSteps * kTile.warps_k == kStepsPerSlab<kSpec> && kStages >= 2 && kSpec.group_size == kSlabK &&
                kTile.block_k == kSlabK);
  extern __shared__ __align__(16) unsigned char shared[];

  const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const unsigned g = lane / 4, t = lane % 4;
  const unsigned warp_n = warp % kTile.warps_n, warp_m = warp / kTile.warps_n % kTile.warps_m;
  const unsigned warp_k = kTile.warps_k == 1 ? 0 : warp / (kTile.warps_n * kTile.warps_m);
  const BlockTile tile = block_tile<kSpec>(blockIdx.x, params.m);
  const unsigned base = shared_address(shared);
  const unsigned warp_column = warp_n * kChunks * kChunkN, warp_token = warp_m * kTokenTiles * 8;
  const unsigned weights_offset = warp_n * kChunks * chunk_slab_bytes(kSpec.tile);
  const unsigned x_tiles = Stage::kXOffset + warp_token / 8 * kXTileBytes<kSpec>;
  const unsigned first_step = warp_k * kSteps;

#pragma unroll 1
  for (unsigned s = 0; s < kStages - 1; ++s) {
    if (s < kSlabs) Stage::fetch(base + s * kStageBytes, params, tile, s);
    copy_async_commit();
  }
  // Scales travel one slab ahead in registers: packed for the next slab, (s, s) for the one being dequantised.
  Vector2 packed_scales[kChunks];
  unsigned scales[kChunks][4];
  const auto request_scales = [&](unsigned slab) {
#pragma unroll
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      packed_scales[chunk] = load_scales_4<kSpec>(params.scales[tile.matrix], tile.n, slab,
                                                  tile.column0 + warp_column + chunk * kChunkN + 4 * g);
    }
  };
  const auto unpack_scales = [&] {
#pragma unroll
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      scales[chunk][0] = byte_permute(packed_scales[chunk].x, 0, 0x1010u);
      scales[chunk][1] = byte_permute(packed_scales[chunk].x, 0, 0x3232u);
      scales[chunk][2] = byte_permute(packed_scales[chunk].y, 0, 0x1010u);
      scales[chunk][3] = byte_permute(packed_scales[chunk].y, 0, 0x3232u);
    }
  };
  request_scales(0);

  float sums[kChunks][2][kTokenTiles][4] = {};
  unsigned read_slot = 0, write_slot = kStages - 1;
#pragma unroll 1
  for (unsigned slab = 0; slab < kSlabs; ++slab) {
    copy_async_wait<kStages - 2>();
    __syncthreads();  // this slab has landed for all; all are done with the slot that is filled next
    if (slab + kStages - 1 < kSlabs) Stage::fetch(base + write_slot * kStageBytes, params, tile, slab + kStages - 1);
    copy_async_commit();
    unpack_scales();
    if (slab + 1 < kSlabs) request_scales(slab + 1);

    const unsigned stage = base + read_slot * kStageBytes;
#pragma unroll 1  // rolled: unrolled, large tiles spill and compile for twice as long
    for (unsigned i = 0; i < kSteps; ++i) {
      WeightFragments<kSpec, kChunks> weights;
      weights.dequantize(stage + weights_offset, lane, first_step + i, scales);
      // Two token tiles at a time: then four other products lie between two that add to the same sums.
      constexpr unsigned kPair = kTokenTiles % 2 == 0 ? 2 : 1;
#pragma unroll
      for (unsigned first = 0; first < kTokenTiles; first += kPair) {
        unsigned b[kPair][4];
#pragma unroll
        for (unsigned j = 0; j < kPair; ++j) {
          load_x_operands<kSpec, false>(stage + x_tiles + (first + j) * kXTileBytes<kSpec>, lane, first_step + i, b[j]);
        }
#pragma unroll
        for (unsigned s = 0; s < 2; ++s) {  // k 16 each
#pragma unroll
          for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
            for (unsigned half = 0; half < 2; ++half) {  // rows g and g+8 are columns 4g+2*half and 4g+2*half+1
              unsigned a[4];
              weight_operand<kSpec.layout>(weights.words[chunk], half, s, a);
#pragma unroll
              for (unsigned j = 0; j < kPair; ++j) {
                mma_m16n8k16(sums[chunk][half][first + j], a[0], a[1], a[2], a[3], b[j][2 * s], b[j][2 * s + 1]);
              }
            }
          }
        }
      }
    }
    read_slot = read_slot + 1 == kStages ? 0 : read_slot + 1;
    write_slot = write_slot + 1 == kStages ? 0 : write_slot + 1;
  }

  if constexpr (kTile.warps_k > 1) {
    copy_async_wait<0>();
    __syncthreads();  // the ring is idle; its memory now holds the partial sums
  }
#pragma unroll
  for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned token = warp_token + token_tile * 8 + 2 * t + i;
        const unsigned column = warp_column + chunk * kChunkN + 4 * g;
        const float sum[4] = {sums[chunk][0][token_tile][i], sums[chunk][0][token_tile][2 + i],
                              sums[chunk][1][token_tile][i], sums[chunk][1][token_tile][2 + i]};
        if constexpr (kTile.warps_k > 1) {
          store_shared_16(
              partial_address<kSpec>(base + warp_k * partial_bytes(kTile), token, column),
              {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])});
        } else if (token < tile.tokens) {
          store_columns_4<kSpec>(params.outputs[tile.matrix], tile.n, tile.token0 + token, tile.column0 + column, sum);
        }
      }
    }
  }
  if constexpr (kTile.warps_k > 1) {
    __syncthreads();
    reduce_and_store<kSpec>(base, partial_bytes(kTile), params.outputs[tile.matrix], tile);
  }
}

}  // namespace qkvjit
