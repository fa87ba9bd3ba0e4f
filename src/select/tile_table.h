// SPDX-License-Identifier: Apache-2.0
// The tiles, as data: each row says up to how many tokens it serves and what chose it. Constant, pure.
#pragma once

#include <cstdint>
#include <optional>

#include "qkvjit/specialization.h"

namespace qkvjit {

inline constexpr std::uint64_t kAnyM = ~std::uint64_t{0};

struct TileRow {
  Pipeline pipeline;
  TileConfig tile;
  std::uint64_t max_m;  ///< tokens it serves at most where it is selected; 0: a candidate only
  bool aligned;         ///< whether it serves aligned operands, unaligned ones otherwise
  const char* reason;
  std::optional<WeightLayout> only = std::nullopt;  ///< the one layout it is for; none: both
};

// Rows of one max_m are alternatives: the first whose shared memory the GPU has is taken.
// The times are of an H200, K = 4096, N = 3*4096, k8n; docs/performance.md has the whole table.
inline constexpr TileRow kTileRows[] = {
    {Pipeline::decode,
     {.block_m = 8, .block_n = 32, .warps_k = 4, .stages = 2, .min_blocks = 4},
     8,
     true,
     "9.9 us at M = 1, within 2 % of the fastest, and the quickest to compile"},
    {Pipeline::decode,
     {.block_m = 16, .block_n = 32, .warps_k = 8, .stages = 1, .min_blocks = 3},
     16,
     true,
     "14.6 us at M = 16; 96 columns take 12.6 us but compile for over 150 ms",
     WeightLayout::k8n},
    {Pipeline::decode,
     {.block_m = 16, .block_n = 32, .warps_k = 4, .stages = 2, .min_blocks = 4},
     16,
     true,
     "15.4 us at M = 16 with nk8, for which the tile above spills on some architectures"},
    {Pipeline::decode,
     {.block_m = 32, .block_n = 64, .warps_k = 4, .stages = 2},
     32,
     true,
     "21.9 us at M = 32; 96 columns take 18.6 us but spill with nk8"},
    {Pipeline::mma_sync,
     {.block_m = 64, .block_n = 96, .warps_n = 3, .warps_k = 4, .stages = 3},
     128,
     true,
     "27.9 us at M = 64; 98304 bytes fit every GPU"},
    {Pipeline::mma_sync,
     {.block_m = 128, .block_n = 192, .warps_m = 2, .warps_n = 6, .stages = 3},
     256,
     true,
     "84 us at M = 256: the most columns in one wave"},
    {Pipeline::mma_sync,
     {.block_m = 128, .block_n = 128, .warps_n = 4, .stages = 2, .min_blocks = 2},
     512,
     true,
     "163 us at M = 512: two independent blocks a multiprocessor"},
    {Pipeline::mma_sync,
     {.block_m = 128, .block_n = 256, .warps_n = 8, .stages = 3},
     kAnyM,
     true,
     "273 us at M = 1024: a warp spans all tokens, so each weight is dequantised once a block"},
    {Pipeline::mma_sync,
     {.block_m = 128, .block_n = 128, .warps_n = 4, .stages = 2, .min_blocks = 2},
     kAnyM,
     true,
     "the same warp tile for GPUs whose blocks get 99 KB"},
    {Pipeline::decode,
     {.block_m = 16, .block_n = 32, .warps_k = 4, .stages = 2, .min_blocks = 2},
     16,
     false,
     "element-wise copies: few registers matter more than speed"},
    {Pipeline::mma_sync,
     {.block_m = 64, .block_n = 64, .warps_m = 2, .warps_n = 2, .stages = 2},
     kAnyM,
     false,
     "element-wise copies: few registers matter more than speed"},
    {Pipeline::decode,
     {.block_m = 8, .block_n = 96, .warps_k = 8, .stages = 2},
     0,
     true,
     "candidate: one block a multiprocessor, the fastest at M = 1 with unrolled steps"},
    {Pipeline::decode,
     {.block_m = 16, .block_n = 96, .warps_k = 8, .stages = 2},
     0,
     true,
     "candidate: the fastest at M = 16, and slow to compile"},
    {Pipeline::mma_sync,
     {.block_m = 32, .block_n = 64, .warps_n = 2, .warps_k = 4, .stages = 3, .min_blocks = 2},
     0,
     true,
     "candidate: decode's shape with shared x"},
    {Pipeline::mma_sync,
     {.block_m = 128, .block_n = 128, .warps_m = 2, .warps_n = 4, .stages = 3},
     0,
     true,
     "candidate: two warps along the tokens"},
    {Pipeline::simple, {.block_m = 8, .block_n = 32, .warps_m = 8}, 0, true, "the readable baseline"},
    {Pipeline::simple, {.block_m = 8, .block_n = 32, .warps_m = 8}, 0, false, "the readable baseline"},
};

}  // namespace qkvjit
