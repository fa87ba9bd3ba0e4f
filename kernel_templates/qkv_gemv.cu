// SPDX-License-Identifier: Apache-2.0
// One token a block. The ring, the split of K and the reduction are decode's (qkv_decode.cu, decode_ring.cuh); the
// products are integers. An f16 is a multiple of 2^-24 below 2^16, so it is six signed digits of seven bits,
//
//   x = d0 2^10 + d1 2^3 + d2 2^-4 + d3 2^-11 + d4 2^-18 + d5 2^-25,   |d| <= 64,
//
// and the digits of the one token take six of the eight columns that an mma of 8-bit integers has for tokens. Sums of
// weight times digit over a group are exact in int32, so weights need no exact f16 form: two nibbles stay in their
// byte,
//
//   raw        rows g, g+8 are two columns of the chunk; a word's even nibbles and its odd ones (shifted) are the two
//              halves of 32 k. All are read as n ^ 8 = q + 8, and 8 * sum of digits is taken off.
//   prepacked  row g takes the byte b = 16 h + (l ^ 8) as it is, row g+8 only 16 h, where l and h, the nibbles of two
//              neighbouring columns, have the same k: sum of l = (sum of b) - (sum of 16 h) - 8 * sum of digits.
//
// which is 3 instructions for 8 weights, where exact f16 takes 9. A non-finite x has no digits: it makes all outputs
// NaN. Arithmetic: "exact".
#include "common/copy.cuh"
#include "common/decode_ring.cuh"
#include "common/epilogue.cuh"
#include "common/tile_space.cuh"
#include "ptx/grid.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/numeric.cuh"
#include "qkv_params.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// The digits of a slab of x in a warp's shared memory: row d, kDigitPitch bytes, is [t][step][register] 4 bytes: what
/// lane (d, t) hands to the mma of a step as B operand. Byte i of register r has the k that byte i of A register 2r
/// has.
template <Specialization kSpec>
struct DigitRows {
  /// Each lane splits four values: those of (t, step, register) = (lane/8, lane/2%4, lane%2). Adds NaN to `poison`
  /// where one is not finite.
  __device__ __forceinline__ static void split(unsigned rows, unsigned x_row, unsigned lane, unsigned& poison) {
    const unsigned t = lane / 8, step = lane / 2 % 4, r = lane % 2;
    unsigned x0, x1;  // two pairs
    if constexpr (kSpec.layout == WeightLayout::prepacked) {
      // 16 k from 32 step + 16 r on: (2t, 2t+1) and (2t+8, 2t+9)
      const unsigned address = x_row + x_offset<kSpec>(0, 4 * step + 2 * r) + 4 * t;
      x0 = load_shared_4(address), x1 = load_shared_4(address + 16);
    } else {
      const unsigned octet = kSpec.layout == WeightLayout::k8n ? 4 * step + t : 4 * t + step;
      const Vector4 v = load_shared_16(x_row + x_offset<kSpec>(0, octet));
      const unsigned selector = r == 0 ? 0x5410u : 0x7632u;  // even or odd k
      x0 = byte_permute(v.x, v.y, selector), x1 = byte_permute(v.z, v.w, selector);
    }
    poison = fma_f16x2(x0, 0, poison);
    poison = fma_f16x2(x1, 0, poison);
    const unsigned address = rows + 32 * t + 8 * step + 4 * r;
    // 1536 + y has the nearest integer to y, |y| <= 512, in the low bits of its f16. The last three digits are those of
    // the first three again, once the rest is scaled up.
    constexpr unsigned kMagic = 0x66006600u;
    constexpr unsigned kInverse[3] = {0x14001400u, 0x30003000u, 0x4c004c00u};  // 2^-10, 2^-3, 2^4
    constexpr unsigned kGrid[3] = {0xe400e400u, 0xc800c800u, 0xac00ac00u};     // -2^10, -2^3, -2^-4
    constexpr unsigned kRescale = 0x74007400u;                                 // 2^14
    // With `high` false the grids are those of x times 2^14: 2^3, 2^-4, 2^-11.
#pragma unroll
    for (unsigned digit = 0; digit < kDigits; ++digit) {
      const unsigned inverse = digit < 3    ? kInverse[digit]
                               : digit == 3 ? 0x30003000u
                               : digit == 4 ? 0x4c004c00u
                                            : 0x68006800u;
      const unsigned grid = digit < 3    ? kGrid[digit]
                            : digit == 3 ? 0xc800c800u
                            : digit == 4 ? 0xac00ac00u
                                         : 0x90009000u;
      const unsigned z0 = fma_f16x2(x0, inverse, kMagic), z1 = fma_f16x2(x1, inverse, kMagic);
      x0 = fma_f16x2(sub_f16x2(z0, kMagic), grid, x0), x1 = fma_f16x2(sub_f16x2(z1, kMagic), grid, x1);
      if (digit == 2) x0 = mul_f16x2(x0, kRescale), x1 = mul_f16x2(x1, kRescale);
      store_shared_4(address + digit * kDigitPitch,
                     byte_permute(z0, z1, kSpec.layout == WeightLayout::prepacked ? 0x6240u : 0x6420u));
    }
  }

