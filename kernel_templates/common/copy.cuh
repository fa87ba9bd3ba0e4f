// SPDX-License-Identifier: Apache-2.0
// Global to shared copies in the units that the mma fragments want. With g = lane/4, t = lane%4:
//
// A weight chunk slab is 32 columns x 128 k = 2048 bytes: four vectors v of 16 bytes for each lane (g, t); one of 64 k
// has two (not with nk8).
//
//   k8n        vector v = word row 4v+t,  columns 4g … 4g+3      (128 bytes of each of four rows)
//   nk8        vector v = column 4g+v,    word rows 4t … 4t+3    (64 bytes of each of eight columns)
//   prepacked  vector v = 64-block v/2 of k, mma tile v%2        (512 bytes in a row)
//
// Either way a lane owns four columns x four steps of 32 k. A step of raw words takes one word of each column: word row
// (octet of k) 4s+t for k8n, 4t+s for nk8. A step of prepacked words takes two of each mma tile, k in natural order.
// x follows: each octet (eight k, 16 bytes) of a token stands where the reads want it, see x_offset.
//
// The hardware serves 16-byte accesses eight lanes at a time. Such eight lanes of a copy must cover whole lines in
// global memory and one 128-byte row in shared memory, and those of a read eight different 16-byte banks. Copies
// therefore walk in the order of global memory, reads in the order (g, t), and the slot functions suit both. (Measured
// at one token: sectors of four lines in one access cost 60 %, destinations in four rows 50 %.)
#pragma once

#include "common/dequantize.cuh"
#include "common/tile_space.cuh"
#include "ptx/memory.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// Steps of 32 k and octets of k in a slab.
template <Specialization kSpec>
inline constexpr unsigned kStepsPerSlab = kSpec.tile.block_k / 32;
template <Specialization kSpec>
inline constexpr unsigned kOctetsPerSlab = kSpec.tile.block_k / 8;

/// Rows of a tile of x in shared memory: eight tokens, or as many as the block has.
template <Specialization kSpec>
inline constexpr unsigned kXRows = kSpec.tile.block_m < 8 ? kSpec.tile.block_m : 8;
/// Bytes of a slab of x for a tile of tokens: [half: 64 k][token][octet, permuted] 16 bytes.
template <Specialization kSpec>
inline constexpr unsigned kXTileBytes = kXRows<kSpec>* kSpec.tile.block_k * 2;

/// Where octet `octet` (0 … 15 of the slab) of token `token` of the tile stands among those bytes. A row holds eight
/// octets of one token. The permutation gives different banks to the eight rows that ldmatrix reads for one octet
/// (prepacked) or to the octets that lanes (g, t), (g+1, t) read at once: 4s+t for k8n, 4t+s for nk8.
template <Specialization kSpec>
__device__ __forceinline__ unsigned x_offset(unsigned token, unsigned octet) {
  const unsigned half = octet / 8;
  const unsigned turn = kSpec.layout == WeightLayout::prepacked ? token
                        : kSpec.layout == WeightLayout::k8n     ? token % 2 * 4
                                                                : token % 2 + 2 * half;
  return kXRows<kSpec> * 128 * half + 128 * token + 16 * (octet % 8 ^ turn);
}

/// The mma B operands of a tile of tokens for step `step` of a slab: registers 2s, 2s+1 belong to its s-th mma (16 k).
/// Raw words want the pairs (k, k+4) of an octet where `kSplitPairs`, else natural ones. With fewer than eight tokens
/// they repeat, and what comes of the repetitions is not used.
template <Specialization kSpec, bool kSplitPairs>
__device__ __forceinline__ void load_x_operands(unsigned x_tile, unsigned lane, unsigned step, unsigned (&b)[4]) {
  if constexpr (kSpec.layout == WeightLayout::prepacked) {
    const Vector4 v = load_matrices(x_tile + x_offset<kSpec>(lane % kXRows<kSpec>, 4 * step + lane / 8));
    b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
  } else {
    const unsigned g = lane / 4, t = lane % 4;
    const unsigned octet = kSpec.layout == WeightLayout::k8n ? 4 * step + t : 4 * t + step;
    const Vector4 v = load_shared_16(x_tile + x_offset<kSpec>(g % kXRows<kSpec>, octet));
    const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
    if constexpr (kSplitPairs) {
      split_pairs(pairs, b);
    } else {
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) b[i] = pairs[i];
    }
  }
}

