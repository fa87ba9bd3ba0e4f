// SPDX-License-Identifier: Apache-2.0
// Eight two's complement nibbles of one word to f16, exactly. A nibble u in the mantissa of the f16 1024.0
// (0x6400) reads 1024 + u; shifted left by four it reads 1024 + 16u. Flipping the nibble's top bit (xor 8) turns
// two's complement into offset binary, u = q + 8, and rides in the same lop3 as the exponent.
#pragma once

#include "common/packed_tiles.cuh"
#include "ptx/numeric.cuh"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// out[p] = (q[p], q[p+4]) as f16x2: the order that masks give for free. 9 instructions.
__device__ __forceinline__ void dequantize_split_pairs(unsigned word, unsigned (&out)[4]) {
  constexpr unsigned kLow = 0x000f000fu, kHigh = 0x00f000f0u;
  constexpr unsigned kLowBias = 0x64086408u;                            // 1024, and xor 8
  constexpr unsigned kHighBias = 0x64806480u;                           // 1024, and xor 8 in the upper nibble
  constexpr unsigned k1032 = 0x64086408u;                               // 1024 + 8
  constexpr unsigned kSixteenth = 0x2c002c00u, kMinus72 = 0xd480d480u;  // (1024 + 16u)/16 - 72 = u - 8
  const unsigned shifted = word >> 8;
  out[0] = sub_f16x2(and_xor(word, kLow, kLowBias), k1032);
  out[1] = fma_f16x2(and_xor(word, kHigh, kHighBias), kSixteenth, kMinus72);
  out[2] = sub_f16x2(and_xor(shifted, kLow, kLowBias), k1032);
  out[3] = fma_f16x2(and_xor(shifted, kHigh, kHighBias), kSixteenth, kMinus72);
}

/// out[p] = (q[2p], q[2p+1]) as f16x2: natural order, so x needs no reordering. Each byte is first copied into both
/// halves; the low half then keeps the even nibble and the high half the odd one. 12 instructions.
__device__ __forceinline__ void dequantize_natural_pairs(unsigned word, unsigned (&out)[4]) {
  constexpr unsigned kMask = 0x00f0000fu, kBias = 0x64806408u;
  constexpr unsigned kFactor = 0x2c003c00u, kOffset = 0xd480e408u;  // low: 1, -1032; high: 1/16, -72
  const unsigned low = byte_permute(word, word, 0x1010u);
  const unsigned high = byte_permute(word, word, 0x3232u);
  out[0] = fma_f16x2(and_xor(low, kMask, kBias), kFactor, kOffset);
  out[1] = fma_f16x2(and_xor(low >> 8, kMask, kBias), kFactor, kOffset);
  out[2] = fma_f16x2(and_xor(high, kMask, kBias), kFactor, kOffset);
  out[3] = fma_f16x2(and_xor(high >> 8, kMask, kBias), kFactor, kOffset);
}

/// The signed value of nibble `index` (0 lowest).
__device__ __forceinline__ int nibble(unsigned word, unsigned index) {
  return static_cast<int>(word << (28 - 4 * index)) >> 28;
}

/// Octet `octet` of k of a column out of the prepacked blocks of a matrix with n columns, as a raw word. Slow and
/// plain: eight reads (see kPackedK for the order).
__device__ __forceinline__ unsigned gather_packed_octet(const unsigned* words, unsigned n, unsigned octet,
                                                        unsigned column) {
  const unsigned long long block =
      static_cast<unsigned long long>(octet / 8) * ceil_div(n, kPackedN) + column / kPackedN;
  unsigned word = 0;
#pragma unroll
  for (unsigned i = 0; i < 8; ++i) {
    const PackedPlace at = packed_place(octet % 8 * 8 + i, column % kPackedN);
    word |= (words[block * kPackedBlockWords + at.word] >> (4 * at.nibble) & 15u) << (4 * i);
  }
  return word;
}

/// x[0…7] of one octet, as four f16x2, into the order of dequantize_split_pairs. 4 instructions.
__device__ __forceinline__ void split_pairs(const unsigned (&x)[4], unsigned (&out)[4]) {
  out[0] = byte_permute(x[0], x[2], 0x5410u);  // (0, 4)
  out[1] = byte_permute(x[0], x[2], 0x7632u);  // (1, 5)
  out[2] = byte_permute(x[1], x[3], 0x5410u);  // (2, 6)
  out[3] = byte_permute(x[1], x[3], 0x7632u);  // (3, 7)
}

}  // namespace qkvjit