  /// The B operands of all steps: [step][register].
  __device__ __forceinline__ static void load(unsigned rows, unsigned lane, unsigned (&b)[kStepsPerSlab<kSpec>][2]) {
    const unsigned digit = lane / 4 < kDigits ? lane / 4 : kDigits - 1;  // what the last two columns hold is not used
    const unsigned address = rows + digit * kDigitPitch + 32 * (lane % 4);
    const Vector4 low = load_shared_16(address), high = load_shared_16(address + 16);
    b[0][0] = low.x, b[0][1] = low.y, b[1][0] = low.z, b[1][1] = low.w;
    b[2][0] = high.x, b[2][1] = high.y, b[3][0] = high.z, b[3][1] = high.w;
  }
};

/// The A operands of a step for the rows that are columns 4g+2*pair and 4g+2*pair+1 of the chunk.
template <WeightLayout kLayout>
__device__ __forceinline__ void integer_operand(const unsigned (&words)[4], unsigned pair, unsigned (&a)[4]) {
  if constexpr (kLayout == WeightLayout::prepacked) {
#pragma unroll
    for (unsigned s = 0; s < 2; ++s) {
      const unsigned word = words[2 * pair + s];
      a[2 * s] = word ^ 0x08080808u;
      a[2 * s + 1] = word & 0xf0f0f0f0u;
    }
  } else {
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned word = words[2 * pair + i];
      a[i] = and_xor(word, 0x0f0f0f0fu, 0x08080808u);
      a[2 + i] = and_xor(word >> 4, 0x0f0f0f0fu, 0x08080808u);
    }
  }
}

