// SPDX-License-Identifier: Apache-2.0
// Few tokens: the kernel is bound by reading weights. A block owns block_n columns and all of K, or its share where a
// cluster splits K; its warps split that in interleaved slabs of 128 and never meet before the final reduction. Each
// warp feeds itself through a cp.async ring of its own, so the main loop has no block barrier.
//
//            columns of the block  ->
//   slab 0   warp 0 |==============|
//   slab 1   warp 1 |==============|      each warp: its slabs, exact integers on the tensor cores,
//   slab 2   warp 2 |==============|      times the group's scale in f32 once a slab
//   slab 3   warp 0 |==============|      then the sums of the warps (and blocks), added in fixed order
//
// Arithmetic: "exact". Integers -8…7 stay exact in f16, the scale multiplies the f32 sum of a group.
#include "common/copy.cuh"
#include "common/decode_ring.cuh"
#include "common/dequantize.cuh"
#include "common/epilogue.cuh"
#include "common/tile_space.cuh"
#include "ptx/grid.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// Whether the operands of x are read again for each chunk of columns, which saves registers. Raw words need them
/// permuted, which costs too much to do twice.
template <Specialization kSpec>
inline constexpr bool kReloadX = kSpec.layout == WeightLayout::prepacked&& kSpec.tile.block_m >= 16 &&
                                 kBlockThreads<kSpec>* kSpec.tile.min_blocks >= 512;

/// Adds a slab's products with one chunk of columns to `sums`: exact integers first, then the group's scale.
template <Specialization kSpec>
struct DecodeChunk {
  static constexpr unsigned kTokenTiles = ceil_div(kSpec.tile.block_m, 8);
  float sums[2][kTokenTiles][4];  // [pair of columns][token tile]

  __device__ __forceinline__ void multiply_slab(unsigned chunk_slab, unsigned scales, unsigned x, unsigned lane,
                                                unsigned (&b)[kTokenTiles][kStepsPerSlab<kSpec>][4]) {
    float parts[2][kTokenTiles][4] = {};
#pragma unroll
    for (unsigned half = 0; half < kSpec.tile.block_k / 64; ++half) {
      if constexpr (kReloadX<kSpec>) {
#pragma unroll
        for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma unroll
          for (unsigned i = 0; i < 2; ++i) {
            load_x_operands<kSpec, true>(x + token_tile * kXTileBytes<kSpec>, lane, 2 * half + i,
                                         b[token_tile][2 * half + i]);
          }
        }
      }
      unsigned packed[2][4];
      load_half_slab_words<kSpec>(chunk_slab, lane, half, packed);
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) {
        unsigned words[4][4];
#pragma unroll
        for (unsigned word = 0; word < 4; ++word) dequantize_split_pairs(packed[i][word], words[word]);
#pragma unroll
        for (unsigned s = 0; s < 2; ++s) {  // k 16 each
#pragma unroll
          for (unsigned pair = 0; pair < 2; ++pair) {
            unsigned a[4];
            weight_operand<kSpec.layout>(words, pair, s, a);
#pragma unroll
            for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
              const unsigned(&x)[4] = b[token_tile][2 * half + i];
              mma_m16n8k16(parts[pair][token_tile], a[0], a[1], a[2], a[3], x[2 * s], x[2 * s + 1]);
            }
          }
        }
      }
    }
    const Vector2 packed = load_shared_8(scales + lane / 4 * 8);
    const float scale[4] = {f16_to_f32(packed.x & 0xffffu), f16_to_f32(packed.x >> 16), f16_to_f32(packed.y & 0xffffu),
                            f16_to_f32(packed.y >> 16)};
