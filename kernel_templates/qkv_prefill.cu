// SPDX-License-Identifier: Apache-2.0
// Many tokens on sm_90a, prepacked words: bound by the tensor cores. The weights are the register operand of wgmma, x
// is the one in shared memory. A block is one producer warpgroup and one to three that multiply:
//
//   producer   warp 0, one lane        x [block_m tokens][64 k] by a tensor copy        }  stage s, mbarriers
//              warp 1, a lane for each 64 columns: 2048 bytes of words, 128 of scales   }  "full" and "empty"
//   math       warpgroup w: its 64 columns (or kMma times 64), all tokens of the tile
//
// A math warpgroup dequantises the words of step i+1 into one set of registers while the wgmmas of step i read the
// other; it gives a stage back one step late, when those that read its x have finished:
//
//   issue wgmmas i | read words i+1 | wait for i-1 | release stage i-1 | dequantise i+1 | …
//
// That goes on over the end of a tile: the first step of the next is dequantised before the sums are stored.
//
// The columns are cut into units of 64 of one matrix, Q's, K's and V's one after the other; a tile is block_n / 64
// consecutive ones, so that a tile may span matrices and few columns are wasted. Blocks stay and walk the tiles; blocks
// of a cluster along N (cluster_n) take neighbouring column tiles and share their x. Blocks of a cluster along K
// (cluster_k) compute one tile together: each adds, for the tokens that it owns, its own sums and those that the other
// sends, in the order of the ranks.
//
// Arithmetic: "rounded". w = rn_f16(q*s), products and sums in f32.
#include "common/dequantize.cuh"
#include "ptx/grid.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/numeric.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// Extents and shared memory of the block: x [stage][block_m] 128 bytes, for each math warpgroup tokens on their way
/// out [kStoreTokens] 128 bytes, words [stage][unit] 2048, scales [stage][unit] 128, the barriers.
template <Specialization kSpec>
struct PrefillBlock {
  static constexpr unsigned kWarpgroups = kSpec.tile.warps_n / 4;  // that multiply
  static constexpr unsigned kUnits = kSpec.tile.block_n / kPackedN;
  static constexpr unsigned kMma = kUnits / kWarpgroups;
  static constexpr unsigned kTokenTiles = kSpec.tile.block_m / 8;
  static constexpr unsigned kStages = kSpec.tile.stages;
  static constexpr unsigned kSteps = kSpec.k / kPackedK / kSpec.tile.cluster_k;
  static constexpr unsigned kXBytes = kSpec.tile.block_m * 128;
  static constexpr unsigned kWordBytes = kUnits * kPackedBlockWords * 4;
  static constexpr unsigned kScaleBytes = kUnits * kPackedN * 2;
  static constexpr unsigned kStoreBytes = prefill_store_tokens(kSpec.tile) * 128;
  static constexpr unsigned kStoreOffset = kStages * kXBytes;
  static constexpr unsigned kWordOffset = kStoreOffset + kWarpgroups * kStoreBytes;
  static constexpr unsigned kScaleOffset = kWordOffset + kStages * kWordBytes;
  static constexpr unsigned kFullOffset = kScaleOffset + kStages * kScaleBytes;
  static constexpr unsigned kEmptyOffset = kFullOffset + kStages * kMbarrierBytes;

  // Registers a thread: the register file has 512 for four threads of as many warpgroups.
  static constexpr unsigned kProducerRegisters = 56;
  static constexpr unsigned kMathRegisters = kWarpgroups == 2 ? 224 : 152;

