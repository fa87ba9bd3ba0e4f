// SPDX-License-Identifier: Apache-2.0
// 17 to 64 tokens on sm_90a, prepacked weights: still bound by reading, but with more products than mma.sync hides. A
// warpgroup owns 64 columns a tile (the rows of wgmma) and holds their weights in registers: loaded there straight from
// global memory, a few groups of 128 k ahead, dequantised step by step of 16 k while the step before multiplies. x is
// the shared B operand, copied by warps of their own into a ring of groups; two mbarriers a stage say full and empty.
//
//   weights    global -> registers (16 bytes = four steps of a lane) -> f16 A operand, two sets in turn
//   x          global -> shared [half: 64 k][token] 128 bytes, 128-byte swizzle -> B operand
//
// A cluster may split K: sums meet in distributed shared memory in the order of the ranks.
// Arithmetic: "rounded", w = rn_f16(q*s), summed in f32.
#include "common/decode_ring.cuh"
#include "common/dequantize.cuh"
#include "common/epilogue.cuh"
#include "common/tile_space.cuh"
#include "ptx/grid.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// Groups in flight in registers: the deepest up to `stages` that divides the groups of a block, for the loop over them
/// is unrolled and a wgmma may not cross its edge.
constexpr unsigned groups_ahead(unsigned groups, unsigned stages) {
  unsigned depth = stages;
  while (groups % depth != 0) --depth;
  return depth;
}

template <Specialization kSpec>
struct WgmmaBlock {
  static constexpr unsigned kMathWarps = kSpec.tile.warps_n, kGroupsOfWarps = kMathWarps / 4;
  static constexpr unsigned kTiles = kSpec.tile.block_n / kPackedN / kGroupsOfWarps;  // of 64 columns, one warpgroup
  static constexpr unsigned kGroups = kSpec.k / kSlabK / kSpec.tile.cluster_k;
  static constexpr unsigned kHalfBytes = kSpec.tile.block_m * 128, kXStageBytes = 2 * kHalfBytes;
  static_assert(kSpec.layout == WeightLayout::prepacked && kSpec.aligned && kSpec.group_size == kSlabK);
  static_assert(kMathWarps % 4 == 0 && kTiles * kGroupsOfWarps * kPackedN == kSpec.tile.block_n);
  static_assert(kGroups * kSlabK * kSpec.tile.cluster_k == kSpec.k && kSpec.tile.block_m % 8 == 0);

