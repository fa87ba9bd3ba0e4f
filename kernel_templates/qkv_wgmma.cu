// SPDX-License-Identifier: Apache-2.0
// 17 to 64 tokens on sm_90a, prepacked words: still bound by reading weights, but mma.sync no longer keeps up. The
// weights are the register operand of wgmma (64 output columns), x is the one in shared memory (block_m tokens).
//
//            columns of the block  ->
//            warp 0  1  2  3 | 4  5 …        warpgroups of four warps; a warp owns MB mma tiles of 16 columns and
//   slab 0   |##|##|##|##|##|##|             walks all slabs of the block: its words and scales come through a
//   slab 1   |##|##|##|##|##|##|             cp.async ring of its own, in which a lane copies what it alone reads
//   …                                        (no barrier), are dequantised to f16 and multiplied
//
//   copy warps   x of slab 0 1 2 3 …  ->  ring of kXStages slabs for the whole block; mbarriers "full", "empty"
//
// A unit of work is 64 k of one mma tile of each warp: four words a lane, sixteen registers, four wgmmas. While those
// of one unit run, the next is dequantised into the other of two register sets, which the unit before has left:
//
//   read words u+1 | issue wgmmas u | wait for u-1 | dequantise u+1 | read words u+2 | …
//
// Blocks of a cluster split K. At the end each sends its sums for the columns that another owns to that one's shared
// memory, lane for lane, and the owner adds them in the order of the ranks.
//
// Arithmetic: "rounded". w = rn_f16(q*s), products and sums in f32.
#include "common/copy.cuh"
#include "common/decode_ring.cuh"
#include "common/dequantize.cuh"
#include "common/tile_space.cuh"
#include "ptx/grid.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/numeric.cuh"
#include "ptx/wgmma.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// Extents and shared memory of the block: x [kXStages][64 k][token] 128 bytes, then for each warp a ring
/// [stages][words [mma tile][64 k][lane] 16 bytes, scales [mma tile][lane] 4 bytes], the inbox, the barriers.
template <Specialization kSpec>
struct WgmmaBlock {
  static constexpr unsigned kWarps = kSpec.tile.warps_n;  // that multiply
  static constexpr unsigned kTiles =
      kSpec.tile.block_n / (16 * kWarps);  // mma tiles of a warp: m64 blocks of a warpgroup
  static constexpr unsigned kTokenTiles = kSpec.tile.block_m / 8;
  static constexpr unsigned kRanks = kSpec.tile.cluster_k;
  static constexpr unsigned kSlabs = kSpec.k / kSlabK;
  static constexpr unsigned kXHalfBytes = kSpec.tile.block_m * 128;
  static constexpr unsigned kXStageBytes = 2 * kXHalfBytes;
  static constexpr unsigned kScaleOffset = kTiles * 1024;
  static constexpr unsigned kWarpStageBytes = kScaleOffset + kTiles * kWarpSize * 4;
  static constexpr unsigned kRingOffset = kXStages * kXStageBytes;
  static constexpr unsigned kInboxOffset = kRingOffset + kSpec.tile.stages * kWarps * kWarpStageBytes;
  static constexpr unsigned kFullOffset = kInboxOffset + wgmma_inbox_bytes(kSpec.tile);
  static constexpr unsigned kEmptyOffset = kFullOffset + kXStages * kMbarrierBytes;

  static_assert(kSpec.layout == WeightLayout::prepacked && kSpec.aligned && kSpec.group_size == kSlabK);
  static_assert(kSpec.target.sm == 90 && kSpec.target.suffix == 'a');
  static_assert(kSpec.tile.warps_m == 1 && kSpec.tile.warps_k == 1 && kSpec.tile.copy_warps > 0);
  static_assert(kWarps % 4 == 0 && kTiles > 0 && kTiles * 16 * kWarps == kSpec.tile.block_n);
  static_assert(kSpec.tile.block_m % 8 == 0 && kSpec.tile.block_k == kSlabK && kSpec.tile.stages >= 2);
  static_assert(kWarps % kRanks == 0 && kSlabs >= kRanks);
  static_assert(kEmptyOffset + kXStages * kMbarrierBytes + kSwizzleAlignment == smem_bytes(kSpec));
};