#pragma unroll
    for (unsigned pair = 0; pair < 2; ++pair) {
#pragma unroll
      for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
          sums[pair][token_tile][i] =
              fmaf(parts[pair][token_tile][i], scale[2 * pair + i / 2], sums[pair][token_tile][i]);
        }
      }
    }
  }
};

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>, kSpec.tile.min_blocks)
    qkv_decode(const __grid_constant__ QkvParams params) {
  using Stage = DecodeStage<kSpec>;
  constexpr unsigned kChunks = Stage::kChunks, kTokenTiles = Stage::kTokenTiles;
  constexpr unsigned kRanks = kSpec.tile.cluster_k, kWarps = kSpec.tile.warps_k, kStages = kSpec.tile.stages;
  constexpr unsigned kSlabs = kSpec.k / kSpec.tile.block_k;
  constexpr unsigned kStageBytes = stage_bytes(kSpec), kWarpBytes = decode_warp_bytes(kSpec);
  static_assert(kSpec.tile.block_n % kChunkN == 0 && kSpec.tile.warps_m == 1 && kSpec.tile.warps_n == 1);
  static_assert(Stage::kScaleOffset + kSpec.tile.block_n * 2 <= kStageBytes && kSpec.group_size == kSlabK);
  static_assert(kSpec.tile.block_k == 64 || kSpec.tile.block_k == 128);
  static_assert(kRanks == 1 || kSpec.target.sm >= 90);
  extern __shared__ __align__(128) unsigned char shared[];

  const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const unsigned g = lane / 4, t = lane % 4;
  if (is_idle_block<kSpec>(params.m)) return;
  const BlockTile tile = block_tile<kSpec>(blockIdx.x / kRanks, params.m);
  const unsigned base = shared_address(shared);
  const unsigned ring = base + warp * kWarpBytes;
  const unsigned rank = kRanks == 1 ? 0 : cluster_rank();
  const unsigned first_slab = kRanks == 1 ? warp : warp + kWarps * rank;  // the warps of a cluster take turns
  constexpr unsigned kStride = kWarps * kRanks;

  SlabFeed<kSpec> feed(params, tile, first_slab, lane);
  bool weights_requested = false;
  if constexpr (kSpec.target.sm >= 90) {
    if constexpr (kRanks > 1) cluster_arrive_relaxed();
    weights_requested = params.weights_are_constant != 0;
    if (weights_requested) {
#pragma unroll 1
      for (unsigned turn = 0; turn < kStages && first_slab + turn * kStride < kSlabs; ++turn) {
        feed.fetch_weights(ring + turn * kStageBytes);
      }
    }
    wait_for_grids_ahead();
  }

  DecodeChunk<kSpec> chunks[kChunks] = {};
  // The loop begins kStages slabs early, when there is nothing to multiply yet: so the fetch stands in the code once,
  // which compiles faster. One commit a turn, whether it fetches or not, keeps the count of pending groups exact.
  unsigned stage = ring;
#pragma unroll 1
  for (unsigned turn = 0, slab = first_slab; slab < kSlabs + kStages * kStride; ++turn, slab += kStride) {
    if (turn >= kStages) {
      copy_async_wait<kStages - 1>();
      __syncwarp();  // other lanes copied what this one reads
      unsigned b[kTokenTiles][kStepsPerSlab<kSpec>][4];
#pragma unroll
      for (unsigned token_tile = 0; !kReloadX<kSpec> && token_tile < kTokenTiles; ++token_tile) {
#pragma unroll
        for (unsigned step = 0; step < kStepsPerSlab<kSpec>; ++step) {
          load_x_operands<kSpec, true>(stage + Stage::kXOffset + token_tile * kXTileBytes<kSpec>, lane, step,
                                       b[token_tile][step]);
        }
      }
#pragma unroll
      for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
        chunks[chunk].multiply_slab(stage + chunk * chunk_slab_bytes(kSpec.tile),
                                    stage + Stage::kScaleOffset + chunk * kChunkN * 2, stage + Stage::kXOffset, lane,
                                    b);
      }
      __syncwarp();  // every lane has read the slot; it may be filled again
    }
    if constexpr (kSpec.target.sm >= 90) {
      if (turn == kTriggerTurn<kSpec>) launch_dependents();
    }
    if (slab < kSlabs) {
      if (!weights_requested || turn >= kStages) feed.fetch_weights(stage);
      feed.fetch_x(stage);
    }
    copy_async_commit();
    stage = stage + kStageBytes == ring + kStages * kStageBytes ? ring : stage + kStageBytes;
  }

  copy_async_wait<0>();
  __syncwarp();  // the warp's ring is idle; its memory now holds the partial sums
#pragma unroll
  for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) {
        const float(&low)[4] = chunks[chunk].sums[0][token_tile];
        const float(&high)[4] = chunks[chunk].sums[1][token_tile];
        const unsigned token = token_tile * 8 + 2 * t + i;
        if (kSpec.tile.block_m < 8 && token >= kSpec.tile.block_m) continue;
        store_shared_16(partial_address<kSpec>(ring, token, chunk * kChunkN + 4 * g),
                        {__float_as_uint(low[i]), __float_as_uint(low[2 + i]), __float_as_uint(high[i]),
                         __float_as_uint(high[2 + i])});
      }
    }
  }
  __syncthreads();
  if constexpr (kRanks == 1) {
    reduce_and_store<kSpec>(base, kWarpBytes, params.outputs[tile.matrix], tile);
  } else {
    reduce_cluster_and_store<kSpec>(base, kWarpBytes, base + kWarps * kWarpBytes, rank, params.outputs[tile.matrix],
                                    tile);
  }
}

}  // namespace qkvjit