  /// The copying warps: x of every group of the block, group by group. Each takes every kSpec.tile.copy_warps-th four rows.
  __device__ __forceinline__ static void copy_x(unsigned ring, unsigned full, unsigned empty, const QkvParams& params,
                                                const BlockTile& tile, unsigned first_group, unsigned copy_warp,
                                                unsigned lane) {
    // Two less than the ring: a stage is released when the next group has begun, which must have arrived by then.
    constexpr unsigned kInFlight = kXStages - 2;
    const unsigned short* x = block_x<kSpec>(params, tile) + first_group * kSlabK;
    const unsigned row0 = copy_warp * 4 + lane / 8, octet = lane % 8;
#pragma unroll 1
    for (unsigned i = 0; i < kGroups + kInFlight; ++i) {
      if (i < kGroups) {
        const unsigned stage = i % kXStages;
        mbarrier_wait(empty + 8 * stage, (i / kXStages + 1) % 2);
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
#pragma unroll 8
          for (unsigned row = row0; row < kSpec.tile.block_m; row += 4 * kSpec.tile.copy_warps) {
            const unsigned short* source =
                x + static_cast<unsigned long long>(row) * kSpec.k + i * kSlabK + half * 64 + octet * 8;
            copy_async_16_stream(ring + stage * kXStageBytes + half * kHalfBytes + row * 128 + 16 * (octet ^ row % 8),
                                 source, row < tile.tokens ? 16 : 0);
          }
        }
      }
      copy_async_commit();
      if (i >= kInFlight) {
        copy_async_wait<kInFlight>();
        fence_shared_async();
        mbarrier_arrive(full + 8 * ((i - kInFlight) % kXStages));
      }
    }
  }
};

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>, kSpec.tile.min_blocks)
    qkv_wgmma(const __grid_constant__ QkvParams params) {
  using Block = WgmmaBlock<kSpec>;
  constexpr unsigned kTiles = Block::kTiles, kGroups = Block::kGroups, kRanks = kSpec.tile.cluster_k;
  constexpr unsigned kDepth = groups_ahead(kGroups, kSpec.tile.stages);
  constexpr unsigned kSums = kSpec.tile.block_m / 2;
  extern __shared__ __align__(1024) unsigned char shared[];

  if (is_idle_block<kSpec>(params.m)) return;
  const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const unsigned g = lane / 4, t = lane % 4;
  const BlockTile tile = block_tile<kSpec>(blockIdx.x / kRanks, params.m);
  const unsigned rank = kRanks == 1 ? 0 : cluster_rank();
  const unsigned base = round_up(shared_address(shared), 1024);
  const unsigned inbox = base + wgmma_ring_bytes(kSpec);
  const unsigned full = inbox + wgmma_inbox_bytes(kSpec), empty = full + 8 * kXStages;
  const unsigned first_group = rank * kGroups;

  // Where the lane's weights of the warpgroup's tile `i` and group 0 stand; 64 k further is a row of blocks further.
  const unsigned blocks_n = ceil_div(tile.n, kPackedN);
  const unsigned first_column = tile.column0 + warp / 4 * (kTiles * kPackedN);
  const unsigned* words = static_cast<const unsigned*>(params.weights[tile.matrix]) +
                          static_cast<unsigned long long>(first_group * 2) * blocks_n * kPackedBlockWords +
                          first_column / kPackedN * kPackedBlockWords + (warp % 4 * kWarpSize + lane) * 4;
  const unsigned lane_column = warp % 4 / 2 * 32 + 4 * g + warp % 2 * 2;  // row g of the tile; row g+8 is the next
  const unsigned short* scales = static_cast<const unsigned short*>(params.scales[tile.matrix]) +
                                 static_cast<unsigned long long>(first_group) * tile.n + first_column + lane_column;
  Vector4 packed[kDepth][2][kTiles];
  unsigned scale[kDepth][kTiles];
  const auto request = [&](Vector4 (&to)[2][kTiles], unsigned (&scale_to)[kTiles], unsigned group) {
#pragma unroll
    for (unsigned i = 0; i < kTiles; ++i) {
      const bool exists = first_column + i * kPackedN < tile.n;
#pragma unroll
      for (unsigned half = 0; half < 2; ++half) {
        to[half][i] = exists ? load_global_16_stream(words + (static_cast<unsigned long long>(2 * group + half) * blocks_n +
                                                              i) * kPackedBlockWords)
                             : Vector4{0, 0, 0, 0};
      }
      scale_to[i] = first_column + lane_column + i * kPackedN < tile.n
                        ? load_global_4(scales + static_cast<unsigned long long>(group) * tile.n + i * kPackedN)
                        : 0;
    }
  };

  if constexpr (kRanks > 1) cluster_arrive_relaxed();
  launch_dependents();
  if (threadIdx.x == 0) {
#pragma unroll
    for (unsigned stage = 0; stage < kXStages; ++stage) {
      mbarrier_init(full + 8 * stage, kSpec.tile.copy_warps * kWarpSize);
      mbarrier_init(empty + 8 * stage, Block::kMathWarps);
    }
  }
  const bool early = params.weights_are_constant != 0;
  const bool is_math = warp < Block::kMathWarps;
  if (!early) wait_for_grids_ahead();
  if (is_math) {
#pragma unroll
    for (unsigned s = 0; s < kDepth; ++s) request(packed[s], scale[s], s);
  }
  if (early) wait_for_grids_ahead();
  __syncthreads();  // the barriers are ready

  float sums[kTiles][kSums];
  if (is_math) {
#pragma unroll
    for (unsigned i = 0; i < kTiles; ++i) {
#pragma unroll
      for (unsigned j = 0; j < kSums; ++j) sums[i][j] = 0.f;
    }
#pragma unroll 1
    for (unsigned group0 = 0; group0 < kGroups; group0 += kDepth) {
#pragma unroll
      for (unsigned s = 0; s < kDepth; ++s) {
        const unsigned group = group0 + s, stage = group % kXStages;
        mbarrier_wait(full + 8 * stage, group / kXStages % 2);
        unsigned low[kTiles], high[kTiles];  // the scales of rows g and g+8, twice each
#pragma unroll
        for (unsigned i = 0; i < kTiles; ++i) {
          low[i] = byte_permute(scale[s][i], 0, 0x1010u), high[i] = byte_permute(scale[s][i], 0, 0x3232u);
        }
        unsigned a[2][kTiles][4];
#pragma unroll
        for (unsigned step = 0; step < kSlabK / 16; ++step) {
          unsigned(&operand)[kTiles][4] = a[step % 2];
#pragma unroll
          for (unsigned i = 0; i < kTiles; ++i) {
            const Vector4& v = packed[s][step / 4][i];
            dequantize_split_pairs(step % 4 == 0 ? v.x : step % 4 == 1 ? v.y : step % 4 == 2 ? v.z : v.w, operand[i]);
            operand[i][0] = mul_f16x2(operand[i][0], low[i]), operand[i][1] = mul_f16x2(operand[i][1], high[i]);
            operand[i][2] = mul_f16x2(operand[i][2], low[i]), operand[i][3] = mul_f16x2(operand[i][3], high[i]);
          }
          wgmma_fence();
          const unsigned long long b = b_descriptor(base + stage * Block::kXStageBytes +
                                                    step / 4 * Block::kHalfBytes + step % 4 * 32);
#pragma unroll
          for (unsigned i = 0; i < kTiles; ++i) wgmma_m64k16(sums[i], operand[i], b);
          wgmma_commit();
          wgmma_wait<1>();  // the step before is done: its operand may be overwritten,
          if (step == 0 && s > 0 && lane == 0) {
            mbarrier_arrive(empty + 8 * ((group + kXStages - 1) % kXStages));  // and its group's x
          }
        }
        if (group + kDepth < kGroups) request(packed[s], scale[s], group + kDepth);
      }
      wgmma_wait<0>();
      if (lane == 0) mbarrier_arrive(empty + 8 * ((group0 + kDepth - 1) % kXStages));
    }
  } else {
    Block::copy_x(base, full, empty, params, tile, first_group, warp - Block::kMathWarps, lane);
  }

  __syncthreads();  // the ring is idle; its memory now holds the sums
  if (is_math) {
#pragma unroll
    for (unsigned i = 0; i < kTiles; ++i) {
      const unsigned column = warp / 4 * (kTiles * kPackedN) + i * kPackedN + lane_column;
#pragma unroll
      for (unsigned j = 0; j < kSums / 4; ++j) {
#pragma unroll
        for (unsigned e = 0; e < 2; ++e) {
          store_shared_8(partial_address<kSpec>(base, 8 * j + 2 * t + e, column),
                         {__float_as_uint(sums[i][4 * j + e]), __float_as_uint(sums[i][4 * j + 2 + e])});
        }
      }
    }
  }
  __syncthreads();
  if constexpr (kRanks == 1) {
    reduce_and_store<kSpec>(base, 0, params.outputs[tile.matrix], tile);
  } else {
    reduce_cluster_and_store<kSpec>(base, 0, inbox, rank, params.outputs[tile.matrix], tile);
  }
}

}  // namespace qkvjit
