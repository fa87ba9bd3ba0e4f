// SPDX-License-Identifier: Apache-2.0
// Many tokens, any GPU from sm_80 on: a block computes block_m tokens x block_n columns with mma.sync. A ring of
// `stages` slabs of block_k is filled by cp.async; warps share x and, along tokens, the weights of a slab.
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

/// Fills stages. Where the threads divide the pieces evenly, what a thread copies lies at constant distances, from one
/// source and to one destination that are kept; else every address is made anew.
template <Specialization kSpec>
struct MmaSyncStage {
  static constexpr TileConfig kTile = kSpec.tile;
  static constexpr unsigned kChunks = kTile.block_n / kChunkN;
  static constexpr unsigned kXOffset = kChunks * chunk_slab_bytes(kTile);
  static constexpr unsigned kThreads = kBlockThreads<kSpec>, kWarps = kThreads / kWarpSize;
  static constexpr unsigned kPerChunk = chunk_slab_bytes(kTile) / 512;
  static constexpr unsigned kVectors = kChunks * kPerChunk;
  static constexpr unsigned kOctets = kTile.block_m * kOctetsPerSlab<kSpec>;
  static constexpr unsigned kTokensPerPass = kThreads / kOctetsPerSlab<kSpec>;
  static constexpr bool kRegular = kSpec.aligned && kWarps % kPerChunk == 0 && kTokensPerPass % 8 == 0;

  const unsigned char* weights;   // of this thread's first vector, in slab 0
  const unsigned char* x;         // of this thread's first octet, in slab 0
  unsigned weights_to, x_to;      // where they go, in a stage
  int columns_left, tokens_left;  // from them on
  unsigned slab_stride;           // bytes of weights from a slab to the next

  __device__ __forceinline__ MmaSyncStage(const QkvParams& params, const BlockTile& tile) {
    if constexpr (kRegular) {
      const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
      const unsigned chunk = warp / kPerChunk, v = warp % kPerChunk;
      const unsigned column0 = tile.column0 + chunk * kChunkN;
      unsigned slot, column = column0;
      unsigned long long word;
      if constexpr (kSpec.layout == WeightLayout::k8n) {
        const unsigned g = lane % 8, t = lane / 8;
        column += 4 * g;
        word = static_cast<unsigned long long>(4 * v + t) * tile.n + column;
        slot = lane_slot<kSpec.layout>(g, t);
        slab_stride = tile.n * (kTile.block_k / 2);
      } else if constexpr (kSpec.layout == WeightLayout::nk8) {
        const unsigned g = lane / 4, t = lane % 4;
        column += 4 * g + v;
        word = static_cast<unsigned long long>(column) * (kSpec.k / 8) + 4 * t;
        slot = lane_slot<kSpec.layout>(g, t);
        slab_stride = kTile.block_k / 2;
      } else {
        const unsigned blocks_n = ceil_div(tile.n, kPackedN);
        word = static_cast<unsigned long long>(v / 2 * blocks_n) * kPackedBlockWords +
               column0 / kChunkN * (kPackedBlockWords / 2) + v % 2 * 128 + lane * 4;
        slot = lane * 16;
        slab_stride = blocks_n * (kTile.block_k / kPackedK * kPackedBlockWords * 4);
      }
      weights = static_cast<const unsigned char*>(params.weights[tile.matrix]) + word * 4;
      weights_to = chunk * chunk_slab_bytes(kTile) + 512 * v + slot;
      columns_left = static_cast<int>(tile.n) - static_cast<int>(column);

      const unsigned token = threadIdx.x / kOctetsPerSlab<kSpec>, octet = threadIdx.x % kOctetsPerSlab<kSpec>;
      x = reinterpret_cast<const unsigned char*>(block_x<kSpec>(params, tile)) +
          static_cast<unsigned long long>(token) * (kSpec.k * 2) + octet * 16;
      x_to = kXOffset + token / 8 * kXTileBytes<kSpec> + x_offset<kSpec>(token % 8, octet);
      tokens_left = static_cast<int>(tile.tokens) - static_cast<int>(token);
    }
  }

