// SPDX-License-Identifier: Apache-2.0
// The plain kernel: read it first. One thread computes one output, a warp 32 columns of one token, in f32 without
// tensor cores: q = sum over k of x * rn_f16(q4 * s). It is the baseline that the GPU tests compare speed and
// results with. Arithmetic: "rounded".
#include "common/dequantize.cuh"
#include "common/tile_space.cuh"
#include "ptx/memory.cuh"
#include "ptx/numeric.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>) qkv_simple(const __grid_constant__ QkvParams params) {
  static_assert(kSpec.tile.block_n == kWarpSize && kSpec.tile.block_m == kSpec.tile.warps_m);
  constexpr unsigned kThreads = kBlockThreads<kSpec>;
  extern __shared__ __align__(16) unsigned short x_slab[];  // [block_m][128]

  const BlockTile tile = block_tile<kSpec>(blockIdx.x, params.m);
  const unsigned column = tile.column0 + threadIdx.x % kWarpSize;
  const unsigned row = threadIdx.x / kWarpSize;
  const unsigned* words = static_cast<const unsigned*>(params.weights[tile.matrix]);
  const unsigned short* scales = static_cast<const unsigned short*>(params.scales[tile.matrix]);
  const unsigned short* x = static_cast<const unsigned short*>(params.x);

  float sum = 0.f;
  for (unsigned slab = 0; slab < kSpec.k / kSlabK; ++slab) {
    for (unsigned i = threadIdx.x; i < kSpec.tile.block_m * kSlabK; i += kThreads) {
      const unsigned long long token = tile.token0 + i / kSlabK;
      x_slab[i] = i / kSlabK < tile.tokens ? x[token * kSpec.k + slab * kSlabK + i % kSlabK] : 0;
    }
    __syncthreads();
    if (column < tile.n) {
      const float scale = f16_to_f32(scales[static_cast<unsigned long long>(slab) * tile.n + column]);
      for (unsigned octet = 0; octet < kSlabK / 8; ++octet) {
        const unsigned long long word_row = slab * (kSlabK / 8) + octet;
        unsigned word = 0;
        if constexpr (kSpec.layout == WeightLayout::k8n) {
          word = words[word_row * tile.n + column];
        } else if constexpr (kSpec.layout == WeightLayout::nk8) {
          word = words[static_cast<unsigned long long>(column) * (kSpec.k / 8) + word_row];
        } else {
          word = gather_packed_octet(words, tile.n, static_cast<unsigned>(word_row), column);
        }
#pragma unroll
        for (unsigned i = 0; i < 8; ++i) {
          // The product of a 4-bit integer and an f16 is exact in f32, so this rounds once.
          const float w = f16_to_f32(f32_to_f16(static_cast<float>(nibble(word, i)) * scale));
          sum = fmaf(f16_to_f32(x_slab[row * kSlabK + octet * 8 + i]), w, sum);
        }
      }
    }
    __syncthreads();
  }
  if (column < tile.n && row < tile.tokens) {
    static_cast<unsigned short*>(params.outputs[tile.matrix])[(tile.token0 + row) * tile.n + column] = f32_to_f16(sum);
  }
}

}  // namespace qkvjit
