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
};

/// Bytes between what a lane copies of one row of words and of the next: four rows of k8n (vector v takes v times as
/// many), one row of blocks of the prepacked layout; nk8 has its rows along k, and 0.
template <Specialization kSpec>
__device__ __forceinline__ unsigned long long word_row_bytes(unsigned n) {
  if constexpr (kSpec.layout == WeightLayout::k8n) return static_cast<unsigned long long>(n) * 16;
  if constexpr (kSpec.layout == WeightLayout::nk8) return 0;
  return static_cast<unsigned long long>(ceil_div(n, kPackedN)) * (kPackedBlockWords * 4);
}

/// How many such rows a slab has, and the bytes by which it lies further along a row.
template <Specialization kSpec>
__device__ __forceinline__ constexpr unsigned word_rows_per_slab() {
  return kSpec.layout == WeightLayout::nk8 ? 0 : kSpec.tile.block_k / (kSpec.layout == WeightLayout::k8n ? 32 : 64);
}
template <Specialization kSpec>
__device__ __forceinline__ constexpr unsigned word_column_bytes_per_slab() {
  return kSpec.layout == WeightLayout::nk8 ? kSpec.tile.block_k / 2 : 0;
}

/// Where a lane's words of slab `slab` begin for the columns from column0 on.
template <Specialization kSpec>
__device__ __forceinline__ const unsigned char* first_word(const void* weights, unsigned n, unsigned column0,
                                                           unsigned slab, unsigned lane) {
  const unsigned char* words = static_cast<const unsigned char*>(weights) +
                               word_row_bytes<kSpec>(n) * word_rows_per_slab<kSpec>() * slab +
                               static_cast<unsigned long long>(word_column_bytes_per_slab<kSpec>()) * slab;
  if constexpr (kSpec.layout == WeightLayout::k8n) {
    return words + (static_cast<unsigned long long>(lane / 8) * n + column0 + lane % 8 * 4) * 4;
  } else if constexpr (kSpec.layout == WeightLayout::nk8) {
    return words + static_cast<unsigned long long>(column0 + lane / 4 * 4) * (kSpec.k / 2) + lane % 4 * 16;
  } else {
    return words + (column0 / kChunkN) * (kPackedBlockWords * 2) + lane * 16;
  }
}

/// copy_weight_vector with a lane's pointer at hand: vector v of chunk `chunk`; `words` and `row_bytes` are those of
/// the two functions above. With kRagged, columns beyond `columns` (counted from column0) read as zeros.
template <Specialization kSpec, bool kRagged>
__device__ __forceinline__ void copy_chunk_vector(unsigned chunk_slab, const unsigned char* words,
                                                  unsigned long long row_bytes, unsigned chunk, unsigned v, int columns,
                                                  unsigned lane) {
  if constexpr (kSpec.layout == WeightLayout::k8n) {
    const unsigned g = lane % 8, t = lane / 8;
    int valid = 4;
    if constexpr (kRagged || !kSpec.aligned) {
      valid = min(max(columns - static_cast<int>(chunk * kChunkN + 4 * g), 0), 4);
    }
    copy_vector<kSpec.aligned, true, 4>(chunk_slab + 512 * v + lane_slot<kSpec.layout>(g, t),
                                        words + row_bytes * v + chunk * (kChunkN * 4), static_cast<unsigned>(valid));
  } else if constexpr (kSpec.layout == WeightLayout::nk8) {
    static_assert(kSpec.layout != WeightLayout::nk8 || kSpec.tile.block_k == kSlabK);
    const unsigned g = lane / 4, t = lane % 4;
    const bool present = !kRagged || static_cast<int>(chunk * kChunkN + 4 * g + v) < columns;
    copy_vector<kSpec.aligned, true, 4>(chunk_slab + 512 * v + lane_slot<kSpec.layout>(g, t),
                                        words + static_cast<unsigned long long>(chunk * kChunkN + v) * (kSpec.k / 2),
                                        present ? 4 : 0);
  } else {
    // Blocks are whole and aligned whatever n is; a chunk beyond n may lie behind the last of them.
    const bool present = !kRagged || static_cast<int>(chunk * kChunkN) < columns;
    copy_vector<true, true, 4>(chunk_slab + 512 * v + lane * 16,
                               words + row_bytes * (v / 2) + chunk * (kPackedBlockWords * 2) + v % 2 * 512,
                               present ? 4 : 0);
  }
}

/// A warp's weights, scales and x on their way from global memory to its ring, one slab after the other; the slabs of a
/// warp are kStride apart. It keeps a lane's pointers, so that a copy is little more than its own instruction: computed
/// anew for each slab, the addresses were a fifth of all instructions.
template <Specialization kSpec>
class SlabFeed {
  using Stage = DecodeStage<kSpec>;
  static constexpr unsigned kStride = kSpec.tile.warps_k * kSpec.tile.cluster_k;
  // Whether some column tile of the block ends beyond its matrix.
  static constexpr bool kRagged =
      kSpec.n_q % kSpec.tile.block_n != 0 || kSpec.n_k % kSpec.tile.block_n != 0 || kSpec.n_v % kSpec.tile.block_n != 0;
  // Octets of x of a token tile, and of those what a lane copies. Eight lanes take 128 bytes of one token; first the
  // lower halves of all tokens, then the upper ones.
  static constexpr unsigned kRows = kXRows<kSpec>, kOctets = kRows * kOctetsPerSlab<kSpec>;
  static constexpr unsigned kItems = ceil_div(kOctets, kWarpSize);