  static_assert(kSpec.layout == WeightLayout::prepacked && kSpec.aligned && kSpec.group_size == kSlabK);
  static_assert(kSpec.target.sm == 90 && kSpec.target.suffix == 'a');
  static_assert(kSpec.tile.warps_m == 1 && kSpec.tile.warps_k == 1 && kSpec.tile.copy_warps == 4);
  static_assert(kWarpgroups >= 1 && kWarpgroups <= 3 && kWarpgroups * 4 == kSpec.tile.warps_n);
  static_assert(kMma >= 1 && kMma * kWarpgroups * kPackedN == kSpec.tile.block_n);
  static_assert(kSpec.tile.block_m % (8 * kSpec.tile.cluster_n) == 0 && kSpec.tile.block_m <= 256);
  static_assert(kSpec.tile.block_k == kPackedK && kStages >= 3);
  static_assert(kSpec.tile.cluster_k == 1 || (kSpec.tile.cluster_k == 2 && kSpec.tile.cluster_n == 1));
  static_assert(kSteps % 2 == 0 && kSteps * kSpec.tile.cluster_k * kPackedK == kSpec.k);
  static_assert(kSpec.tile.cluster_k == 1 || (kTokenTiles + 1) / 2 * kUnits * 2048 <= kStages * kXBytes);
  static_assert(kEmptyOffset + kStages * kMbarrierBytes + kSwizzleAlignment == smem_bytes(kSpec));
};

/// 64 columns of one matrix.
struct ColumnUnit {
  unsigned matrix;
  unsigned n;        // columns of that matrix
  unsigned index;    // of the unit in it
  unsigned columns;  // of its 64 that exist; 0 beyond the last unit
};

template <Specialization kSpec>
__device__ __forceinline__ ColumnUnit column_unit(unsigned unit) {
  constexpr unsigned kQ = ceil_div(kSpec.n_q, kPackedN), kK = ceil_div(kSpec.n_k, kPackedN);
  constexpr unsigned kV = ceil_div(kSpec.n_v, kPackedN);
  ColumnUnit found;
  found.matrix = unit < kQ ? 0 : unit < kQ + kK ? 1 : 2;
  found.n = found.matrix == 0 ? kSpec.n_q : found.matrix == 1 ? kSpec.n_k : kSpec.n_v;
  found.index = unit - (found.matrix == 0 ? 0 : found.matrix == 1 ? kQ : kQ + kK);
  const unsigned column0 = found.index * kPackedN;
  found.columns = unit >= kQ + kK + kV ? 0 : found.n - column0 < kPackedN ? found.n - column0 : kPackedN;
  return found;
}

/// What a block computes next.
struct PrefillTile {
  unsigned unit0;       // its first unit of columns
  unsigned token_tile;  // in tiles of block_m tokens
};

/// The tiles of a block, one after the other. Token tiles run fastest inside a band, whose x stays in L2 while the
/// columns pass.
template <Specialization kSpec>
struct TileWalk {
  static constexpr unsigned kRanks = kSpec.tile.cluster_k * kSpec.tile.cluster_n;
  static constexpr unsigned kColumnTiles = column_tiles(kSpec) / kSpec.tile.cluster_n;  // of a whole cluster
  static constexpr unsigned kBand = max_u(2048 / kSpec.tile.block_m, 1u);

  unsigned token_tiles, next, total;

  __device__ __forceinline__ explicit TileWalk(unsigned long long m)
      : token_tiles(static_cast<unsigned>((m + kSpec.tile.block_m - 1) / kSpec.tile.block_m)),
        next(blockIdx.x / kRanks),
        total(token_tiles * kColumnTiles) {}

  __device__ __forceinline__ bool more() const { return next < total; }

  __device__ __forceinline__ PrefillTile take(unsigned rank_n) {
    const unsigned band = next / (kBand * kColumnTiles), rest = next - band * (kBand * kColumnTiles);
    const unsigned in_band = token_tiles - band * kBand < kBand ? token_tiles - band * kBand : kBand;
    const unsigned column_tile = rest / in_band;
    next += gridDim.x / kRanks;
    return {(column_tile * kSpec.tile.cluster_n + rank_n) * (kSpec.tile.block_n / kPackedN),
            band * kBand + rest - column_tile * in_band};
  }
};