/// Where in a vector's 512 bytes lane (g, t) finds its 16. k8n copies t rows of eight g each: t is the row, and g is
/// turned so that the reads of two neighbouring g differ for each t. The others copy in the order of the reads.
template <WeightLayout kLayout>
__device__ __forceinline__ unsigned lane_slot(unsigned g, unsigned t) {
  return kLayout == WeightLayout::k8n ? 16 * (8 * t + (g ^ (2 * t))) : 16 * (4 * g + t);
}

/// 16 bytes of `valid` elements of kBytes each, zeros behind them. Unaligned sources go element by element. Nothing
/// is read where `valid` is 0, so `source` may then point anywhere.
template <bool kAligned, bool kStream, unsigned kBytes>
__device__ __forceinline__ void copy_vector(unsigned destination, const void* source, unsigned valid) {
  if constexpr (kAligned) {
    if constexpr (kStream) {
      copy_async_16_stream(destination, source, valid * kBytes);
    } else {
      copy_async_16(destination, source, valid * kBytes);
    }
  } else {
    unsigned words[4] = {0, 0, 0, 0};
    if constexpr (kBytes == 4) {
#pragma unroll
      for (unsigned i = 0; i < 4; ++i)
        if (i < valid) words[i] = static_cast<const unsigned*>(source)[i];
    } else {
#pragma unroll
      for (unsigned i = 0; i < 8; ++i)
        if (i < valid)
          words[i / 2] |= static_cast<unsigned>(static_cast<const unsigned short*>(source)[i]) << (16 * (i % 2));
    }
    store_shared_16(destination, {words[0], words[1], words[2], words[3]});
  }
}

/// Copies a 32nd of vector v of the chunk slab at (column0, slab). Columns beyond n read as zeros.
template <Specialization kSpec>
__device__ __forceinline__ void copy_weight_vector(unsigned chunk_slab, const void* weights, unsigned n,
                                                   unsigned column0, unsigned slab, unsigned v, unsigned lane) {
  const unsigned* words = static_cast<const unsigned*>(weights);
  if constexpr (kSpec.layout == WeightLayout::k8n) {
    const unsigned g = lane % 8, t = lane / 8;
    const unsigned row = slab * kOctetsPerSlab<kSpec> + 4 * v + t;
    const unsigned column = column0 + 4 * g;
    const unsigned valid = column >= n ? 0 : (n - column < 4 ? n - column : 4);
    const unsigned long long offset = static_cast<unsigned long long>(row) * n + column;
    copy_vector<kSpec.aligned, true, 4>(chunk_slab + 512 * v + lane_slot<kSpec.layout>(g, t), words + offset, valid);
  } else if constexpr (kSpec.layout == WeightLayout::nk8) {
    static_assert(kSpec.layout != WeightLayout::nk8 || kSpec.tile.block_k == kSlabK);
    const unsigned g = lane / 4, t = lane % 4;
    const unsigned column = column0 + 4 * g + v;
    const unsigned long long offset =
        static_cast<unsigned long long>(column) * (kSpec.k / 8) + slab * kOctetsPerSlab<kSpec> + 4 * t;
    copy_vector<kSpec.aligned, true, 4>(chunk_slab + 512 * v + lane_slot<kSpec.layout>(g, t), words + offset,
                                        column < n ? 4 : 0);
  } else {
    // Blocks are whole and aligned whatever n is; a chunk beyond n may lie behind the last of them.
    const unsigned long long block =
        static_cast<unsigned long long>(slab * (kSpec.tile.block_k / kPackedK) + v / 2) * ceil_div(n, kPackedN);
    const unsigned long long offset =
        block * kPackedBlockWords + (column0 / kChunkN) * (kPackedBlockWords / 2) + (v % 2) * 128 + lane * 4;
    copy_vector<true, true, 4>(chunk_slab + 512 * v + lane * 16, words + offset, column0 < n ? 4 : 0);
  }
}

/// The four words of a lane in step `step` of a chunk slab, as written by copy_weight_vector: of its four columns where
/// the words are raw, else [mma tile][16 k].
template <Specialization kSpec>
__device__ __forceinline__ void load_step_words(unsigned chunk_slab, unsigned lane, unsigned step,
                                                unsigned (&words)[4]) {
  const unsigned address = chunk_slab + lane_slot<kSpec.layout>(lane / 4, lane % 4);
  if constexpr (kSpec.layout == WeightLayout::k8n) {
    const Vector4 v = load_shared_16(address + 512 * step);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kSpec.layout == WeightLayout::nk8) {
#pragma unroll
    for (unsigned column = 0; column < 4; ++column) words[column] = load_shared_4(address + 512 * column + 4 * step);
  } else {
#pragma unroll
    for (unsigned tile = 0; tile < 2; ++tile) {
      const Vector2 v = load_shared_8(address + 512 * (step / 2 * 2 + tile) + 8 * (step % 2));
      words[2 * tile] = v.x, words[2 * tile + 1] = v.y;
    }
  }
}