/// A warp's weights and scales on their way from global memory to its ring, slab after slab.
template <Specialization kSpec>
class WeightFeed {
  using Block = WgmmaBlock<kSpec>;
  // Whether some column tile of the block ends beyond its matrix.
  static constexpr bool kRagged =
      kSpec.n_q % kSpec.tile.block_n != 0 || kSpec.n_k % kSpec.tile.block_n != 0 || kSpec.n_v % kSpec.tile.block_n != 0;

 public:
  __device__ __forceinline__ WeightFeed(const QkvParams& params, const BlockTile& tile, unsigned first_slab,
                                        unsigned warp, unsigned lane) {
    const unsigned blocks = ceil_div(tile.n, kPackedN);
    const unsigned mma_tile = tile.column0 / 16 + warp * Block::kTiles;
    half_bytes_ = static_cast<unsigned long long>(blocks) * (kPackedBlockWords * 4);
    scale_bytes_ = static_cast<unsigned long long>(tile.n) * 2;
    words_ = static_cast<const unsigned char*>(params.weights[tile.matrix]) + 2 * first_slab * half_bytes_ +
             mma_tile * 512ull + lane * 16;
    scales_ = static_cast<const unsigned char*>(params.scales[tile.matrix]) + first_slab * scale_bytes_ +
              lane_column(mma_tile, lane) * 2;
    odd_offset_ = 2 * (mma_tile % 2 == 0 ? 2 : 30);
#pragma unroll
    for (unsigned b = 0; b < Block::kTiles; ++b) {
      word_bytes_[b] = kRagged && mma_tile + b >= 4 * blocks ? 0 : 16;
      scale_copy_bytes_[b] = kRagged && lane_column(mma_tile + b, lane) >= tile.n ? 0 : 4;
    }
  }

  /// The first of the lane's two columns in mma tile `mma_tile` of the matrix.
  __device__ __forceinline__ static unsigned lane_column(unsigned mma_tile, unsigned lane) {
    return mma_tile / 2 * 32 + lane / 4 * 4 + mma_tile % 2 * 2;
  }

  /// Requests the next slab into the lane's places `words` and `scales` of a stage.
  __device__ __forceinline__ void fetch(unsigned words, unsigned scales) {
#pragma unroll
    for (unsigned half = 0; half < 2; ++half) {
#pragma unroll
      for (unsigned b = 0; b < Block::kTiles; ++b) {
        copy_async_16_stream(words + (2 * b + half) * 512, words_ + half * half_bytes_ + b * 512, word_bytes_[b]);
      }
    }
#pragma unroll
    for (unsigned b = 0; b < Block::kTiles; ++b) {
      // The columns of mma tile b lie 32 a pair of tiles behind those of the first, and 2 or 30 where b is odd.
      const unsigned odd_offset = Block::kTiles % 2 == 0 ? 4 : odd_offset_;
      copy_async_4(scales + b * (kWarpSize * 4), scales_ + b / 2 * 64 + b % 2 * odd_offset, scale_copy_bytes_[b]);
    }
    words_ += 2 * half_bytes_;
    scales_ += scale_bytes_;
  }

 private:
  const unsigned char* words_;
  const unsigned char* scales_;
  unsigned long long half_bytes_;   // 64 k of the matrix
  unsigned long long scale_bytes_;  // a row of scales
  unsigned odd_offset_;             // bytes from the scales of the first mma tile to those of the second
  unsigned word_bytes_[Block::kTiles];
  unsigned scale_copy_bytes_[Block::kTiles];
};