/// A stage of the ring and the parity of its barriers.
template <unsigned kStages>
struct RingPlace {
  unsigned stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

/// The one lane that fetches x.
template <Specialization kSpec>
__device__ __forceinline__ void produce_x(unsigned base, const PrefillParams& params, unsigned rank_k,
                                          unsigned rank_n) {
  using Block = PrefillBlock<kSpec>;
  constexpr unsigned kRanksN = kSpec.tile.cluster_n, kRows = kSpec.tile.block_m / kRanksN;
  RingPlace<Block::kStages> place;
  for (TileWalk<kSpec> walk(params.qkv.m); walk.more();) {
    const PrefillTile tile = walk.take(rank_n);
    const unsigned row = tile.token_tile * kSpec.tile.block_m + rank_n * kRows;
#pragma unroll 1
    for (unsigned step = 0; step < Block::kSteps; ++step, place.advance()) {
      const unsigned full = base + Block::kFullOffset + place.stage * kMbarrierBytes;
      mbarrier_wait(base + Block::kEmptyOffset + place.stage * kMbarrierBytes, place.parity ^ 1);
      mbarrier_arrive_expect(full, Block::kXBytes);
      const unsigned to = base + place.stage * Block::kXBytes + rank_n * (kRows * 128);
      const unsigned k = (rank_k * Block::kSteps + step) * kPackedK;
      if constexpr (kRanksN == 1) {
        tensor_copy(to, params.x_map, k, row, full);
      } else {
        tensor_copy_multicast(to, params.x_map, k, row, full, (1u << kRanksN) - 1);
      }
    }
  }
}

/// The warp that fetches words and scales.
template <Specialization kSpec>
__device__ __forceinline__ void produce_weights(unsigned base, const QkvParams& params, unsigned rank_k,
                                                unsigned rank_n, unsigned lane) {
  using Block = PrefillBlock<kSpec>;
  RingPlace<Block::kStages> place;
  for (TileWalk<kSpec> walk(params.m); walk.more();) {
    const PrefillTile tile = walk.take(rank_n);
    const ColumnUnit unit = column_unit<kSpec>(tile.unit0 + lane);
    const bool mine = lane < Block::kUnits && unit.columns > 0;
    const unsigned word_bytes = mine ? kPackedBlockWords * 4 : 0, scale_bytes = mine ? unit.columns * 2 : 0;
    const unsigned expected = __reduce_add_sync(0xffffffffu, word_bytes + scale_bytes);
    const unsigned long long row_words =
        static_cast<unsigned long long>(ceil_div(unit.n, kPackedN)) * (kPackedBlockWords * 4);
    const unsigned first = rank_k * Block::kSteps;
    const unsigned char* words = static_cast<const unsigned char*>(params.weights[unit.matrix]) + first * row_words +
                                 static_cast<unsigned long long>(unit.index) * (kPackedBlockWords * 4);
    const unsigned char* scales =
        static_cast<const unsigned char*>(params.scales[unit.matrix]) + unit.index * (kPackedN * 2);
#pragma unroll 1
    for (unsigned step = 0; step < Block::kSteps; ++step, place.advance()) {
      const unsigned full = base + Block::kFullOffset + place.stage * kMbarrierBytes;
      mbarrier_wait(base + Block::kEmptyOffset + place.stage * kMbarrierBytes, place.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expect(full, expected);
      __syncwarp();
      if (mine) {
        const unsigned long long group = (first + step) / (kSlabK / kPackedK);
        bulk_copy(base + Block::kWordOffset + place.stage * Block::kWordBytes + lane * (kPackedBlockWords * 4), words,
                  word_bytes, full);
        bulk_copy(base + Block::kScaleOffset + place.stage * Block::kScaleBytes + lane * (kPackedN * 2),
                  scales + group * unit.n * 2, scale_bytes, full);
      }
      words += row_words;
    }
  }
}

/// Rounds the tokens 8*kFirst … 8*kEnd-1 of a warpgroup's 64 columns and writes them out, whole lines at a time.
/// `buffer` is the warpgroup's; a lane's sums are in the columns c, c+1 of kPackedK's table.
template <Specialization kSpec, unsigned kFirst, unsigned kEnd>
__device__ __forceinline__ void store_tokens(const QkvParams& params, unsigned buffer, unsigned warpgroup,
                                             const ColumnUnit& unit, unsigned long long token0,
                                             const float (&sums)[kSpec.tile.block_m / 8][4]) {
  constexpr unsigned kAtOnce = prefill_store_tokens(kSpec.tile) / 8;
  const unsigned thread = threadIdx.x % 128, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const unsigned g = lane / 4, t = lane % 4;
  const unsigned chunk = warp / 2 * 4 + g / 2, in_chunk = g % 2 * 8 + warp % 2 * 4;
  const unsigned read_row = thread / 8, read_chunk = thread % 8;
  unsigned short* out =
      static_cast<unsigned short*>(params.outputs[unit.matrix]) + unit.index * kPackedN + read_chunk * 8;
#pragma unroll
  for (unsigned first = kFirst; first < kEnd; first += kAtOnce) {
    named_barrier(1 + warpgroup, 128);  // the buffer has been read
#pragma unroll
    for (unsigned j = first; j < first + kAtOnce; ++j) {
      if (j >= kEnd) break;
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned row = (j - first) * 8 + 2 * t + i;
        store_shared_4(buffer + row * 128 + 16 * (chunk ^ (2 * t + i)) + in_chunk,
                       f32_to_f16x2(sums[j][i], sums[j][2 + i]));
      }
    }
    named_barrier(1 + warpgroup, 128);
#pragma unroll
    for (unsigned i = 0; i < (kAtOnce + 1) / 2; ++i) {
      const unsigned row = read_row + 16 * i;
      if (first * 8 + 16 * i >= kEnd * 8) break;
      const unsigned long long token = token0 + first * 8 + row;
      if (first * 8 + row < kEnd * 8 && token < params.m && read_chunk * 8 < unit.columns) {
        store_global_16(out + token * unit.n, load_shared_16(buffer + row * 128 + 16 * (read_chunk ^ row % 8)));
      }
    }
  }
}

/// Sends the sums of the tokens that the other block owns to its inbox, adds what it sent and stores the rest. kRank is
/// this block's.
template <Specialization kSpec, unsigned kRank>
__device__ __forceinline__ void add_and_store(unsigned base, const QkvParams& params, unsigned warpgroup,
                                              const PrefillTile& tile,
                                              float (&sums)[PrefillBlock<kSpec>::kMma][kSpec.tile.block_m / 8][4]) {
  using Block = PrefillBlock<kSpec>;
  constexpr unsigned kHalf = (Block::kTokenTiles + 1) / 2;  // token tiles of block 0
  constexpr unsigned kFirst = kRank == 0 ? 0 : kHalf, kEnd = kRank == 0 ? kHalf : Block::kTokenTiles;
  constexpr unsigned kOtherFirst = kRank == 0 ? kHalf : 0, kOtherEnd = kRank == 0 ? Block::kTokenTiles : kHalf;
  const unsigned inbox = base + warpgroup * (Block::kMma * kHalf * 2048) + threadIdx.x % 128 * 16;
  cluster_arrive(), cluster_wait();  // the other has read all of its x, whose place the inbox is
  const unsigned to = map_to_rank(inbox, 1 - kRank);
#pragma unroll
  for (unsigned b = 0; b < Block::kMma; ++b) {
#pragma unroll
    for (unsigned j = kOtherFirst; j < kOtherEnd; ++j) {
      store_cluster_16(to + (b * kHalf + j - kOtherFirst) * 2048,
                       {__float_as_uint(sums[b][j][0]), __float_as_uint(sums[b][j][1]), __float_as_uint(sums[b][j][2]),
                        __float_as_uint(sums[b][j][3])});
    }
  }
  cluster_arrive(), cluster_wait();
#pragma unroll
  for (unsigned b = 0; b < Block::kMma; ++b) {
#pragma unroll
    for (unsigned j = kFirst; j < kEnd; ++j) {
      const Vector4 v = load_shared_16(inbox + (b * kHalf + j - kFirst) * 2048);
      const float other[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) sums[b][j][i] = sums[b][j][i] + other[i];  // two terms: any order is the same
    }
    const ColumnUnit unit = column_unit<kSpec>(tile.unit0 + warpgroup * Block::kMma + b);
    store_tokens<kSpec, kFirst, kEnd>(params, base + Block::kStoreOffset + warpgroup * Block::kStoreBytes, warpgroup,
                                      unit, static_cast<unsigned long long>(tile.token_tile) * kSpec.tile.block_m,
                                      sums[b]);
  }
}

/// What a math warpgroup does.
template <Specialization kSpec>
__device__ __forceinline__ void multiply(unsigned base, const QkvParams& params, unsigned warpgroup, unsigned rank_k,
                                         unsigned rank_n) {
  using Block = PrefillBlock<kSpec>;
  constexpr unsigned kMma = Block::kMma, kTokenTiles = Block::kTokenTiles, kStages = Block::kStages;
  const unsigned thread = threadIdx.x % 128, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const unsigned words = base + Block::kWordOffset + warpgroup * (kMma * 2048) + thread * 16;
  const unsigned scales =
      base + Block::kScaleOffset + warpgroup * (kMma * 128) + warp / 2 * 64 + lane / 4 * 8 + warp % 2 * 4;
  const unsigned full = base + Block::kFullOffset, empty = base + Block::kEmptyOffset;
  const unsigned x = wgmma_descriptor_low(base);

  float sums[kMma][kTokenTiles][4];
  unsigned a[2][kMma][4][4];  // set, 64 columns, 16 k, register of the fragment
  Vector4 raw[kMma];
  unsigned scale[kMma];

  const auto read = [&](unsigned stage) {
#pragma unroll
    for (unsigned b = 0; b < kMma; ++b) {
      raw[b] = load_shared_16(words + stage * Block::kWordBytes + b * 2048);
      scale[b] = load_shared_4(scales + stage * Block::kScaleBytes + b * 128);
    }
  };
  const auto dequantize = [&](unsigned(&out)[kMma][4][4]) {
#pragma unroll
    for (unsigned b = 0; b < kMma; ++b) {
      const unsigned word[4] = {raw[b].x, raw[b].y, raw[b].z, raw[b].w};
      const unsigned pair[2] = {byte_permute(scale[b], scale[b], 0x1010u), byte_permute(scale[b], scale[b], 0x3232u)};
#pragma unroll
      for (unsigned step = 0; step < 4; ++step) {
        dequantize_split_pairs(word[step], out[b][step]);
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) out[b][step][i] = mul_f16x2(out[b][step][i], pair[i % 2]);
      }
    }
  };
  const auto release = [&](unsigned stage) {
    if constexpr (kSpec.tile.cluster_n == 1) {
      if (lane == 0) mbarrier_arrive(empty + stage * kMbarrierBytes);
    } else {
      if (lane < kSpec.tile.cluster_n) mbarrier_arrive_at_rank(empty + stage * kMbarrierBytes, lane);
    }
  };