  /// Requests every kParts-th piece of slab `slab`, from the kPart-th on. Every thread of the block calls it.
  template <unsigned kPart, unsigned kParts>
  __device__ __forceinline__ void fetch(unsigned stage, const QkvParams& params, const BlockTile& tile,
                                        unsigned slab) const {
    if constexpr (kRegular) {
      constexpr unsigned kChunkStep = kWarps / kPerChunk;
      constexpr unsigned long long kChunkBytes = kSpec.layout == WeightLayout::k8n   ? kChunkN * 4
                                                 : kSpec.layout == WeightLayout::nk8 ? kChunkN * (kSpec.k / 2)
                                                                                     : kPackedBlockWords * 2;
      const unsigned char* source = weights + static_cast<unsigned long long>(slab) * slab_stride;
#pragma unroll
      for (unsigned i = kPart; i < ceil_div(kVectors, kWarps); i += kParts) {
        if ((i + 1) * kWarps > kVectors && threadIdx.x / kWarpSize + i * kWarps >= kVectors) break;
        copy_async_16_stream(stage + weights_to + i * kChunkStep * chunk_slab_bytes(kTile),
                             source + i * kChunkStep * kChunkBytes,
                             static_cast<int>(i * kChunkStep * kChunkN) < columns_left ? 16 : 0);
      }
      const unsigned char* x_source = x + slab * (kTile.block_k * 2);
#pragma unroll
      for (unsigned i = kPart; i < ceil_div(kOctets, kThreads); i += kParts) {
        if ((i + 1) * kThreads > kOctets && threadIdx.x + i * kThreads >= kOctets) break;
        copy_async_16_stream(stage + x_to + i * (kTokensPerPass / 8) * kXTileBytes<kSpec>,
                             x_source + i * kTokensPerPass * (kSpec.k * 2ull),
                             static_cast<int>(i * kTokensPerPass) < tokens_left ? 16 : 0);
      }
    } else {
      fetch_any<kPart, kParts>(stage, params, tile, slab);
    }
  }

  template <unsigned kPart, unsigned kParts>
  __device__ __forceinline__ static void fetch_any(unsigned stage, const QkvParams& params, const BlockTile& tile,
                                                   unsigned slab) {
    const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (unsigned i = kPart; i < ceil_div(kVectors, kWarps); i += kParts) {
      const unsigned vector = warp + i * kWarps;
      if (kVectors % kWarps == 0 || vector < kVectors) {
        const unsigned chunk = vector / kPerChunk, v = vector % kPerChunk;
        copy_weight_vector<kSpec>(stage + chunk * chunk_slab_bytes(kTile), params.weights[tile.matrix], tile.n,
                                  tile.column0 + chunk * kChunkN, slab, v, lane);
      }
    }
    const unsigned short* block = block_x<kSpec>(params, tile);
#pragma unroll
    for (unsigned i = kPart; i < ceil_div(kOctets, kThreads); i += kParts) {
      const unsigned item = threadIdx.x + i * kThreads;
      if (kOctets % kThreads == 0 || item < kOctets) {
        const unsigned token = item / kOctetsPerSlab<kSpec>, octet = item % kOctetsPerSlab<kSpec>;
        copy_x_octet<kSpec>(stage + kXOffset + token / 8 * kXTileBytes<kSpec> + x_offset<kSpec>(token % 8, octet),
                            block, token, tile.tokens, slab, octet);
      }
    }
  }
};

/// One word of load_step_words, the i-th, as f16 times the group's scales.
template <WeightLayout kLayout>
__device__ __forceinline__ void dequantize_scaled(unsigned packed, unsigned i, const unsigned (&scales)[4],
                                                  unsigned (&out)[4]) {
  constexpr bool kPrepacked = kLayout == WeightLayout::prepacked;
  if constexpr (kPrepacked) {
    dequantize_split_pairs(packed, out);
  } else {
    dequantize_natural_pairs(packed, out);
  }
#pragma unroll
  for (unsigned pair = 0; pair < 4; ++pair) {
    out[pair] = mul_f16x2(out[pair], scales[kPrepacked ? i / 2 * 2 + pair % 2 : i]);
  }
}