/// The same for two steps at once, 2*half and 2*half+1: fewer and wider reads.
template <Specialization kSpec>
__device__ __forceinline__ void load_half_slab_words(unsigned chunk_slab, unsigned lane, unsigned half,
                                                     unsigned (&words)[2][4]) {
  const unsigned address = chunk_slab + lane_slot<kSpec.layout>(lane / 4, lane % 4);
  if constexpr (kSpec.layout == WeightLayout::k8n) {
    load_step_words<kSpec>(chunk_slab, lane, 2 * half, words[0]);
    load_step_words<kSpec>(chunk_slab, lane, 2 * half + 1, words[1]);
  } else if constexpr (kSpec.layout == WeightLayout::nk8) {
#pragma unroll
    for (unsigned column = 0; column < 4; ++column) {
      const Vector2 v = load_shared_8(address + 512 * column + 8 * half);
      words[0][column] = v.x, words[1][column] = v.y;
    }
  } else {
#pragma unroll
    for (unsigned tile = 0; tile < 2; ++tile) {
      const Vector4 v = load_shared_16(address + 512 * (2 * half + tile));
      words[0][2 * tile] = v.x, words[0][2 * tile + 1] = v.y;
      words[1][2 * tile] = v.z, words[1][2 * tile + 1] = v.w;
    }
  }
}

/// The A operand of a step's mma `s` (16 k) for rows that are columns 4g+2*pair (rows g) and 4g+2*pair+1 (rows g+8) of
/// the chunk, out of the four dequantised words of load_step_words.
template <WeightLayout kLayout>
__device__ __forceinline__ void weight_operand(const unsigned (&words)[4][4], unsigned pair, unsigned s,
                                               unsigned (&a)[4]) {
  if constexpr (kLayout == WeightLayout::prepacked) {
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) a[i] = words[2 * pair + s][i];
  } else {
    a[0] = words[2 * pair][2 * s], a[1] = words[2 * pair + 1][2 * s];
    a[2] = words[2 * pair][2 * s + 1], a[3] = words[2 * pair + 1][2 * s + 1];
  }
}

/// Eight consecutive x of one token (an octet of k), zeros where the token is beyond m. `x` points at the block's
/// first token, `token` counts from there.
template <Specialization kSpec>
__device__ __forceinline__ void copy_x_octet(unsigned destination, const unsigned short* x, unsigned token,
                                             unsigned tokens, unsigned slab, unsigned slab_octet) {
  const unsigned long long offset =
      static_cast<unsigned long long>(token) * kSpec.k + slab * kSpec.tile.block_k + slab_octet * 8;
  // Past L1, whose lines in flight would be too few for many tokens; through it where several narrow blocks, or blocks
  // of one token, share a multiprocessor and with it x.
  constexpr bool kShared = kSpec.tile.block_n < 64 || (kSpec.tile.block_m == 1 && kSpec.tile.min_blocks > 1);
  constexpr bool kStream = !kShared;
  copy_vector<kSpec.aligned, kStream, 2>(destination, x + offset, token < tokens ? 8 : 0);
}

/// x at the block's first token.
template <Specialization kSpec>
__device__ __forceinline__ const unsigned short* block_x(const QkvParams& params, const BlockTile& tile) {
  return static_cast<const unsigned short*>(params.x) + tile.token0 * kSpec.k;
}

/// Four consecutive scales of a group's row, from global memory; zeros beyond n.
template <Specialization kSpec>
__device__ __forceinline__ Vector2 load_scales_4(const void* scales, unsigned n, unsigned group, unsigned column) {
  const unsigned short* row = static_cast<const unsigned short*>(scales) + static_cast<unsigned long long>(group) * n;
  if constexpr (kSpec.aligned) {
    return column < n ? load_global_8(row + column) : Vector2{0, 0};
  } else {
    unsigned words[2] = {0, 0};
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
      if (column + i < n) words[i / 2] |= static_cast<unsigned>(row[column + i]) << (16 * (i % 2));
    return {words[0], words[1]};
  }
}

}  // namespace qkvjit
