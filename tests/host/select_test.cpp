// SPDX-License-Identifier: Apache-2.0
// Selection for made-up GPUs of every architecture: pure, so it runs anywhere.
#include "qkvjit/select.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "qkvjit/error.h"
#include "select/tile_table.h"

using namespace qkvjit;

namespace {

constexpr unsigned kArchitectures[] = {80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

QkvProblem problem_of(std::uint64_t n_q, std::uint64_t n_kv, std::uint64_t k, WeightLayout layout = WeightLayout::k8n) {
  return {.n_q = n_q, .n_k = n_kv, .n_v = n_kv, .k = k, .layout = layout};
}

}  // namespace

TEST_SUITE("select") {
  TEST_CASE("every GPU has rows for every M, ascending, within its shared memory and thread limits") {
    for (const unsigned sm : kArchitectures) {
      const DeviceInfo info = typical_device(sm);
      for (const bool aligned : {true, false}) {
        for (const auto& [n_q, n_kv, k] :
             {std::tuple{4096, 4096, 4096}, {4096, 1024, 4096}, {1, 1, 128}, {127, 24, 11008}}) {
          const auto rows = select_rows(problem_of(n_q, n_kv, k), info, {.sm = sm}, aligned);
          REQUIRE_FALSE(rows.empty());
          CHECK(rows.back().max_m == kAnyM);
          for (std::size_t i = 0; i < rows.size(); ++i) {
            if (i > 0) CHECK(rows[i].max_m > rows[i - 1].max_m);
            CHECK(smem_bytes(rows[i].spec) <= info.smem_per_block_bytes);
            CHECK(threads_per_block(rows[i].spec.tile) <= 1024);
            CHECK(rows[i].spec.target == Target{.sm = sm});
            CHECK(rows[i].spec.aligned == (aligned && n_q % 8 == 0 && n_kv % 8 == 0));
          }
        }
      }
    }
  }

  TEST_CASE("select_specialization takes the row whose range holds M, at each edge") {
    const QkvProblem problem = problem_of(4096, 4096, 4096);
    const DeviceInfo info = typical_device(90);
    const auto rows = select_rows(problem, info, {.sm = 90}, true);
    std::uint64_t low = 1;
    for (const SelectedRow& row : rows) {
      CHECK(select_specialization(problem, info, {.sm = 90}, true, low) == row.spec);
      CHECK(select_specialization(problem, info, {.sm = 90}, true, row.max_m) == row.spec);
      low = row.max_m + 1;
    }
    CHECK(select_specialization(problem, info, {.sm = 90}, true, 1).pipeline == Pipeline::gemv);
    CHECK(select_specialization(problem, info, {.sm = 90}, true, 8).pipeline == Pipeline::decode);
    CHECK(select_specialization(problem, info, {.sm = 90}, true, 4096).pipeline == Pipeline::mma_sync);
  }

  TEST_CASE("a GPU with 99 KB a block gets other tiles for many tokens than one with 227 KB") {
    const QkvProblem problem = problem_of(4096, 4096, 4096);
    const auto large = select_specialization(problem, typical_device(90), {.sm = 90}, true, 4096);
    const auto small = select_specialization(problem, typical_device(89), {.sm = 89}, true, 4096);
    CHECK(smem_bytes(large) > typical_device(89).smem_per_block_bytes);
    CHECK(small.tile.block_n < large.tile.block_n);
  }

  TEST_CASE("candidates: no tile twice, every selected row among them, every pipeline there") {
    for (const unsigned sm : kArchitectures) {
      const QkvProblem problem = problem_of(1024, 256, 1024, WeightLayout::nk8);
      const DeviceInfo info = typical_device(sm);
      const auto candidates = candidate_specializations(problem, info, {.sm = sm}, true);
      std::set<std::pair<Pipeline, std::string>> names;
      std::set<Pipeline> pipelines;
      for (const auto& spec : candidates) {
        CHECK(names.insert({spec.pipeline, tile_name(spec.tile)}).second);
        pipelines.insert(spec.pipeline);
      }
      CHECK(pipelines == std::set{Pipeline::simple, Pipeline::gemv, Pipeline::decode, Pipeline::mma_sync});
      for (const auto& row : select_rows(problem, info, {.sm = sm}, true)) {
        CHECK(std::find(candidates.begin(), candidates.end(), row.spec) != candidates.end());
      }
    }
  }

  TEST_CASE("wgmma serves prepacked words on 9.0 alone, for its own target, and never without a slab for each block") {
    const auto pipelines = [](const std::vector<Specialization>& specs) {
      std::set<Pipeline> set;
      for (const auto& spec : specs) set.insert(spec.pipeline);
      return set;
    };
    for (const unsigned sm : kArchitectures) {
      for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8, WeightLayout::prepacked}) {
        const auto candidates =
            candidate_specializations(problem_of(1024, 256, 1024, layout), typical_device(sm), {.sm = sm}, true);
        CHECK(pipelines(candidates).count(Pipeline::wgmma) == (sm == 90 && layout == WeightLayout::prepacked ? 1 : 0));
        for (const auto& spec : candidates) {
          CHECK((spec.target.suffix == 'a') ==
                (spec.pipeline == Pipeline::wgmma || spec.pipeline == Pipeline::prefill));
          if (sm < 90) CHECK(spec.tile.cluster_k == 1);
        }
      }
    }
    for (const auto& spec : candidate_specializations(problem_of(1024, 256, 384, WeightLayout::prepacked),
                                                      typical_device(90), {.sm = 90}, true)) {
      if (spec.pipeline == Pipeline::wgmma) CHECK(spec.tile.cluster_k <= 3);
    }
  }

  TEST_CASE(
      "the tile leaves the busiest multiprocessor the fewest columns, apart for ordinary and dependent launches") {
    const DeviceInfo info = typical_device(90);
    struct Case {
      std::uint64_t n_q, n_kv, k, m;
      bool dependent;
      const char* tile;
    };
    // Shapes of 132 multiprocessors and the tiles that were measured to be best or near it.
    for (const Case& c : {Case{4096, 4096, 4096, 1, false, "m1n96_w1x1x4_s3_b1"},
                          {4096, 4096, 4096, 1, true, "m1n96_w1x1x8_s3_b1"},
                          {8192, 8192, 8192, 1, true, "m1n96_w1x1x8_s2_b2"},
                          {8192, 1024, 8192, 1, true, "m1n160_w1x1x8_s2_b1_c2"},
                          {4096, 1024, 4096, 1, false, "m1n96_w1x1x4_s3_b1_c2"},
                          {4096, 1024, 4096, 1, true, "m1n32_w1x1x8_s3_b2"},
                          {5120, 5120, 5120, 1, true, "m1n128_w1x1x8_s2_b1"},
                          {1024, 128, 8192, 1, true, "m1n32_w1x1x4_s3_b3_c4"},
                          {4096, 4096, 4096, 8, true, "m8n96_w1x1x4_s3_b2_k64_c2"},
                          {4096, 1024, 4096, 8, true, "m8n96_w1x1x8_s3_b1_k64_c2"},
                          {4096, 4096, 4096, 16, true, "m16n96_w1x1x8_s2_b1"},
                          {8192, 8192, 8192, 16, true, "m16n96_w1x1x4_s2_b2"},
                          {4096, 1024, 4096, 16, true, "m16n96_w1x1x4_s2_b1_c2"},
                          {8192, 1024, 8192, 16, true, "m16n160_w1x1x8_s3_b1_k64_c2"},
                          {4096, 4096, 4096, 32, true, "m32n192_w1x12x1_s3_b1_p2_c2"},
                          {8192, 8192, 8192, 32, true, "m32n384_w1x12x1_s3_b1_p2_c2"},
                          {4096, 1024, 4096, 32, true, "m32n96_w1x1x4_s3_b1_k64_c2"},
                          {4096, 4096, 4096, 64, true, "m64n192_w1x12x1_s3_b1_p2_c2"},
                          {4096, 1024, 4096, 64, true, "m64n192_w1x12x1_s4_b1_p2_c3"},
                          {8192, 8192, 8192, 64, true, "m64n192_w1x12x1_s4_b1_p2"},
                          {5120, 5120, 5120, 64, true, "m64n256_w1x8x1_s4_b1_p2_c2"}}) {
      const QkvProblem problem = problem_of(c.n_q, c.n_kv, c.k, WeightLayout::prepacked);
      CAPTURE(c.n_q);
      CAPTURE(c.m);
      CHECK(tile_name(select_specialization(problem, info, {.sm = 90}, true, c.m, c.dependent).tile) == c.tile);
    }
    // Where an ordinary launch is faster although the promise is given.
    for (const auto& row :
         select_rows(problem_of(8192, 1024, 8192, WeightLayout::prepacked), info, {.sm = 90}, true, true)) {
      if (row.max_m == 16) CHECK_FALSE(row.dependent_launch);
      if (row.max_m == 1) CHECK(row.dependent_launch);
    }
    for (const auto& row : select_rows(problem_of(8192, 8192, 8192), info, {.sm = 90}, true)) {
      CHECK_FALSE(row.dependent_launch);
    }
  }

  TEST_CASE("the specialisation carries the problem, never M") {
    const QkvProblem problem = problem_of(384, 128, 256, WeightLayout::nk8);
    const auto spec = select_specialization(problem, typical_device(80), {.sm = 80}, true, 7);
    CHECK(spec.n_q == 384);
    CHECK(spec.n_k == 128);
    CHECK(spec.n_v == 128);
    CHECK(spec.k == 256);
    CHECK(spec.layout == WeightLayout::nk8);
    CHECK(spec == select_specialization(problem, typical_device(80), {.sm = 80}, true, 3));
  }

  TEST_CASE("what no kernel can do is refused: problem, old GPU, too little shared memory") {
    CHECK_THROWS_AS(select_rows(problem_of(64, 64, 100), typical_device(80), {.sm = 80}, true), InvalidProblem);
    DeviceInfo turing = typical_device(80);
    turing.sm_major = 7;
    turing.sm_minor = 5;
    turing.name = "T4";
    CHECK_THROWS_WITH_AS(select_rows(problem_of(64, 64, 128), turing, {.sm = 80}, true), doctest::Contains("7.5"),
                         UnsupportedDevice);
    DeviceInfo tiny = typical_device(80);
    tiny.smem_per_block_bytes = 16 * 1024;
    CHECK_THROWS_WITH_AS(select_rows(problem_of(64, 64, 128), tiny, {.sm = 80}, true), doctest::Contains("16384"),
                         UnsupportedDevice);
  }

  TEST_CASE("tile names are unique and read back; anything else is refused") {
    std::set<std::string> names;
    for (const TileRow& row : kTileRows) {
      const std::string name = tile_name(row.tile);
      names.insert(name);
      CHECK(parse_tile(name) == row.tile);
    }
    CHECK(names.size() >= 10);
    for (const char* name : {"m8n96_w1x1x8_s2_b1_k64_c2", "m64n192_w1x12x1_s4_b1_p4_c2", "m16n96_w1x1x4_s2_b1_c2"}) {
      CHECK(tile_name(parse_tile(name)) == name);
    }
    for (const char* bad :
         {"", "m8n32", "m8n32_w1x1x8_s2_b3 ", "m08n32_w1x1x8_s2_b3", "m-8n32_w1x1x8_s2_b3", "m8n32_w1x1x8_s2_b3x",
          "m8n32_w1x1x8_s2_b3_k128", "m8n32_w1x1x8_s2_b3_c1", "m8n32_w1x1x8_s2_b3_c2_k64"}) {
      CHECK_THROWS_WITH_AS(parse_tile(bad), doctest::Contains("--list"), InvalidProblem);
    }
  }
}
