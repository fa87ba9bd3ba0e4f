// SPDX-License-Identifier: Apache-2.0
// The one value that names a kernel. Read by the host, by nvcc and by NVRTC alike, so it includes
// nothing; a kernel takes it as its template parameter: template <Specialization kSpec> __global__ ….
// Equal values mean the same compiled artifact. M, the token count, is never part of it.
#pragma once

namespace qkvjit {

/// Element types. `u32` is a word of eight packed 4-bit weights.
enum class DType : unsigned char { f16, bf16, f32, u32 };

/// Order of the packed weight words. Word (k/8, n) holds k = 8*row … 8*row+7 of column n, the lowest
/// k in the lowest nibble.
///   k8n  row-major [K/8, N]   (GPTQ's order, the default)
///   nk8  row-major [N, K/8]   (KAIO's buffers as its kernel reads them)
///   prepacked  what prepack() makes: blocks of 64 k × 64 columns in the order of the mma fragments (see kPackedK)
enum class WeightLayout : unsigned char { k8n, nk8, prepacked };

/// Kernel families; each is one file in kernel_templates/ and states its arithmetic (CONTRACT: accuracy).
///   simple    qkv_simple.cu    plain f32 arithmetic, w = rn(q*s) ("rounded"); the readable baseline
///   gemv      qkv_gemv.cu      one token: x in 7-bit digits, products exact in int32 on the tensor cores ("exact")
///   decode    qkv_decode.cu    mma.sync, warps split K, integers exact, scale in f32 ("exact")
///   mma_sync  qkv_mma_sync.cu  mma.sync, block-tiled, w = rn(q*s) ("rounded")
///   wgmma     qkv_wgmma.cu     sm_90a, prepacked: wgmma with the weights as register operand ("rounded")
///   prefill   qkv_prefill.cu   sm_90a, prepacked: persistent blocks, x by tensor copies, wgmma ("rounded")
///   prepack   qkv_prepack.cu   no projection: raw words into the prepacked layout
///   unpack    qkv_unpack.cu    its inverse, bit for bit
enum class Pipeline : unsigned char { simple, gemv, decode, mma_sync, wgmma, prefill, prepack, unpack };

/// How one thread block cuts its output tile. Extents in elements; block_m counts tokens, block_n output
/// columns. Every pipeline walks K in slabs of block_k. wgmma: warps_n is a multiple of four (warpgroups of 64 columns
/// each, or a multiple of 64), copy_warps at least 1, stages the depth of each warp's ring of weights. prefill: warps_n
/// likewise, of up to three warpgroups, copy_warps 4, block_k 64.
struct TileConfig {
  unsigned block_m = 0;     ///< tokens a block
  unsigned block_n = 0;     ///< output columns a block
  unsigned warps_m = 1;     ///< warps along the tokens
  unsigned warps_n = 1;     ///< warps along the columns
  unsigned warps_k = 1;     ///< warps along K; their sums are reduced in fixed order
  unsigned stages = 1;      ///< depth of the cp.async ring, in slabs
  unsigned min_blocks = 1;  ///< resident blocks a multiprocessor that registers are limited for
  unsigned block_k = 128;   ///< k of a ring stage, 128 or 64 (decode, mma_sync; not with nk8 words)
  unsigned copy_warps = 0;  ///< further warps that only copy x into shared memory (wgmma)
  unsigned cluster_k = 1;   ///< blocks of a cluster that split K and add through distributed shared memory; sm_90
  unsigned cluster_n = 1;   ///< blocks of a cluster that share x, with neighbouring columns (prefill)

  constexpr bool operator==(const TileConfig&) const = default;
};

/// What the code is generated for: compute capability 10*major+minor. An architecture-specific target
/// (suffix 'a') never moves to another architecture.
struct Target {
  unsigned sm = 80;
  char suffix = '\0';  ///< '\0' or 'a'

  constexpr bool operator==(const Target&) const = default;
};

struct Specialization {
  Pipeline pipeline = Pipeline::simple;
  WeightLayout layout = WeightLayout::k8n;
  DType activation_dtype = DType::f16;
  DType scale_dtype = DType::f16;
  unsigned n_q = 0;           ///< columns of Q
  unsigned n_k = 0;           ///< columns of K
  unsigned n_v = 0;           ///< columns of V
  unsigned k = 0;             ///< inner extent
  unsigned group_size = 128;  ///< k that share a scale
  bool aligned = false;       ///< bases 16-byte aligned and every row a multiple of 16 bytes
  TileConfig tile = {};
  Target target = {};