/// What one warp does: 32 * kChunks columns, 8 * kTokenTiles tokens, kSteps steps of 32 k of every slab.
template <Specialization kSpec>
struct MmaSyncWarp {
  using Stage = MmaSyncStage<kSpec>;
  static constexpr TileConfig kTile = kSpec.tile;
  static constexpr unsigned kChunks = Stage::kChunks / kTile.warps_n;
  static constexpr unsigned kTokenTiles = kTile.block_m / (8 * kTile.warps_m);
  static constexpr unsigned kSteps = kStepsPerSlab<kSpec> / kTile.warps_k;
  static constexpr unsigned kSlabs = kSpec.k / kTile.block_k;
  static constexpr unsigned kSlabsPerGroup = kSlabK / kTile.block_k;
  static constexpr unsigned kStages = kTile.stages;
  static constexpr unsigned kStageBytes = stage_bytes(kSpec);
  /// Token tiles whose x is held at a time: two, so that four other products lie between two that add to one sum.
  static constexpr unsigned kGroup = kTokenTiles % 2 == 0 ? 2 : 1;
  static constexpr unsigned kGroups = kTokenTiles / kGroup;
  /// A step is done in units, whose weights and x are held at a time: of 16 k where the words are prepacked; a raw word
  /// spans all of the step.
  static constexpr bool kPrepacked = kSpec.layout == WeightLayout::prepacked;
  static constexpr unsigned kUnitsPerStep = kPrepacked ? 2 : 1, kUnits = kSteps * kUnitsPerStep;
  static constexpr unsigned kUnitWords = 4 / kUnitsPerStep;  // of each chunk
  static constexpr unsigned kWords = kUnitWords * kChunks;
  static_assert(kChunks * kTile.warps_n * kChunkN == kTile.block_n);
  static_assert(kTokenTiles * kTile.warps_m * 8 == kTile.block_m);
  static_assert(kSteps * kTile.warps_k == kStepsPerSlab<kSpec> && kStages >= 2 && kSpec.group_size == kSlabK);
  static_assert(kTile.block_k == kSlabK || (kTile.block_k == kSlabK / 2 && kSpec.layout != WeightLayout::nk8));
  static_assert(kSpec.k % kSlabK == 0);

  using Sums = float[kChunks][2][kTokenTiles][4];
  using Weights = unsigned[kChunks][kUnitWords][4];  // [chunk][word of the unit][register]
  using X = unsigned[kGroup][4 / kUnitsPerStep];
  using Packed = unsigned[kChunks][4];

  unsigned warp_m, warp_n, warp_k, lane;
  unsigned weights_offset, x_offset_0, column, first_step;  // in a stage; in the block; of a slab
  Vector2 packed_scales[kChunks];
  unsigned scales[kChunks][4];

  __device__ __forceinline__ MmaSyncWarp() {
    const unsigned warp = threadIdx.x / kWarpSize;
    lane = threadIdx.x % kWarpSize;
    warp_n = warp % kTile.warps_n, warp_m = warp / kTile.warps_n % kTile.warps_m;
    warp_k = kTile.warps_k == 1 ? 0 : warp / (kTile.warps_n * kTile.warps_m);
    column = warp_n * kChunks * kChunkN;
    weights_offset = warp_n * kChunks * chunk_slab_bytes(kTile);
    x_offset_0 = Stage::kXOffset + warp_m * kTokenTiles * kXTileBytes<kSpec>;
    first_step = warp_k * kSteps;
  }

