// SPDX-License-Identifier: Apache-2.0
#include "kernel_check.h"
#include "kernels/qkv_decode.cu"

namespace {
using namespace qkvjit;

constexpr Specialization decode(WeightLayout layout, unsigned n_q, unsigned n_k, unsigned n_v, unsigned k, bool aligned,
                                TileConfig tile, unsigned sm = 80) {
  return {.pipeline = Pipeline::decode,
          .layout = layout,
          .n_q = n_q,
          .n_k = n_k,
          .n_v = n_v,
          .k = k,
          .aligned = aligned,
          .tile = tile,
          .target = {sm, '\0'}};
}
constexpr auto k8n = WeightLayout::k8n;
constexpr auto nk8 = WeightLayout::nk8;
constexpr auto prepacked = WeightLayout::prepacked;
}  // namespace

#define CHECK_TOKENS(spec, ...) emulator::check_tokens<spec>(#spec, qkv_decode<spec>, {__VA_ARGS__})

TEST_SUITE("emulated_decode") {
  TEST_CASE("each layout") {
    constexpr auto raw = decode(k8n, 72, 40, 8, 512, true, {.block_m = 16, .block_n = 64, .warps_k = 2, .stages = 3});
    CHECK_TOKENS(raw, 16, 21);
    constexpr auto columns =
        decode(nk8, 72, 40, 8, 384, true, {.block_m = 8, .block_n = 32, .warps_k = 4, .stages = 2});
    CHECK_TOKENS(columns, 3, 8);
    constexpr auto packed = decode(prepacked, 72, 40, 8, 384, true,
                                   {.block_m = 1, .block_n = 96, .warps_k = 4, .stages = 2, .block_k = 64});
    CHECK_TOKENS(packed, 1, 2);
  }

  TEST_CASE("a cluster splits K") {
    constexpr auto spec =
        decode(prepacked, 72, 40, 8, 768, true,
               {.block_m = 16, .block_n = 96, .warps_k = 2, .stages = 3, .block_k = 64, .cluster_k = 2}, 90);
    CHECK_TOKENS(spec, 16, 17);
    constexpr auto four =
        decode(k8n, 40, 8, 64, 512, true, {.block_m = 8, .block_n = 32, .warps_k = 2, .stages = 2, .cluster_k = 4}, 90);
    CHECK_TOKENS(four, 5);
  }

  TEST_CASE("unaligned bases and odd columns") {
    constexpr auto spec = decode(k8n, 37, 1, 65, 256, false, {.block_m = 8, .block_n = 32, .warps_k = 2, .stages = 2});
    CHECK_TOKENS(spec, 9);
    constexpr auto packed =
        decode(prepacked, 37, 1, 65, 256, false, {.block_m = 8, .block_n = 64, .warps_k = 2, .stages = 2});
    CHECK_TOKENS(packed, 9);
  }
}
