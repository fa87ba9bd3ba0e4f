// SPDX-License-Identifier: Apache-2.0
// One tile space over the columns of Q, K and V: the column tiles of Q come first, then K's, then V's, and no
// tile spans two matrices. Token tiles run fastest inside a band, so that blocks that run together share weights.
#pragma once

#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// The part of the outputs one block computes.
struct BlockTile {
  unsigned matrix;   // 0 Q, 1 K, 2 V
  unsigned n;        // columns of that matrix
  unsigned column0;  // first column in it
  unsigned long long token0;
  unsigned tokens;  // how many of block_m are below m
};

template <Specialization kSpec>
__device__ __forceinline__ BlockTile block_tile(unsigned block, unsigned long long m) {
  constexpr unsigned kTiles = column_tiles(kSpec);
  constexpr unsigned kTilesQ = ceil_div(kSpec.n_q, kSpec.tile.block_n);
  constexpr unsigned kTilesK = ceil_div(kSpec.n_k, kSpec.tile.block_n);
  constexpr unsigned kBandTokens = 2048;  // x of a band stays in L2 while the columns pass
  constexpr unsigned kBand = max_u(kBandTokens / kSpec.tile.block_m, 1u);
  const unsigned token_tiles = static_cast<unsigned>((m + kSpec.tile.block_m - 1) / kSpec.tile.block_m);
  const unsigned band = block / (kBand * kTiles);
  const unsigned rest = block - band * (kBand * kTiles);
  const unsigned band_tiles = token_tiles - band * kBand < kBand ? token_tiles - band * kBand : kBand;
  const unsigned column_tile = rest / band_tiles;
  const unsigned token_tile = band * kBand + rest - column_tile * band_tiles;

  BlockTile tile;
  tile.token0 = static_cast<unsigned long long>(token_tile) * kSpec.tile.block_m;
  tile.tokens = m - tile.token0 < kSpec.tile.block_m ? static_cast<unsigned>(m - tile.token0) : kSpec.tile.block_m;
  tile.matrix = column_tile < kTilesQ ? 0 : column_tile < kTilesQ + kTilesK ? 1 : 2;
  tile.n = tile.matrix == 0 ? kSpec.n_q : tile.matrix == 1 ? kSpec.n_k : kSpec.n_v;
  const unsigned first_tile = tile.matrix == 0 ? 0 : tile.matrix == 1 ? kTilesQ : kTilesQ + kTilesK;
  tile.column0 = (column_tile - first_tile) * kSpec.tile.block_n;
  // One constant where the three are equal, so that row strides fold into the addresses.
  if constexpr (kSpec.n_q == kSpec.n_k && kSpec.n_k == kSpec.n_v) tile.n = kSpec.n_q;
  return tile;
}

}  // namespace qkvjit