/// What a copy warp does: the slabs of x one after the other into the ring, zeros for tokens beyond m. Two slabs are on
/// their way before the oldest is handed over.
template <Specialization kSpec>
__device__ __forceinline__ void copy_x(unsigned base, const QkvParams& params, const BlockTile& tile,
                                       unsigned first_slab, unsigned slabs, unsigned copy_warp, unsigned lane) {
  using Block = WgmmaBlock<kSpec>;
  // Slabs between request and hand-over. A stage is emptied while the slab after it is multiplied, so with a smaller
  // difference to kXStages the two would wait for each other.
  constexpr unsigned kBehind = 2;
  constexpr unsigned kRowsAtOnce = 2 * kSpec.tile.copy_warps;  // sixteen lanes take the 256 bytes of one token
  static_assert(kBehind + 2 <= kXStages && kSpec.tile.block_m % kRowsAtOnce == 0);
  const unsigned octet = lane % 16, first_row = 2 * copy_warp + lane / 16;
  const unsigned short* x = block_x<kSpec>(params, tile) + static_cast<unsigned long long>(first_row) * kSpec.k +
                            first_slab * kSlabK + octet * 8;

  const auto hand_over = [&](unsigned slab) {
    fence_async_proxy();
    mbarrier_arrive(base + Block::kFullOffset + slab % kXStages * kMbarrierBytes);
  };
#pragma unroll 1
  for (unsigned slab = 0; slab < slabs; ++slab) {
    const unsigned stage = slab % kXStages;
    if (slab >= kXStages) {
      mbarrier_wait(base + Block::kEmptyOffset + stage * kMbarrierBytes, (slab / kXStages - 1) % 2);
    }
    const unsigned destination = base + stage * Block::kXStageBytes + octet / 8 * Block::kXHalfBytes;
#pragma unroll
    for (unsigned i = 0; i < kSpec.tile.block_m / kRowsAtOnce; ++i) {
      const unsigned row = first_row + i * kRowsAtOnce;
      copy_async_16_stream(destination + row * 128 + 16 * (octet % 8 ^ row % 8),
                           x + static_cast<unsigned long long>(i * kRowsAtOnce) * kSpec.k, row < tile.tokens ? 16 : 0);
    }
    copy_async_commit();
    x += kSlabK;
    if (slab >= kBehind) {
      copy_async_wait<kBehind>();
      hand_over(slab - kBehind);
    }
  }
  copy_async_wait<0>();
#pragma unroll 1
  for (unsigned slab = slabs > kBehind ? slabs - kBehind : 0; slab < slabs; ++slab) hand_over(slab);
}

/// The sums that the block owns, of one mma tile and eight tokens, added over the cluster.
template <Specialization kSpec>
__device__ __forceinline__ void add_ranks(unsigned slot, unsigned rank_stride, unsigned rank, float (&sum)[4]) {
  constexpr unsigned kRanks = kSpec.tile.cluster_k;
  float total[4];
#pragma unroll
  for (unsigned r = 0; r < kRanks; ++r) {
    float part[4] = {sum[0], sum[1], sum[2], sum[3]};
    if (r != rank) {
      const Vector4 v = load_shared_16(slot + (r < rank ? r : r - 1) * rank_stride);
      part[0] = __uint_as_float(v.x), part[1] = __uint_as_float(v.y);
      part[2] = __uint_as_float(v.z), part[3] = __uint_as_float(v.w);
    }
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) total[i] = r == 0 ? part[i] : total[i] + part[i];
  }
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) sum[i] = total[i];
}

