// SPDX-License-Identifier: Apache-2.0
#include "kernel_check.h"
#include "kernels/qkv_simple.cu"

namespace {
using namespace qkvjit;

constexpr Specialization simple(WeightLayout layout) {
  return {.pipeline = Pipeline::simple,
          .layout = layout,
          .n_q = 37,
          .n_k = 8,
          .n_v = 65,
          .k = 256,
          .tile = {.block_m = 4, .block_n = 32, .warps_m = 4}};
}
}  // namespace

#define CHECK_TOKENS(spec, ...) emulator::check_tokens<spec>(#spec, qkv_simple<spec>, {__VA_ARGS__})

TEST_SUITE("emulated_simple") {
  TEST_CASE("each layout") {
    constexpr auto k8n = simple(WeightLayout::k8n);
    CHECK_TOKENS(k8n, 5);
    constexpr auto nk8 = simple(WeightLayout::nk8);
    CHECK_TOKENS(nk8, 5);
    constexpr auto prepacked = simple(WeightLayout::prepacked);
    CHECK_TOKENS(prepacked, 5);
  }
}
