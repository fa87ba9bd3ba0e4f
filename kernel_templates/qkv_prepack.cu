// SPDX-License-Identifier: Apache-2.0
// Raw weight words into the prepacked layout (kPackedK in specialization.h). One thread block makes one block of
// 64 k × 64 columns: 512 raw words through shared memory, 2048 consecutive bytes out. Blocks of Q, then K, then V.
// Columns beyond N and k beyond K become zeros. params.weights are the raw words, params.outputs the packed blocks.
//
// No trigger for dependent launches, and every thread makes its words visible to the device before it ends: the next
// launch may fetch weights before it waits, but it cannot start before this grid has ended.
#include "common/packed_tiles.cuh"
#include "ptx/memory.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>) qkv_prepack(const __grid_constant__ QkvParams params) {
  extern __shared__ __align__(16) unsigned raw[];  // [octet][column] of the block
  const PackedTile tile = packed_tile<kSpec>(blockIdx.x);
  const unsigned* words = static_cast<const unsigned*>(params.weights[tile.matrix]);
  for (unsigned i = threadIdx.x; i < kPackedBlockWords; i += kBlockThreads<kSpec>) {
    const RawPlace place = raw_place<kSpec>(tile, i);
    raw[place.octet * kPackedN + place.column] = place.exists ? words[place.word] : 0;
  }
  __syncthreads();

  unsigned* packed = static_cast<unsigned*>(params.outputs[tile.matrix]) + tile.block * kPackedBlockWords;
  for (unsigned i = threadIdx.x; i < kPackedBlockWords; i += kBlockThreads<kSpec>) {
    unsigned word = 0;
#pragma unroll
    for (unsigned nibble = 0; nibble < 8; ++nibble) {
      const PackedNibble at = packed_nibble(i, nibble);
      word |= (raw[at.k / 8 * kPackedN + at.column] >> (4 * (at.k % 8)) & 15u) << (4 * nibble);
    }
    packed[i] = word;
  }
  __threadfence();
}

}  // namespace qkvjit
