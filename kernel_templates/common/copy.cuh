// SPDX-License-Identifier: Apache-2.0
// Global to shared copies in the units that the mma fragments want. With g = lane/4, t = lane%4:
//
// A weight chunk slab is 32 columns x 128 k = 2048 bytes: four vectors v of 16 bytes for each lane (g, t).
//
//   k8n   vector v = word row 4v+t,  columns 4g … 4g+3      (128 bytes of each of four rows)
//   nk8   vector v = column 4g+v,    word rows 4t … 4t+3    (64 bytes of each of eight columns)
//
// Either way a lane owns four columns x four words, and "step" s of a slab takes one word of each column:
// word row (octet of k) 4s+t for k8n, 4t+s for nk8. x follows the same order: see step_of, part_of.
//
// The hardware serves 16-byte accesses eight lanes at a time. Such eight lanes of a copy must cover whole lines in
// global memory and one 128-byte row in shared memory, and those of a read eight different 16-byte banks. Copies
// therefore walk in the order of global memory, reads in the order (g, t), and the slot functions suit both. (Measured
// at one token: sectors of four lines in one access cost 60 %, destinations in four rows 50 %.)
#pragma once

#include "common/tile_space.cuh"
#include "ptx/memory.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

inline constexpr unsigned kStepsPerSlab = 4;
inline constexpr unsigned kOctetsPerSlab = kSlabK / 8;

/// Step and lane part t of an octet of k (0 … 15 in a slab).
template <WeightLayout kLayout>
__device__ __forceinline__ unsigned step_of(unsigned octet) {
  return kLayout == WeightLayout::k8n ? octet / 4 : octet % 4;
}
template <WeightLayout kLayout>
__device__ __forceinline__ unsigned part_of(unsigned octet) {
  return kLayout == WeightLayout::k8n ? octet % 4 : octet / 4;
}

/// Where in a vector's 512 bytes lane (g, t) finds its 16. k8n copies t rows of eight g each: t is the row, and g is
/// turned so that the reads of two neighbouring g differ for each t. nk8 copies in the order of the reads.
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
    const unsigned row = slab * kOctetsPerSlab + 4 * v + t;
    const unsigned column = column0 + 4 * g;
    const unsigned valid = column >= n ? 0 : (n - column < 4 ? n - column : 4);
    const unsigned long long offset = static_cast<unsigned long long>(row) * n + column;
    copy_vector<kSpec.aligned, true, 4>(chunk_slab + 512 * v + lane_slot<kSpec.layout>(g, t), words + offset, valid);
  } else {
    const unsigned g = lane / 4, t = lane % 4;
    const unsigned column = column0 + 4 * g + v;
    const unsigned long long offset =
        static_cast<unsigned long long>(column) * (kSpec.k / 8) + slab * kOctetsPerSlab + 4 * t;
    copy_vector<kSpec.aligned, true, 4>(chunk_slab + 512 * v + lane_slot<kSpec.layout>(g, t), words + offset,
                                        column < n ? 4 : 0);
  }
}

/// The lane's word of each of its four columns in step `step` of a chunk slab, as written by copy_weight_vector.
template <Specialization kSpec>
__device__ __forceinline__ void load_step_words(unsigned chunk_slab, unsigned lane, unsigned step,
                                                unsigned (&words)[4]) {
  const unsigned address = chunk_slab + lane_slot<kSpec.layout>(lane / 4, lane % 4);
  if constexpr (kSpec.layout == WeightLayout::k8n) {
    const Vector4 v = load_shared_16(address + 512 * step);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
#pragma unroll
    for (unsigned column = 0; column < 4; ++column) words[column] = load_shared_4(address + 512 * column + 4 * step);
  }
}

/// Eight consecutive x of one token (an octet of k), zeros where the token is beyond m. `x` points at the block's
/// first token, `token` counts from there.
template <Specialization kSpec>
__device__ __forceinline__ void copy_x_octet(unsigned destination, const unsigned short* x, unsigned token,
                                             unsigned tokens, unsigned slab, unsigned slab_octet) {
  const unsigned long long offset = static_cast<unsigned long long>(token) * kSpec.k + slab * kSlabK + slab_octet * 8;
  copy_vector<kSpec.aligned, false, 2>(destination, x + offset, token < tokens ? 8 : 0);
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
    Vector2 v = {0, 0};
    if (column < n) {
      asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(row + column));
    }
    return v;
  } else {
    unsigned words[2] = {0, 0};
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
      if (column + i < n) words[i / 2] |= static_cast<unsigned>(row[column + i]) << (16 * (i % 2));
    return {words[0], words[1]};
  }
}

}  // namespace qkvjit