template <Specialization kSpec>
__global__ void __launch_bounds__(kBlockThreads<kSpec>, kSpec.tile.min_blocks)
    qkv_gemv(const __grid_constant__ QkvParams params) {
  using Stage = DecodeStage<kSpec>;
  constexpr bool kPrepacked = kSpec.layout == WeightLayout::prepacked;
  constexpr unsigned kChunks = Stage::kChunks;
  constexpr unsigned kRanks = kSpec.tile.cluster_k, kWarps = kSpec.tile.warps_k, kStages = kSpec.tile.stages;
  constexpr unsigned kSlabs = kSpec.k / kSlabK;
  constexpr unsigned kStageBytes = stage_bytes(kSpec), kWarpBytes = decode_warp_bytes(kSpec);
  static_assert(kSpec.tile.block_n % kChunkN == 0 && kSpec.tile.warps_m == 1 && kSpec.tile.warps_n == 1 &&
                kSpec.tile.block_m == 1);
  static_assert(Stage::kScaleOffset + kSpec.tile.block_n * 2 <= kStageBytes && kSpec.group_size == kSlabK &&
                kSpec.tile.block_k == kSlabK);
  static_assert(kRanks == 1 || kSpec.target.sm >= 90);
  extern __shared__ __align__(128) unsigned char shared[];

  const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const unsigned g = lane / 4, t = lane % 4;
  if (is_idle_block<kSpec>(params.m)) return;
  const BlockTile tile = block_tile<kSpec>(blockIdx.x / kRanks, params.m);
  const unsigned base = shared_address(shared);
  const unsigned ring = base + warp * kWarpBytes, digits = ring + kWarpBytes - kDigitBytes;
  const unsigned rank = kRanks == 1 ? 0 : cluster_rank();
  const unsigned first_slab = kRanks == 1 ? warp : warp + kWarps * rank;  // the warps of a cluster take turns
  constexpr unsigned kStride = kWarps * kRanks;

  SlabFeed<kSpec> feed(params, tile, first_slab, lane);
  bool weights_requested = false;
  if constexpr (kSpec.target.sm >= 90) {
    if constexpr (kRanks > 1) cluster_arrive_relaxed();
    weights_requested = params.weights_are_constant != 0;
    if (weights_requested) {
#pragma unroll 1
      for (unsigned turn = 0; turn < kStages && first_slab + turn * kStride < kSlabs; ++turn) {
        feed.fetch_weights(ring + turn * kStageBytes);
      }
    }
    wait_for_grids_ahead();
  }

  float sums[kChunks][4] = {};  // of the lane's two digits, columns 4g … 4g+3
  unsigned poison = 0;
  // See qkv_decode.cu for the form of this loop.
  unsigned stage = ring;
#pragma unroll 1
  for (unsigned turn = 0, slab = first_slab; slab < kSlabs + kStages * kStride; ++turn, slab += kStride) {
    if (turn >= kStages) {
      copy_async_wait<kStages - 1>();
      __syncwarp();  // other lanes copied what this one reads
      DigitRows<kSpec>::split(digits, stage + Stage::kXOffset, lane, poison);
      __syncwarp();
      unsigned b[kStepsPerSlab<kSpec>][2];
      DigitRows<kSpec>::load(digits, lane, b);
      int offset[4] = {};  // -8 times the sum of the digits, for rows g and, where raw, g+8
#pragma unroll
      for (unsigned step = 0; step < kStepsPerSlab<kSpec>; ++step) {
        constexpr unsigned kMinusEight = 0xf8f8f8f8u, kHigh = kPrepacked ? 0u : kMinusEight;
        mma_m16n8k32(offset, kMinusEight, kHigh, kMinusEight, kHigh, b[step][0], b[step][1]);
      }
#pragma unroll
      for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
        int parts[2][4];
#pragma unroll
        for (unsigned pair = 0; pair < 2; ++pair) {
#pragma unroll
          for (unsigned i = 0; i < 4; ++i) parts[pair][i] = offset[i];
        }
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
          unsigned words[2][4];
          load_half_slab_words<kSpec>(stage + chunk * chunk_slab_bytes(kSpec.tile), lane, half, words);
#pragma unroll
          for (unsigned i = 0; i < 2; ++i) {
#pragma unroll
            for (unsigned pair = 0; pair < 2; ++pair) {
              unsigned a[4];
              integer_operand<kSpec.layout>(words[i], pair, a);
              mma_m16n8k32(parts[pair], a[0], a[1], a[2], a[3], b[2 * half + i][0], b[2 * half + i][1]);
            }
          }
        }
        const Vector2 packed = load_shared_8(stage + Stage::kScaleOffset + (chunk * kChunkN + 4 * g) * 2);
        const float scale[4] = {f16_to_f32(packed.x & 0xffffu), f16_to_f32(packed.x >> 16),
                                f16_to_f32(packed.y & 0xffffu), f16_to_f32(packed.y >> 16)};
#pragma unroll
        for (unsigned pair = 0; pair < 2; ++pair) {
          // The lane has digits 2t and 2t+1, weights 2^7 and 1: below 2^28 together.
          const int low = parts[pair][0] * 128 + parts[pair][1], high = parts[pair][2] * 128 + parts[pair][3];
          const float first = static_cast<float>(kPrepacked ? low - high : low);
          const float second = static_cast<float>(high) * (kPrepacked ? 0.0625f : 1.f);
          sums[chunk][2 * pair] = fmaf(first, scale[2 * pair], sums[chunk][2 * pair]);
          sums[chunk][2 * pair + 1] = fmaf(second, scale[2 * pair + 1], sums[chunk][2 * pair + 1]);
        }
      }
      __syncwarp();  // every lane has read the slot; it may be filled again
    }
    if constexpr (kSpec.target.sm >= 90) {
      if (turn == kTriggerTurn<kSpec>) launch_dependents();
    }
    if (slab < kSlabs) {
      if (!weights_requested || turn >= kStages) feed.fetch_weights(stage);
      feed.fetch_x(stage);
    }
    copy_async_commit();
    stage = stage + kStageBytes == ring + kStages * kStageBytes ? ring : stage + kStageBytes;
  }

  copy_async_wait<0>();
  // Digits 2t, 2t+1 count in units of 2^3, 2^-11, 2^-25; the last lanes of four hold repetitions. poison is 0 or NaN.
  const float unit = t == 0 ? 8.f : t == 1 ? 4.8828125e-4f : t == 2 ? 2.98023223876953125e-8f : 0.f;
  const float nan = f16_to_f32(poison & 0xffffu) + f16_to_f32(poison >> 16);
  const bool poisoned = __any_sync(0xffffffffu, nan != 0.f || nan != nan);  // and the warp meets: its ring is idle
#pragma unroll
  for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
    float sum[4];
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      sum[i] = t == 3 ? 0.f : sums[chunk][i] * unit;
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
      if (poisoned) sum[i] = __uint_as_float(0x7fffffffu);
    }
    if (t == 0) {
      store_shared_16(
          partial_address<kSpec>(ring, 0, chunk * kChunkN + 4 * g),
          {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])});
    }
  }
  __syncthreads();
  if constexpr (kRanks == 1) {
    reduce_and_store<kSpec>(base, kWarpBytes, params.outputs[tile.matrix], tile);
  } else {
    reduce_cluster_and_store<kSpec>(base, kWarpBytes, base + kWarps * kWarpBytes, rank, params.outputs[tile.matrix],
                                    tile);
  }
}

}  // namespace qkvjit
