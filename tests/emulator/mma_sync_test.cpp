// SPDX-License-Identifier: Apache-2.0
#include "kernel_check.h"
#include "kernels/qkv_mma_sync.cu"

namespace {
using namespace qkvjit;

constexpr Specialization mma_sync(WeightLayout layout, unsigned n_q, unsigned n_k, unsigned n_v, unsigned k,
                                  bool aligned, TileConfig tile) {
  return {.pipeline = Pipeline::mma_sync,
          .layout = layout,
          .n_q = n_q,
          .n_k = n_k,
          .n_v = n_v,
          .k = k,
          .aligned = aligned,
          .tile = tile};
}
constexpr auto k8n = WeightLayout::k8n;
constexpr auto nk8 = WeightLayout::nk8;
constexpr auto prepacked = WeightLayout::prepacked;
}  // namespace

#define CHECK_TOKENS(spec, ...) emulator::check_tokens<spec>(#spec, qkv_mma_sync<spec>, {__VA_ARGS__})

TEST_SUITE("emulated_mma_sync") {
  TEST_CASE("overlapped: a warp spans all tokens, slabs of 64 k") {
    constexpr auto spec = mma_sync(prepacked, 136, 64, 8, 256, true,
                                   {.block_m = 32, .block_n = 128, .warps_n = 4, .stages = 4, .block_k = 64});
    CHECK_TOKENS(spec, 1, 32, 50);
    constexpr auto raw =
        mma_sync(k8n, 136, 64, 8, 256, true, {.block_m = 32, .block_n = 128, .warps_n = 4, .stages = 6, .block_k = 64});
    CHECK_TOKENS(raw, 50);
  }

  TEST_CASE("overlapped: warps that split K, threads that do not divide the copies") {
    constexpr auto spec = mma_sync(prepacked, 200, 64, 64, 384, true,
                                   {.block_m = 16, .block_n = 96, .warps_n = 3, .warps_k = 4, .stages = 3});
    CHECK_TOKENS(spec, 33);
    constexpr auto raw =
        mma_sync(nk8, 200, 8, 64, 128, true,
                 {.block_m = 48, .block_n = 96, .warps_m = 3, .warps_n = 1, .warps_k = 2, .stages = 3});
    CHECK_TOKENS(raw, 47);
    constexpr auto narrow =
        mma_sync(k8n, 40, 64, 64, 384, true, {.block_m = 64, .block_n = 64, .warps_n = 2, .warps_k = 2, .stages = 3});
    CHECK_TOKENS(narrow, 65);
  }

  TEST_CASE("unaligned bases and odd columns") {
    constexpr auto spec =
        mma_sync(k8n, 37, 1, 65, 256, false, {.block_m = 16, .block_n = 32, .warps_m = 1, .warps_n = 1, .stages = 3});
    CHECK_TOKENS(spec, 19);
    constexpr auto plain =
        mma_sync(nk8, 37, 1, 65, 256, false, {.block_m = 32, .block_n = 32, .warps_m = 2, .warps_n = 1, .stages = 2});
    CHECK_TOKENS(plain, 35);
    constexpr auto packed = mma_sync(prepacked, 37, 1, 65, 256, false,
                                     {.block_m = 32, .block_n = 64, .warps_m = 2, .warps_n = 2, .stages = 2});
    CHECK_TOKENS(packed, 35);
  }
}