 public:
  __device__ __forceinline__ SlabFeed(const QkvParams& params, const BlockTile& tile, unsigned first_slab,
                                      unsigned lane)
      : weight_slab_(first_slab), lane_(lane), rows_left_(static_cast<int>(tile.tokens)) {
    words_ = first_word<kSpec>(params.weights[tile.matrix], tile.n, tile.column0, first_slab, lane);
    words_row_bytes_ = word_row_bytes<kSpec>(tile.n);
    scales_ = static_cast<const unsigned short*>(params.scales[tile.matrix]) + tile.column0 + lane * 8;
    scales_row_ = tile.n;
    columns_ = static_cast<int>(tile.n - tile.column0);
    words_stride_ = words_row_bytes_ * (word_rows_per_slab<kSpec>() * kStride) +
                    static_cast<unsigned long long>(word_column_bytes_per_slab<kSpec>()) * kStride;
    x_ = block_x<kSpec>(params, tile) + first_slab * kSpec.tile.block_k +
         static_cast<unsigned long long>(item_row(0)) * kSpec.k + item_octet(0) * 8;
#pragma unroll
    for (unsigned i = 0; i < kItems; ++i) x_to_[i] = x_offset<kSpec>(item_row(i), item_octet(i));
  }

  /// Requests the weights and scales of the next slab. Every lane of the warp calls it.
  __device__ __forceinline__ void fetch_weights(unsigned stage) {
#pragma unroll
    for (unsigned chunk = 0; chunk < Stage::kChunks; ++chunk) {
#pragma unroll
      for (unsigned v = 0; v < kSpec.tile.block_k / 32; ++v) {
        copy_chunk_vector<kSpec, kRagged>(stage + chunk * chunk_slab_bytes(kSpec.tile), words_, words_row_bytes_, chunk,
                                          v, columns_, lane_);
      }
    }
    words_ += words_stride_;
    if (lane_ < Stage::kScaleLanes) {
      int valid = 8;
      if constexpr (kRagged || !kSpec.aligned) valid = min(max(columns_ - static_cast<int>(lane_ * 8), 0), 8);
      const unsigned group = weight_slab_ * kSpec.tile.block_k / kSpec.group_size;
      copy_vector<kSpec.aligned, false, 2>(stage + Stage::kScaleOffset + lane_ * 16,
                                           scales_ + static_cast<unsigned long long>(group) * scales_row_,
                                           static_cast<unsigned>(valid));
    }
    weight_slab_ += kStride;
  }

  /// Requests the x of the next slab.
  __device__ __forceinline__ void fetch_x(unsigned stage) {
#pragma unroll
    for (unsigned token_tile = 0; token_tile < Stage::kTokenTiles; ++token_tile) {
#pragma unroll
      for (unsigned i = 0; i < kItems; ++i) {
        if (kOctets % kWarpSize != 0 && lane_ + i * kWarpSize >= kOctets) break;
        const bool present = static_cast<int>(token_tile * 8 + item_row(i)) < rows_left_;
        // Past L1, whose lines in flight would be too few for many tokens; through it where several narrow blocks, or
        // blocks of one token, share a multiprocessor and with it x.
        constexpr bool kShared = kSpec.tile.block_n < 64 || (kSpec.tile.block_m == 1 && kSpec.tile.min_blocks > 1);
        copy_vector<kSpec.aligned, !kShared, 2>(
            stage + Stage::kXOffset + token_tile * kXTileBytes<kSpec> + x_to_[i],
            x_ + item_offset(i) + static_cast<unsigned long long>(token_tile * 8) * kSpec.k, present ? 8 : 0);
      }
    }
    x_ += kStride * kSpec.tile.block_k;
  }

 private:
  __device__ __forceinline__ unsigned item_row(unsigned i) const { return (lane_ + i * kWarpSize) / 8 % kRows; }
  __device__ __forceinline__ unsigned item_octet(unsigned i) const {
    const unsigned item = lane_ + i * kWarpSize;
    return item % 8 + item / (8 * kRows) * 8;
  }

  /// What item i lies behind item 0 of the lane, in elements: a constant where the tile has eight rows.
  __device__ __forceinline__ long long item_offset(unsigned i) const {
    if constexpr (kRows == 8) {
      return static_cast<long long>(i % 2 * 4) * kSpec.k + i / 2 * 64;
    } else {
      return (static_cast<long long>(item_row(i)) - item_row(0)) * kSpec.k +
             (static_cast<long long>(item_octet(i)) - item_octet(0)) * 8;
    }
  }

  const unsigned char* words_;
  unsigned long long words_row_bytes_;
  unsigned long long words_stride_;
  const unsigned short* scales_;
  const unsigned short* x_;
  unsigned x_to_[kItems];
  unsigned scales_row_;
  unsigned weight_slab_;
  unsigned lane_;
  int columns_;    // from the block's first to the matrix' end
  int rows_left_;  // tokens of the block
};

}  // namespace qkvjit
