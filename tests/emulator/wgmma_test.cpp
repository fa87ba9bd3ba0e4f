// SPDX-License-Identifier: Apache-2.0
#include "kernel_check.h"
#include "kernels/qkv_wgmma.cu"

namespace {
using namespace qkvjit;

constexpr Specialization wgmma(unsigned n_q, unsigned n_k, unsigned n_v, unsigned k, TileConfig tile) {
  return {.pipeline = Pipeline::wgmma,
          .layout = WeightLayout::prepacked,
          .n_q = n_q,
          .n_k = n_k,
          .n_v = n_v,
          .k = k,
          .aligned = true,
          .tile = tile,
          .target = {90, 'a'}};
}
}  // namespace

#define CHECK_TOKENS(spec, ...) emulator::check_tokens<spec>(#spec, qkv_wgmma<spec>, {__VA_ARGS__})

TEST_SUITE("emulated_wgmma") {
  TEST_CASE("a block walks all of K") {
    constexpr auto spec =
        wgmma(136, 64, 8, 768, {.block_m = 32, .block_n = 128, .warps_n = 8, .stages = 3, .copy_warps = 2});
    CHECK_TOKENS(spec, 1, 32, 40);
  }
  TEST_CASE("a cluster splits K") {
    constexpr auto spec = wgmma(
        136, 64, 8, 640, {.block_m = 24, .block_n = 192, .warps_n = 12, .stages = 4, .copy_warps = 2, .cluster_k = 3});
    CHECK_TOKENS(spec, 24);
    constexpr auto four = wgmma(
        72, 64, 200, 512, {.block_m = 64, .block_n = 64, .warps_n = 4, .stages = 3, .copy_warps = 1, .cluster_k = 4});
    CHECK_TOKENS(four, 64);
  }
}
