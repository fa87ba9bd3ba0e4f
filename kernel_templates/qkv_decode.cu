// SPDX-License-Identifier: Apache-2.0
// Few tokens: the kernel is bound by reading weights. A block owns block_n columns and all of K; its warps split K in
// interleaved slabs of 128 and never meet before the final reduction. Each warp feeds itself through a cp.async
// ring of its own, so the main loop has no block barrier.
//
//            columns of the block  ->
//   slab 0   warp 0 |==============|
//   slab 1   warp 1 |==============|      each warp: its slabs, exact integers on the tensor cores,
//   slab 2   warp 2 |==============|      times the group's scale in f32 once a slab
//   slab 3   warp 0 |==============|      then the sums of the warps, added in fixed order
//
// Arithmetic: "exact". Integers -8…7 stay exact in f16, the scale multiplies the f32 sum of a group.
#include "common/copy.cuh"
#include "common/dequantize.cuh"
#include "common/epilogue.cuh"
#include "common/tile_space.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// One stage of a warp's ring: weights [chunk][vector][lane slot] 16 bytes, x [token tile][step][lane slot] 16 bytes,
/// scales [block_n] f16.
template <Specialization kSpec>
struct DecodeStage {
  static constexpr unsigned kChunks = kSpec.tile.block_n / kChunkN;
  static constexpr unsigned kTokenTiles = kSpec.tile.block_m / 8;
  static constexpr unsigned kXOffset = kChunks * kChunkSlabBytes;
  static constexpr unsigned kScaleOffset = kXOffset + kTokenTiles * kStepsPerSlab * 512;

  /// The lane's 16 bytes of x in `step`. k8n copies four t of one step at a time, nk8 four steps of one t.
  __device__ __forceinline__ static unsigned x_slot(unsigned token_tile, unsigned step, unsigned g, unsigned t) {
    const unsigned slot = kSpec.layout == WeightLayout::k8n ? 32 * step + 4 * g + t : 32 * t + 4 * g + (step ^ t);
    return kXOffset + token_tile * kStepsPerSlab * 512 + 16 * slot;
  }

  /// Requests slab `slab`. Every lane of the warp calls it.
  __device__ __forceinline__ static void fetch(unsigned stage, const QkvParams& params, const BlockTile& tile,
                                               unsigned slab, unsigned lane) {
    const unsigned g = lane / 4, t = lane % 4;
    const unsigned short* x = block_x<kSpec>(params, tile);
#pragma unroll
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (unsigned v = 0; v < 4; ++v) {
        copy_weight_vector<kSpec>(stage + chunk * kChunkSlabBytes, params.weights[tile.matrix], tile.n,
                                  tile.column0 + chunk * kChunkN, slab, v, lane);
      }
    }
#pragma unroll 1
    for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) {  // 64 bytes of each of eight tokens
        const unsigned octet = 4 * i + t;
        copy_x_octet<kSpec>(stage + x_slot(token_tile, step_of<kSpec.layout>(octet), g, part_of<kSpec.layout>(octet)),
                            x, token_tile * 8 + g, tile.tokens, slab, octet);
      }
    }
    // Eight lanes fetch four columns each; block_n is at most 128, so lane/8 picks the chunk.
    const unsigned chunk = lane / 8;
    if (chunk < kChunks) {
      const unsigned column = chunk * kChunkN + lane % 8 * 4;
      const unsigned destination = stage + kScaleOffset + column * 2;
      if constexpr (kSpec.aligned) {
        const bool valid = tile.column0 + column < tile.n;
        const unsigned long long offset = static_cast<unsigned long long>(slab) * tile.n + tile.column0 + column;
        copy_async_8(destination, static_cast<const unsigned short*>(params.scales[tile.matrix]) + (valid ? offset : 0),
                     valid ? 8 : 0);
      } else {
        store_shared_8(destination,
                       load_scales_4<kSpec>(params.scales[tile.matrix], tile.n, slab, tile.column0 + column));
      }
    }
  }
};

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>, kSpec.tile.min_blocks)
    qkv_decode(const __grid_constant__ QkvParams params) {
  using Stage = DecodeStage<kSpec>;
  constexpr unsigned kChunks = Stage::kChunks, kTokenTiles = Stage::kTokenTiles;
  constexpr unsigned kSlabs = kSpec.k / kSlabK, kWarps = kSpec.tile.warps_k, kStages = kSpec.tile.stages;
  constexpr unsigned kStageBytes = stage_bytes(kSpec);
  static_assert(kSpec.tile.warps_m == 1 && kSpec.tile.warps_n == 1 && kSpec.tile.block_n <= 4 * kChunkN);
  static_assert(Stage::kScaleOffset + kSpec.tile.block_n * 2 == kStageBytes && kSpec.group_size == kSlabK);
  extern __shared__ __align__(16) unsigned char shared[];

  const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const unsigned g = lane / 4, t = lane % 4;
  const BlockTile tile = block_tile<kSpec>(blockIdx.x, params.m);
  const unsigned base = shared_address(shared);
  const unsigned ring = base + warp * (kStages * kStageBytes);

  float sums[kChunks][2][kTokenTiles][4] = {};
  // Multiplies the oldest slab in the ring.
  const auto multiply_slab = [&](unsigned stage) {
    copy_async_wait<kStages - 1>();
    __syncwarp();  // other lanes copied what this one reads

    float parts[kChunks][2][kTokenTiles][4] = {};
#pragma unroll 2  // of 4: unrolled altogether it is 5 % faster and compiles for half as long again
    for (unsigned step = 0; step < kStepsPerSlab; ++step) {
      unsigned b[kTokenTiles][4];
#pragma unroll
      for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
        const Vector4 v = load_shared_16(stage + Stage::x_slot(token_tile, step, g, t));
        const unsigned octet_x[4] = {v.x, v.y, v.z, v.w};
        split_pairs(octet_x, b[token_tile]);
      }
#pragma unroll
      for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
        unsigned words[4];
        load_step_words<kSpec>(stage + chunk * kChunkSlabBytes, lane, step, words);
        unsigned a[4][4];  // column of the lane, pair of k
#pragma unroll
        for (unsigned column = 0; column < 4; ++column) dequantize_split_pairs(words[column], a[column]);
#pragma unroll
        for (unsigned s = 0; s < 2; ++s) {  // k 16 each
#pragma unroll
          for (unsigned half = 0; half < 2; ++half) {  // rows g and g+8 are columns 4g+2*half and 4g+2*half+1
            const unsigned(&low)[4] = a[2 * half];
            const unsigned(&high)[4] = a[2 * half + 1];
#pragma unroll
            for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
              mma_m16n8k16(parts[chunk][half][token_tile], low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1],
                           b[token_tile][2 * s], b[token_tile][2 * s + 1]);
            }
          }
        }
      }
    }