  constexpr bool operator==(const Specialization&) const = default;
};

/// Whether the kernel can be launched while the one ahead still runs: it waits for it itself, and allows its own
/// dependents. Such a launch is padded to as many blocks on every multiprocessor (decode_ring.cuh).
constexpr bool waits_for_grids_ahead(const Specialization& s) {
  return s.target.sm >= 90 && (s.pipeline == Pipeline::gemv || s.pipeline == Pipeline::decode ||
                               s.pipeline == Pipeline::wgmma || s.pipeline == Pipeline::prefill);
}

/// k of a weight group, and of a slab unless a tile says otherwise.
inline constexpr unsigned kSlabK = 128;
inline constexpr unsigned kWarpSize = 32;
/// Columns that one warp-wide 16-byte load covers (8 lane rows of 4 columns).
inline constexpr unsigned kChunkN = 32;
/// Bytes of weights in one slab of one chunk: block_k × 32 columns × 4 bit.
constexpr unsigned chunk_slab_bytes(const TileConfig& t) { return t.block_k * kChunkN / 2; }

/// A block of the prepacked layout: 64 k × 64 columns, 512 words. A matrix is [ceil(K/64)][ceil(N/64)] of them, padded
/// with zeros. Word ((k/64 * ceil(N/64) + n/64) * 128 + 32 * tile + lane) * 4 + k/16%4 belongs to mma tile `tile` of
/// the block (16 columns) and lane 4g+t; with c = 32*(tile/2) + 4g + 2*(tile%2) and k0 = 16*(k/16%4) + 2t its nibbles
/// are
///
///   nibble  0        4         1        5          2         6          3         7
///   (k, n)  (k0, c)  (k0+1, c) (k0, c+1) (k0+1, c+1) (k0+8, c) (k0+9, c) (k0+8, c+1) (k0+9, c+1)
///
/// so that the four masked pairs (p, p+4) are the four registers of an mma A operand whose rows g and g+8 are the
/// columns c and c+1, k in natural order.
inline constexpr unsigned kPackedK = 64;
inline constexpr unsigned kPackedN = 64;
inline constexpr unsigned kPackedBlockWords = 512;

constexpr unsigned ceil_div(unsigned a, unsigned b) { return a / b + (a % b != 0 ? 1u : 0u); }

constexpr unsigned threads_per_block(const TileConfig& t) {
  return (t.warps_m * t.warps_n * t.warps_k + t.copy_warps) * kWarpSize;
}

/// The same as a constant: NVRTC accepts no function call inside __launch_bounds__.
template <Specialization kSpec>
inline constexpr unsigned kBlockThreads = threads_per_block(kSpec.tile);

/// Column tiles of Q, K and V together; one launch covers all three.
/// In prefill a tile may span matrices, and there are as many as whole clusters take.
constexpr unsigned column_tiles(const Specialization& s) {
  if (s.pipeline == Pipeline::prefill) {
    const unsigned units = ceil_div(s.n_q, kPackedN) + ceil_div(s.n_k, kPackedN) + ceil_div(s.n_v, kPackedN);
    return ceil_div(units * kPackedN, s.tile.block_n * s.tile.cluster_n) * s.tile.cluster_n;
  }
  return ceil_div(s.n_q, s.tile.block_n) + ceil_div(s.n_k, s.tile.block_n) + ceil_div(s.n_v, s.tile.block_n);
}

constexpr unsigned max_u(unsigned a, unsigned b) { return a > b ? a : b; }
constexpr unsigned round_up(unsigned value, unsigned multiple) { return ceil_div(value, multiple) * multiple; }

/// Shared-memory bytes of one ring stage. decode: per warp (each warp has a ring of its own), a multiple of 128 so that
/// copied rows of 128 bytes stay whole; mma_sync: per block; wgmma: the weights and scales of all warps (4 bytes of
/// scales a lane and mma tile), without x, whose ring is of a depth of its own.
constexpr unsigned stage_bytes(const Specialization& s) {
  const unsigned weights = (s.tile.block_n / kChunkN) * chunk_slab_bytes(s.tile);
  const unsigned x = s.tile.block_m * s.tile.block_k * 2;
  if (s.pipeline == Pipeline::wgmma) return weights + s.tile.block_n / 16 * kWarpSize * 4;
  if (s.pipeline == Pipeline::decode || s.pipeline == Pipeline::gemv)
    return weights + x + round_up(s.tile.block_n * 2, 128);
  if (s.pipeline == Pipeline::prefill) return weights + x + s.tile.block_n * 2;
  return weights + x;
}

/// Partial sums of one warp, f32 [block_m][block_n + 4]: the pad keeps a warp's stores free of bank conflicts. mma_sync
/// goes without, for its tiles fill the 99 KB of small GPUs.
constexpr unsigned partial_pitch(const TileConfig& t) {
  return t.warps_n > 1 && t.copy_warps == 0 ? t.block_n : t.block_n + 4;
}
constexpr unsigned partial_bytes(const TileConfig& t) { return t.block_m * partial_pitch(t) * 4; }

/// gemv: bytes of the digits of a slab of x, one row of 128 and a pad of 16 for each of six.
inline constexpr unsigned kDigits = 6;
inline constexpr unsigned kDigitPitch = kSlabK + 16;
inline constexpr unsigned kDigitBytes = round_up(kDigits * kDigitPitch, 128);

/// decode, gemv: bytes of one warp, which hold its ring and, after it, its partial sums; behind the ring gemv's digits.
constexpr unsigned decode_warp_bytes(const Specialization& s) {
  return max_u(s.tile.stages * stage_bytes(s), round_up(partial_bytes(s.tile), 128)) +
         (s.pipeline == Pipeline::gemv ? kDigitBytes : 0u);
}

/// wgmma: slabs of x in its ring, and the sums of other blocks of the cluster for the columns that a block owns.
inline constexpr unsigned kXStages = 4;
constexpr unsigned wgmma_x_bytes(const TileConfig& t) { return kXStages * t.block_m * t.block_k * 2; }
constexpr unsigned wgmma_inbox_bytes(const TileConfig& t) {
  return t.block_m * t.block_n * 4 / t.cluster_k * (t.cluster_k - 1);
}
/// wgmma: what the swizzle of x needs; the block rounds up the address of its shared memory itself.
inline constexpr unsigned kSwizzleAlignment = 1024;

/// prefill: tokens that a warpgroup stores at once.
constexpr unsigned prefill_store_tokens(const TileConfig& t) { return t.block_m < 64 ? t.block_m : 64; }

/// Dynamic shared memory of one block, in bytes. The host sets it, the kernel lays it out.
constexpr unsigned smem_bytes(const Specialization& s) {
  switch (s.pipeline) {
    case Pipeline::simple:
      return s.tile.block_m * kSlabK * 2;
    case Pipeline::gemv:
    case Pipeline::decode:
      // In a cluster, behind the warps: the sums that the blocks push to each other.
      return s.tile.warps_k * decode_warp_bytes(s) + (s.tile.cluster_k > 1 ? s.tile.block_m * s.tile.block_n * 4 : 0u);
    case Pipeline::mma_sync:
      return max_u(s.tile.stages * stage_bytes(s), s.tile.warps_k > 1 ? s.tile.warps_k * partial_bytes(s.tile) : 0u);
    case Pipeline::wgmma:
      // x, the warps' rings, the inbox and two mbarriers for each stage of x.
      return kSwizzleAlignment + wgmma_x_bytes(s.tile) + s.tile.stages * stage_bytes(s) + wgmma_inbox_bytes(s.tile) +
             2 * kXStages * 8;
    case Pipeline::prefill:
      return kSwizzleAlignment + s.tile.stages * (stage_bytes(s) + 2 * 8) +
             s.tile.warps_n / 4 * prefill_store_tokens(s.tile) * 128;
    case Pipeline::prepack:
    case Pipeline::unpack:
      return kPackedBlockWords * 4;
  }
  return 0;
}

}  // namespace qkvjit