/// Rounds and stores a warp's sums: two consecutive columns at a time, four where the warp has pairs of mma tiles.
template <Specialization kSpec>
__device__ __forceinline__ void store_sums(void* output, const BlockTile& tile, unsigned warp, unsigned lane,
                                           const float (&sums)[WgmmaBlock<kSpec>::kTiles][kSpec.tile.block_m / 8][4]) {
  using Block = WgmmaBlock<kSpec>;
  constexpr unsigned kTogether = Block::kTiles % 2 == 0 ? 2 : 1;
#pragma unroll
  for (unsigned b = 0; b < Block::kTiles; b += kTogether) {
    const unsigned column = WeightFeed<kSpec>::lane_column(tile.column0 / 16 + warp * Block::kTiles + b, lane);
    if (column >= tile.n) continue;
    unsigned short* outputs = static_cast<unsigned short*>(output) + column;
#pragma unroll
    for (unsigned j = 0; j < Block::kTokenTiles; ++j) {
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned token = 8 * j + lane % 4 * 2 + i;
        if (token >= tile.tokens) continue;
        unsigned short* to = outputs + (tile.token0 + token) * tile.n;
        const unsigned low = f32_to_f16x2(sums[b][j][i], sums[b][j][2 + i]);
        if constexpr (kTogether == 2) {
          const unsigned high = f32_to_f16x2(sums[b + 1][j][i], sums[b + 1][j][2 + i]);
          store_global_8(to, {low, high});
        } else {
          store_global_4(to, low);
        }
      }
    }
  }
}

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>, kSpec.tile.min_blocks)
    qkv_wgmma(const __grid_constant__ QkvParams params) {
  using Block = WgmmaBlock<kSpec>;
  constexpr unsigned kRanks = Block::kRanks, kWarps = Block::kWarps, kTiles = Block::kTiles;
  constexpr unsigned kTokenTiles = Block::kTokenTiles, kStages = kSpec.tile.stages, kUnits = 2 * kTiles;
  extern __shared__ __align__(1024) unsigned char shared[];

  if (is_idle_block<kSpec>(params.m)) return;
  const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const unsigned rank = kRanks == 1 ? 0 : cluster_rank();
  const BlockTile tile = block_tile<kSpec>(blockIdx.x / kRanks, params.m);
  const unsigned first_slab = rank * Block::kSlabs / kRanks;
  const unsigned slabs = (rank + 1) * Block::kSlabs / kRanks - first_slab;
  const unsigned base = round_up(shared_address(shared), kSwizzleAlignment);
  const unsigned full = base + Block::kFullOffset, empty = base + Block::kEmptyOffset;

  if constexpr (kRanks > 1) cluster_arrive_relaxed();
  if (threadIdx.x == 0) {
#pragma unroll
    for (unsigned i = 0; i < kXStages; ++i) {
      mbarrier_init(full + i * kMbarrierBytes, kSpec.tile.copy_warps * kWarpSize);
      mbarrier_init(empty + i * kMbarrierBytes, kWarps);
    }
  }
  if (!params.weights_are_constant) wait_for_grids_ahead();

  // The lane's places in the first stage of the warp's ring; the others follow kWarpStageBytes apart.
  const unsigned ring = base + Block::kRingOffset + warp * (kStages * Block::kWarpStageBytes);
  const unsigned ring_words = ring + lane * 16, ring_scales = ring + Block::kScaleOffset + lane * 4;
  WeightFeed<kSpec> feed(params, tile, first_slab, warp, lane);
  if (warp < kWarps) {
#pragma unroll 1
    for (unsigned stage = 0; stage < kStages; ++stage) {
      const unsigned offset = stage * Block::kWarpStageBytes;
      if (stage < slabs) feed.fetch(ring_words + offset, ring_scales + offset);
      copy_async_commit();
    }
  }
  __syncthreads();  // the barriers are there
  wait_for_grids_ahead();

  if (warp >= kWarps) {
    copy_x<kSpec>(base, params, tile, first_slab, slabs, warp - kWarps, lane);
    if constexpr (kRanks > 1) {
      __syncwarp();
      cluster_wait();
      cluster_arrive();  // nobody sends to a block whose owner warps have left, and those wait for this
    }
    return;
  }

  float sums[kTiles][kTokenTiles][4] = {};
  unsigned a[2][4][4];         // set, 16 k, register of the fragment
  unsigned scales[kTiles][2];  // of the rows g and g+8, twice each
  // Unit `unit` of a slab: its 64 k are unit / kTiles, its mma tile unit % kTiles.
  const auto read_unit = [&](unsigned offset, unsigned unit) {
    const unsigned b = unit % kTiles, half = unit / kTiles;
    if (half == 0) {
      const unsigned pair = load_shared_4(ring_scales + offset + b * (kWarpSize * 4));
      scales[b][0] = byte_permute(pair, pair, 0x1010u);
      scales[b][1] = byte_permute(pair, pair, 0x3232u);
    }
    return load_shared_16(ring_words + offset + (2 * b + half) * 512);
  };
  const auto dequantize_unit = [&](const Vector4& words, unsigned unit) {
    const unsigned b = unit % kTiles;
    const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (unsigned step = 0; step < 4; ++step) {
      unsigned(&out)[4] = a[unit % 2][step];
      dequantize_split_pairs(word[step], out);
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) out[i] = mul_f16x2(out[i], scales[b][i % 2]);  // registers 1, 3 are row g+8
    }
  };

  copy_async_wait<kStages - 1>();
  dequantize_unit(read_unit(0, 0), 0);
  unsigned offset = 0;  // of the current stage
