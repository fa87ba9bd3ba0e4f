// SPDX-License-Identifier: Apache-2.0
// The prepacked layout once more, in plain loops written from its table (kPackedK in qkvjit/specialization.h) and
// sharing nothing with the kernels.
#pragma once

#include <cstdint>
#include <vector>

namespace qkvtest {

/// The packed words of a [K, N] matrix whose nibble at (k, n) is `nibble(k, n)` (0 … 15).
template <typename Nibble>
std::vector<std::uint32_t> packed_reference(std::uint64_t k, std::uint64_t n, const Nibble& nibble) {
  // Where in a word the eight weights of the table stand: nibble number, k behind k0, column behind c.
  struct Place {
    unsigned nibble, k, column;
  };
  constexpr Place kPlaces[8] = {{0, 0, 0}, {4, 1, 0}, {1, 0, 1}, {5, 1, 1}, {2, 8, 0}, {6, 9, 0}, {3, 8, 1}, {7, 9, 1}};
  const std::uint64_t blocks_k = (k + 63) / 64, blocks_n = (n + 63) / 64;
  std::vector<std::uint32_t> words(blocks_k * blocks_n * 512);
  for (std::uint64_t block_k = 0; block_k < blocks_k; ++block_k) {
    for (std::uint64_t block_n = 0; block_n < blocks_n; ++block_n) {
      for (unsigned tile = 0; tile < 4; ++tile) {
        for (unsigned lane = 0; lane < 32; ++lane) {
          for (unsigned k16 = 0; k16 < 4; ++k16) {
            const std::uint64_t k0 = 64 * block_k + 16 * k16 + 2 * (lane % 4);
            const std::uint64_t c = 64 * block_n + 32 * (tile / 2) + 4 * (lane / 4) + 2 * (tile % 2);
            std::uint32_t word = 0;
            for (const Place& place : kPlaces) {
              const std::uint64_t row = k0 + place.k, column = c + place.column;
              if (row < k && column < n) word |= static_cast<std::uint32_t>(nibble(row, column)) << (4 * place.nibble);
            }
            words[((block_k * blocks_n + block_n) * 128 + 32 * tile + lane) * 4 + k16] = word;
          }
        }
      }
    }
  }
  return words;
}

}  // namespace qkvtest
