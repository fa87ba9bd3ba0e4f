// SPDX-License-Identifier: Apache-2.0
// The inverse of qkv_prepack.cu, bit for bit: params.weights are packed blocks, params.outputs raw words in the order
// kSpec.layout.
#include "common/packed_tiles.cuh"
#include "ptx/memory.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>) qkv_unpack(const __grid_constant__ QkvParams params) {
  extern __shared__ __align__(16) unsigned packed[];
  const PackedTile tile = packed_tile<kSpec>(blockIdx.x);
  const unsigned* blocks = static_cast<const unsigned*>(params.weights[tile.matrix]) + tile.block * kPackedBlockWords;
  for (unsigned i = threadIdx.x; i < kPackedBlockWords; i += kBlockThreads<kSpec>) packed[i] = blocks[i];
  __syncthreads();

  unsigned* words = static_cast<unsigned*>(params.outputs[tile.matrix]);
  for (unsigned i = threadIdx.x; i < kPackedBlockWords; i += kBlockThreads<kSpec>) {
    const RawPlace place = raw_place<kSpec>(tile, i);
    if (!place.exists) continue;
    unsigned word = 0;
#pragma unroll
    for (unsigned nibble = 0; nibble < 8; ++nibble) {
      const PackedPlace at = packed_place(place.octet * 8 + nibble, place.column);
      word |= (packed[at.word] >> (4 * at.nibble) & 15u) << (4 * nibble);
    }
    words[place.word] = word;
  }
  __threadfence();
}

}  // namespace qkvjit