  RingPlace<kStages> place;
  unsigned before = 0;  // the stage of the step before
  // Multiplies the step at `place` from `now` and, where there is one more, dequantises the next into `next`.
  const auto multiply_step = [&](unsigned(&now)[kMma][4][4], unsigned(&next)[kMma][4][4], bool is_first, bool more) {
    const unsigned b = x + place.stage * (Block::kXBytes / 16);
    wgmma_fence();
#pragma unroll
    for (unsigned step = 0; step < 4; ++step) {
#pragma unroll
      for (unsigned i = 0; i < kMma; ++i) {
        wgmma_m64k16<kSpec.tile.block_m>(sums[i], now[i][step], wgmma_descriptor(b + step * 2), !is_first || step > 0);
      }
    }
    wgmma_commit();
    const unsigned stage = place.stage;
    place.advance();
    if (more) {
      mbarrier_wait(full + place.stage * kMbarrierBytes, place.parity);
      read(place.stage);
    }
    wgmma_wait<1>();
    if (!is_first) release(before);
    if (more) dequantize(next);
    before = stage;
  };

  bool is_primed = false;
  for (TileWalk<kSpec> walk(params.m); walk.more();) {
    const PrefillTile tile = walk.take(rank_n);
    const bool has_next = walk.more();
    if (!is_primed) {
      mbarrier_wait(full + place.stage * kMbarrierBytes, place.parity);
      read(place.stage);
      dequantize(a[0]);
    }
#pragma unroll 1
    for (unsigned step = 0; step < Block::kSteps; step += 2) {
      multiply_step(a[0], a[1], step == 0, true);
      multiply_step(a[1], a[0], false, step + 2 < Block::kSteps || has_next);
    }
    is_primed = has_next;
    wgmma_wait<0>();
    release(before);
#pragma unroll
    for (unsigned b = 0; b < kMma; ++b) {
#pragma unroll
      for (unsigned j = 0; j < kTokenTiles; ++j) wgmma_results(sums[b][j]);
    }
    if constexpr (kSpec.tile.cluster_k == 1) {
#pragma unroll
      for (unsigned b = 0; b < kMma; ++b) {
        const ColumnUnit unit = column_unit<kSpec>(tile.unit0 + warpgroup * kMma + b);
        store_tokens<kSpec, 0, kTokenTiles>(
            params, base + Block::kStoreOffset + warpgroup * Block::kStoreBytes, warpgroup, unit,
            static_cast<unsigned long long>(tile.token_tile) * kSpec.tile.block_m, sums[b]);
      }
    } else if (rank_k == 0) {
      add_and_store<kSpec, 0>(base, params, warpgroup, tile, sums);
    } else {
      add_and_store<kSpec, 1>(base, params, warpgroup, tile, sums);
    }
  }
}

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>, 1) qkv_prefill(const __grid_constant__ PrefillParams params) {
  using Block = PrefillBlock<kSpec>;
  constexpr unsigned kRanks = kSpec.tile.cluster_k * kSpec.tile.cluster_n;
  extern __shared__ __align__(1024) unsigned char shared[];
  // Opaque: else the compiler derives addresses from the window's start again and again.
  unsigned base = round_up(shared_address(shared), kSwizzleAlignment);
  asm volatile("" : "+r"(base));
  const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0), warpgroup = warp / 4;
  const unsigned rank = kRanks == 1 ? 0 : cluster_rank();
  const unsigned rank_k = kSpec.tile.cluster_k == 1 ? 0 : rank, rank_n = kSpec.tile.cluster_n == 1 ? 0 : rank;

  if (threadIdx.x == 0) {
    prefetch_map(params.x_map);
#pragma unroll
    for (unsigned stage = 0; stage < Block::kStages; ++stage) {
      mbarrier_init(base + Block::kFullOffset + stage * kMbarrierBytes, 2);  // the two producers
      mbarrier_init(base + Block::kEmptyOffset + stage * kMbarrierBytes, kSpec.tile.warps_n * kSpec.tile.cluster_n);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (kRanks > 1) cluster_arrive(), cluster_wait();  // the others' barriers are there
  launch_dependents();

  if (warpgroup == Block::kWarpgroups) {
    if constexpr (Block::kWarpgroups > 1) lower_registers<Block::kProducerRegisters>();
    const unsigned lane = threadIdx.x % kWarpSize;
    if (warp % 4 == 0) {
      wait_for_grids_ahead();
      if (lane == 0) produce_x<kSpec>(base, params, rank_k, rank_n);
    } else if (warp % 4 == 1) {
      if (!params.qkv.weights_are_constant) wait_for_grids_ahead();
      produce_weights<kSpec>(base, params.qkv, rank_k, rank_n, lane);
    }
    __syncwarp();
    // As the math warps do in add_and_store.
    if constexpr (kSpec.tile.cluster_k > 1) cluster_arrive(), cluster_wait(), cluster_arrive(), cluster_wait();
  } else {
    if constexpr (Block::kWarpgroups > 1) raise_registers<Block::kMathRegisters>();
    multiply<kSpec>(base, params.qkv, warpgroup, rank_k, rank_n);
    __syncwarp();
  }
  // No block leaves while another may still write to its shared memory or arrive at its barriers.
  if constexpr (kSpec.tile.cluster_n > 1) cluster_arrive(), cluster_wait();
}

}  // namespace qkvjit
