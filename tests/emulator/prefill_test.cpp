// SPDX-License-Identifier: Apache-2.0
#include "kernel_check.h"
#include "kernels/qkv_prefill.cu"

namespace {
using namespace qkvjit;

constexpr Specialization prefill(unsigned n_q, unsigned n_k, unsigned n_v, unsigned k, TileConfig tile) {
  tile.block_k = 64, tile.copy_warps = 4;
  return {.pipeline = Pipeline::prefill,
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

#define CHECK_TOKENS(spec, ...) emulator::check_tokens<spec>(#spec, qkv_prefill<spec>, {__VA_ARGS__})

TEST_SUITE("emulated_prefill") {
  TEST_CASE("tiles of all tokens of a warpgroup, columns that span the matrices") {
    constexpr auto wide = prefill(72, 64, 128, 256, {.block_m = 64, .block_n = 128, .warps_n = 8, .stages = 3});
    CHECK_TOKENS(wide, 1, 64, 150);
    constexpr auto three = prefill(192, 64, 40, 384, {.block_m = 40, .block_n = 192, .warps_n = 12, .stages = 4});
    CHECK_TOKENS(three, 33, 130);
  }

  TEST_CASE("two blocks that split K") {
    constexpr auto split =
        prefill(128, 64, 64, 512, {.block_m = 48, .block_n = 128, .warps_n = 8, .stages = 3, .cluster_k = 2});
    CHECK_TOKENS(split, 48, 77);
    constexpr auto odd =
        prefill(192, 8, 200, 256, {.block_m = 56, .block_n = 192, .warps_n = 12, .stages = 4, .cluster_k = 2});
    CHECK_TOKENS(odd, 100);
  }

  TEST_CASE("two blocks that share x") {
    constexpr auto shared =
        prefill(256, 64, 64, 256, {.block_m = 64, .block_n = 128, .warps_n = 8, .stages = 4, .cluster_n = 2});
    CHECK_TOKENS(shared, 64, 200);
  }
}