#pragma unroll
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      const Vector2 packed = load_shared_8(stage + Stage::kScaleOffset + (chunk * kChunkN + 4 * g) * 2);
      const float scale[4] = {f16_to_f32(packed.x & 0xffffu), f16_to_f32(packed.x >> 16),
                              f16_to_f32(packed.y & 0xffffu), f16_to_f32(packed.y >> 16)};
#pragma unroll
      for (unsigned half = 0; half < 2; ++half) {
#pragma unroll
        for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma unroll
          for (unsigned i = 0; i < 4; ++i) {
            sums[chunk][half][token_tile][i] =
                fmaf(parts[chunk][half][token_tile][i], scale[2 * half + i / 2], sums[chunk][half][token_tile][i]);
          }
        }
      }
    }
    __syncwarp();  // every lane has read the slot; it may be filled again
  };

  // The loop begins kStages slabs early, when there is nothing to multiply yet: so the fetch stands in the code once,
  // which compiles faster. One commit a turn, whether it fetches or not, keeps the count of pending groups exact.
  unsigned stage = ring;
#pragma unroll 1
  for (unsigned turn = 0, slab = warp; slab < kSlabs + kStages * kWarps; ++turn, slab += kWarps) {
    if (turn >= kStages) multiply_slab(stage);
    if (slab < kSlabs) Stage::fetch(stage, params, tile, slab, lane);
    copy_async_commit();
    stage = stage + kStageBytes == ring + kStages * kStageBytes ? ring : stage + kStageBytes;
  }

  copy_async_wait<0>();
  __syncthreads();  // all rings are idle; their memory now holds the partial sums
#pragma unroll
  for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (unsigned token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) {
        const float(&low)[4] = sums[chunk][0][token_tile];
        const float(&high)[4] = sums[chunk][1][token_tile];
        store_shared_16(partial_address<kSpec>(base, warp, token_tile * 8 + 2 * t + i, chunk * kChunkN + 4 * g),
                        {__float_as_uint(low[i]), __float_as_uint(low[2 + i]), __float_as_uint(high[i]),
                         __float_as_uint(high[2 + i])});
      }
    }
  }
  __syncthreads();
  reduce_and_store<kSpec>(base, params.outputs[tile.matrix], tile);
}

}  // namespace qkvjit