  // Scales travel a group ahead in registers: packed for the next one, (s, s) for the one being dequantised.
  __device__ __forceinline__ void request_scales(const QkvParams& params, const BlockTile& tile, unsigned group) {
#pragma unroll
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      packed_scales[chunk] = load_scales_4<kSpec>(params.scales[tile.matrix], tile.n, group,
                                                  tile.column0 + column + chunk * kChunkN + 4 * (lane / 4));
    }
  }

  __device__ __forceinline__ void unpack_scales() {
#pragma unroll
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      scales[chunk][0] = byte_permute(packed_scales[chunk].x, 0, 0x1010u);
      scales[chunk][1] = byte_permute(packed_scales[chunk].x, 0, 0x3232u);
      scales[chunk][2] = byte_permute(packed_scales[chunk].y, 0, 0x1010u);
      scales[chunk][3] = byte_permute(packed_scales[chunk].y, 0, 0x3232u);
    }
  }

  __device__ __forceinline__ void load_words(unsigned stage, unsigned step, Packed& packed) const {
#pragma unroll
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      load_step_words<kSpec>(stage + weights_offset + chunk * chunk_slab_bytes(kTile), lane, first_step + step,
                             packed[chunk]);
    }
  }

  __device__ __forceinline__ void load_x(unsigned stage, unsigned unit, unsigned group, X& b) const {
    const unsigned step = first_step + unit / kUnitsPerStep;
    const unsigned tiles = stage + x_offset_0 + group * kGroup * kXTileBytes<kSpec>;
    if constexpr (kPrepacked) {  // two token tiles x two octets
      static_assert(!kPrepacked || kGroup == 2);
      const unsigned octet = 4 * step + 2 * (unit % 2) + lane / 8 % 2;
      const Vector4 v = load_matrices(tiles + lane / 16 * kXTileBytes<kSpec> + x_offset<kSpec>(lane % 8, octet));
      b[0][0] = v.x, b[0][1] = v.y, b[kGroup - 1][0] = v.z, b[kGroup - 1][1] = v.w;
    } else {
#pragma unroll
      for (unsigned j = 0; j < kGroup; ++j) {
        load_x_operands<kSpec, false>(tiles + j * kXTileBytes<kSpec>, lane, step, b[j]);
      }
    }
  }

  /// Word `word` of a unit, out of those of its step.
  __device__ __forceinline__ void dequantize(const Packed& packed, unsigned unit, unsigned word,
                                             Weights& weights) const {
    const unsigned chunk = word / kUnitWords, i = word % kUnitWords;
    const unsigned of_step = kPrepacked ? 2 * i + unit % 2 : i;  // [mma tile][16 k], or [column]
    dequantize_scaled<kSpec.layout>(packed[chunk][of_step], of_step, scales[chunk], weights[chunk][i]);
  }

  __device__ __forceinline__ static void multiply(const Weights& weights, const X& b, unsigned group, Sums& sums) {
#pragma unroll
    for (unsigned s = 0; s < 2 / kUnitsPerStep; ++s) {  // k 16 each
#pragma unroll
      for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {  // rows g and g+8 are columns 4g+2*half and 4g+2*half+1
          unsigned a[4];
          if constexpr (kPrepacked) {
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) a[i] = weights[chunk][half][i];
          } else {
            weight_operand<kSpec.layout>(weights[chunk], half, s, a);
          }
#pragma unroll
          for (unsigned j = 0; j < kGroup; ++j) {
            mma_m16n8k16(sums[chunk][half][group * kGroup + j], a[0], a[1], a[2], a[3], b[j][2 * s], b[j][2 * s + 1]);
          }
        }
      }
    }
  }

  /// Two stages: each slab by itself; other blocks of the multiprocessor work while this one waits.
  __device__ __forceinline__ void run_plain(unsigned base, const QkvParams& params, const BlockTile& tile, Sums& sums) {
    const Stage stages(params, tile);
#pragma unroll 1
    for (unsigned s = 0; s < kStages - 1; ++s) {
      if (s < kSlabs) stages.template fetch<0, 1>(base + s * kStageBytes, params, tile, s);
      copy_async_commit();
    }
    request_scales(params, tile, 0);
    unsigned read_slot = 0, write_slot = kStages - 1;
#pragma unroll 1
    for (unsigned slab = 0; slab < kSlabs; ++slab) {
      copy_async_wait<kStages - 2>();
      __syncthreads();  // this slab has landed for all; all are done with the slot that is filled next
      if (slab + kStages - 1 < kSlabs) {
        stages.template fetch<0, 1>(base + write_slot * kStageBytes, params, tile, slab + kStages - 1);
      }
      copy_async_commit();
      if (slab % kSlabsPerGroup == 0) {
        unpack_scales();
        if (slab + kSlabsPerGroup < kSlabs) request_scales(params, tile, slab / kSlabsPerGroup + 1);
      }
      const unsigned stage = base + read_slot * kStageBytes;
#pragma unroll 1  // rolled: unrolled, large tiles spill and compile for twice as long
      for (unsigned step = 0; step < kSteps; ++step) {
        Packed packed;
        load_words(stage, step, packed);
#pragma unroll
        for (unsigned i = 0; i < kUnitsPerStep; ++i) {
          Weights weights;
#pragma unroll
          for (unsigned word = 0; word < kWords; ++word) dequantize(packed, i, word, weights);
#pragma unroll
          for (unsigned group = 0; group < kGroups; ++group) {
            X b;
            load_x(stage, step * kUnitsPerStep + i, group, b);
            multiply(weights, b, group, sums);
          }
        }
      }
      read_slot = read_slot + 1 == kStages ? 0 : read_slot + 1;
      write_slot = write_slot + 1 == kStages ? 0 : write_slot + 1;
    }
  }

  /// Three stages and more: while a unit is multiplied, the next one's weights are dequantised word by word between
  /// the products, and x is read a group of token tiles ahead, across slabs too. Hence the one barrier of a slab stands
  /// before its last unit: from there on the next slab is read, and the slot of the one before is filled, in kParts
  /// portions over as many units.
  __device__ __forceinline__ void run_overlapped(unsigned base, const QkvParams& params, const BlockTile& tile,
                                                 Sums& sums) {
    const Stage stages(params, tile);
    constexpr unsigned kParts = kUnits < 2 ? 1 : 2;
#pragma unroll 1
    for (unsigned s = 0; s < kStages - 2; ++s) {
      if (s < kSlabs) stages.template fetch<0, 1>(base + s * kStageBytes, params, tile, s);
      copy_async_commit();
    }
    unsigned slot = 0, write_slot = kStages - 2;  // of the slab being multiplied and of the one being fetched
    if (kStages - 2 < kSlabs) {
      stages.template fetch<0, kParts>(base + write_slot * kStageBytes, params, tile, kStages - 2);
    }
    if (kParts == 1) copy_async_commit();
    request_scales(params, tile, 0);
    copy_async_wait<kStages - 3 + (kParts == 1 ? 1 : 0)>();
    __syncthreads();
    unpack_scales();
    if (kSlabs > kSlabsPerGroup) request_scales(params, tile, 1);

    Packed packed;
    Weights weights;
    X b;
    load_words(base, 0, packed);
    load_x(base, 0, 0, b);
#pragma unroll
    for (unsigned word = 0; word < kWords; ++word) dequantize(packed, 0, word, weights);
    unsigned stage = base;
#pragma unroll 1
    for (unsigned slab = 0; slab < kSlabs; ++slab) {
      unsigned next_stage = stage;
#pragma unroll
      for (unsigned unit = 0; unit < kUnits; ++unit) {
        const bool last = unit + 1 == kUnits;
        if (last) {
          copy_async_wait<kStages - 3>();
          __syncthreads();  // the next slab has landed for all; all are done with the slab before this one
          slot = slot + 1 == kStages ? 0 : slot + 1;
          write_slot = write_slot + 1 == kStages ? 0 : write_slot + 1;
          next_stage = base + slot * kStageBytes;
          if (slab + kStages - 1 < kSlabs) {
            stages.template fetch<0, kParts>(base + write_slot * kStageBytes, params, tile, slab + kStages - 1);
          }
          if (kParts == 1) copy_async_commit();
          if ((slab + 1) % kSlabsPerGroup == 0) {
            unpack_scales();
            if (slab + 1 + kSlabsPerGroup < kSlabs) {
              request_scales(params, tile, (slab + 1) / kSlabsPerGroup + 1);
            }
          }
        } else if (kParts == 2 && unit == 0) {
          if (slab + kStages - 2 < kSlabs) {
            stages.template fetch<kParts - 1, kParts>(base + write_slot * kStageBytes, params, tile,
                                                      slab + kStages - 2);
          }
          copy_async_commit();
        }
        // Behind the last slab these are words of a slab that was, and go nowhere.
        const unsigned from = last ? next_stage : stage, next_unit = last ? 0 : unit + 1;
        Weights next_weights;
        if (next_unit % kUnitsPerStep == 0) load_words(from, next_unit / kUnitsPerStep, packed);
#pragma unroll
        for (unsigned group = 0; group < kGroups; ++group) {
          X next_b;
          if (group + 1 < kGroups) {
            load_x(stage, unit, group + 1, next_b);
          } else {
            load_x(from, next_unit, 0, next_b);
          }
          multiply(weights, b, group, sums);
#pragma unroll
          for (unsigned word = 0; word < kWords; ++word) {
            if ((2 * word + 1) * kGroups / (2 * kWords) == group) dequantize(packed, next_unit, word, next_weights);
          }
          copy_registers(next_b, b);
        }
#pragma unroll
        for (unsigned chunk = 0; chunk < kChunks; ++chunk) copy_registers(next_weights[chunk], weights[chunk]);
      }
      stage = next_stage;
    }
  }

  template <unsigned kRows, unsigned kColumns>
  __device__ __forceinline__ static void copy_registers(const unsigned (&from)[kRows][kColumns],
                                                        unsigned (&to)[kRows][kColumns]) {
#pragma unroll
    for (unsigned i = 0; i < kRows; ++i) {
#pragma unroll
      for (unsigned j = 0; j < kColumns; ++j) to[i][j] = from[i][j];
    }
  }
};

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>, kSpec.tile.min_blocks)
    qkv_mma_sync(const __grid_constant__ QkvParams params) {
  using Warp = MmaSyncWarp<kSpec>;
  constexpr TileConfig kTile = kSpec.tile;
  extern __shared__ __align__(16) unsigned char shared[];

  const unsigned base = shared_address(shared);
  Warp warp;
  typename Warp::Sums sums = {};
  if constexpr (kTile.stages == 2) {
    warp.run_plain(base, params, block_tile<kSpec>(blockIdx.x, params.m), sums);
  } else {
    warp.run_overlapped(base, params, block_tile<kSpec>(blockIdx.x, params.m), sums);
  }
  // Anew, so that the loop has these registers.
  const BlockTile tile = block_tile<kSpec>(block_index(), params.m);

  const unsigned g = warp.lane / 4, t = warp.lane % 4;
  if constexpr (kTile.warps_k > 1) {
    copy_async_wait<0>();
    __syncthreads();  // the ring is idle; its memory now holds the partial sums
  }
#pragma unroll
  for (unsigned chunk = 0; chunk < Warp::kChunks; ++chunk) {
#pragma unroll
    for (unsigned token_tile = 0; token_tile < Warp::kTokenTiles; ++token_tile) {
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned token = (warp.warp_m * Warp::kTokenTiles + token_tile) * 8 + 2 * t + i;
        const unsigned column = warp.column + chunk * kChunkN + 4 * g;
        const float sum[4] = {sums[chunk][0][token_tile][i], sums[chunk][0][token_tile][2 + i],
                              sums[chunk][1][token_tile][i], sums[chunk][1][token_tile][2 + i]};
        if constexpr (kTile.warps_k > 1) {
          store_shared_16(
              partial_address<kSpec>(base + warp.warp_k * partial_bytes(kTile), token, column),
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