#pragma unroll 1
  for (unsigned slab = 0; slab < slabs; ++slab) {
    const unsigned x_stage = slab % kXStages;
    mbarrier_wait(full + x_stage * kMbarrierBytes, slab / kXStages % 2);
    const unsigned x = __shfl_sync(0xffffffffu, wgmma_descriptor_low(base + x_stage * Block::kXStageBytes), 0);
#pragma unroll
    for (unsigned unit = 0; unit < kUnits; ++unit) {
      if (unit + 1 == kUnits) {
        // All words of this slab have been used, so its stage takes the next one; then on to the slab after this. After
        // the last that reads what is left in the ring, and nothing comes of it.
        if (slab + kStages < slabs) {
          feed.fetch(ring_words + offset, ring_scales + offset);
        } else if (slab + kStages == slabs) {
          launch_dependents();  // what they prefetch queues behind all that this block fetches
        }
        copy_async_commit();
        copy_async_wait<kStages - 1>();
        offset = offset == (kStages - 1) * Block::kWarpStageBytes ? 0 : offset + Block::kWarpStageBytes;
      }
      const Vector4 words = read_unit(offset, (unit + 1) % kUnits);
      wgmma_fence();
#pragma unroll
      for (unsigned step = 0; step < 4; ++step) {
        wgmma_m64k16<kSpec.tile.block_m>(sums[unit % kTiles], a[unit % 2][step],
                                         wgmma_descriptor(x + (unit / kTiles * Block::kXHalfBytes + step * 32) / 16),
                                         true);
      }
      wgmma_commit();
      wgmma_wait<1>();  // for the unit before; with the first of a slab that frees the slab before
      if (unit == 0 && slab > 0 && lane == 0) mbarrier_arrive(empty + (slab - 1) % kXStages * kMbarrierBytes);
      dequantize_unit(words, (unit + 1) % kUnits);
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (unsigned b = 0; b < kTiles; ++b) {
#pragma unroll
    for (unsigned j = 0; j < kTokenTiles; ++j) wgmma_results(sums[b][j]);
  }

  if constexpr (kRanks > 1) {
    // [rank but the owner's][warp of the owner's part][mma tile][eight tokens][lane] 16 bytes
    constexpr unsigned kOwned = kWarps / kRanks, kWarpBytes = kTiles * kTokenTiles * 512;
    const unsigned owner = warp / kOwned;
    const unsigned slot = base + Block::kInboxOffset + warp % kOwned * kWarpBytes + lane * 16;
    constexpr unsigned kRankStride = kOwned * kWarpBytes;
    __syncwarp();
    cluster_wait();  // every block has started, so its shared memory may be written
    if (owner != rank) {
      const unsigned to = map_to_rank(slot + (rank < owner ? rank : rank - 1) * kRankStride, owner);
#pragma unroll
      for (unsigned b = 0; b < kTiles; ++b) {
#pragma unroll
        for (unsigned j = 0; j < kTokenTiles; ++j) {
          const float(&sum)[4] = sums[b][j];
          store_cluster_16(to + (b * kTokenTiles + j) * 512, {__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                                                              __float_as_uint(sum[2]), __float_as_uint(sum[3])});
        }
      }
    }
    cluster_arrive();
    if (owner != rank) return;
    cluster_wait();
#pragma unroll
    for (unsigned b = 0; b < kTiles; ++b) {
#pragma unroll
      for (unsigned j = 0; j < kTokenTiles; ++j) {
        add_ranks<kSpec>(slot + (b * kTokenTiles + j) * 512, kRankStride, rank, sums[b][j]);
      }
    }
  }
  store_sums<kSpec>(params.outputs[tile.matrix], tile, warp, lane, sums);
}

}  // namespace qkvjit
