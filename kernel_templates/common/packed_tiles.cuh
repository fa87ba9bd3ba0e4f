// SPDX-License-Identifier: Apache-2.0
// Index arithmetic of the prepacked layout (its table stands at kPackedK in specialization.h): which block of which
// matrix a thread block owns, and where a weight stands in raw words and in a packed block.
#pragma once

#include "qkvjit/specialization.h"

namespace qkvjit {

/// A block of 64 k × 64 columns of one of the three matrices.
struct PackedTile {
  unsigned matrix;  // 0 Q, 1 K, 2 V
  unsigned n;       // columns of that matrix
  unsigned k_block, column0;
  unsigned long long block;  // index of the block in the packed matrix
};

template <Specialization kSpec>
__device__ __forceinline__ PackedTile packed_tile(unsigned index) {
  constexpr unsigned kBlocksK = ceil_div(kSpec.k, kPackedK);
  constexpr unsigned kQ = ceil_div(kSpec.n_q, kPackedN), kK = ceil_div(kSpec.n_k, kPackedN);
  PackedTile tile;
  tile.matrix = index < kQ * kBlocksK ? 0 : index < (kQ + kK) * kBlocksK ? 1 : 2;
  tile.n = tile.matrix == 0 ? kSpec.n_q : tile.matrix == 1 ? kSpec.n_k : kSpec.n_v;
  tile.block = index - (tile.matrix == 0 ? 0 : tile.matrix == 1 ? kQ * kBlocksK : (kQ + kK) * kBlocksK);
  const unsigned blocks_n = ceil_div(tile.n, kPackedN);
  tile.k_block = static_cast<unsigned>(tile.block) / blocks_n;
  tile.column0 = static_cast<unsigned>(tile.block) % blocks_n * kPackedN;
  return tile;
}

/// One of the 512 raw words of a block, in an order that reads whole lines: rows of 64 columns (k8n) or of eight octets
/// (nk8).
struct RawPlace {
  unsigned octet, column;   // in the block
  bool exists;              // not beyond K or N
  unsigned long long word;  // index in the matrix
};

template <Specialization kSpec>
__device__ __forceinline__ RawPlace raw_place(const PackedTile& tile, unsigned i) {
  constexpr unsigned kOctets = kSpec.k / 8;
  RawPlace place;
  if constexpr (kSpec.layout == WeightLayout::k8n) {
    place.octet = i / kPackedN, place.column = i % kPackedN;
  } else {
    place.octet = i % 8, place.column = i / 8;
  }
  const unsigned octet = tile.k_block * 8 + place.octet, column = tile.column0 + place.column;
  place.exists = octet < kOctets && column < tile.n;
  place.word = kSpec.layout == WeightLayout::k8n ? static_cast<unsigned long long>(octet) * tile.n + column
                                                 : static_cast<unsigned long long>(column) * kOctets + octet;
  return place;
}

/// Which weight nibble `nibble` of word `word` of a block is.
struct PackedNibble {
  unsigned k, column;  // in the block
};

__device__ __forceinline__ PackedNibble packed_nibble(unsigned word, unsigned nibble) {
  const unsigned k16 = word % 4, lane = word / 4 % 32, tile = word / 128;
  const unsigned g = lane / 4, t = lane % 4, pair = nibble % 4;
  return {16 * k16 + 2 * t + nibble / 4 + 8 * (pair / 2), 32 * (tile / 2) + 4 * g + 2 * (tile % 2) + pair % 2};
}

/// Its inverse.
struct PackedPlace {
  unsigned word, nibble;
};

__device__ __forceinline__ PackedPlace packed_place(unsigned k, unsigned column) {
  const unsigned tile = column / 32 * 2 + column % 4 / 2, g = column % 32 / 4, t = k % 8 / 2;
  return {(32 * tile + 4 * g + t) * 4 + k / 16, column % 2 + 2 * (k % 16 / 8) + 4 * (k % 2)};
}

}  // namespace qkvjit
