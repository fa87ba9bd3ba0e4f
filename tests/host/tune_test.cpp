// SPDX-License-Identifier: Apache-2.0
// Tuning with a fake driver whose launches take made-up times: which tile wins, near ties, what a table holds, its
// file, and that selection and plans follow it where, and only where, they may.
#include "qkvjit/tune.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "compile/kernel_templates.h"
#include "qkvjit/qkvjit.h"
#include "support/fake_driver.h"
#include "support/fake_nvrtc.h"
#include "support/messages.h"

namespace {

using namespace qkvjit;
namespace fs = std::filesystem;

constexpr std::uint64_t kAll = ~std::uint64_t{0};
const QkvProblem kProblem{.n_q = 256, .n_k = 64, .n_v = 64, .k = 512, .layout = WeightLayout::prepacked};
const Target kTarget{.sm = 90};

struct Bench {
  explicit Bench(const fake::Gpu& gpu = {}) {
    fake::reset({gpu});
    fake::reset_nvrtc();
    context.emplace(0, fake::table());
    cache.emplace(CacheOptions{}, fake::nvrtc());
  }
  ~Bench() {
    cache.reset();
    context.reset();
    CHECK(fake::alive() == fake::Alive{});
    CHECK(fake::misuses().empty());
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  /// Makes a launch of a kernel take what `time` says of it.
  void set_times(const QkvProblem& problem, std::function<double(const Specialization&, const fake::Launch&)> time) {
    const auto specs = candidate_specializations(problem, context->info(), cache->target_for(context->info()), true);
    auto known = std::make_shared<std::map<CUfunction, Specialization>>();
    const auto kernels = cache->get_all(*context, specs, 1);
    for (std::size_t i = 0; i < specs.size(); ++i) (*known)[kernels[i]->function()] = specs[i];
    fake::set_launch_time(
        [known, time](const fake::Launch& launch) { return time(known->at(launch.function), launch); });
  }
  [[nodiscard]] std::vector<SelectedRow> candidates(std::uint64_t m, bool promise) const {
    return candidate_specializations(kProblem, context->info(), kTarget, true, m, promise);
  }

  std::optional<DeviceContext> context;
  std::optional<KernelCache> cache;
};

TunedRow row_of(const SelectedRow& candidate, std::uint64_t max_m, bool promise = false) {
  return {.problem = kProblem,
          .aligned = true,
          .weights_are_constant = promise,
          .max_m = max_m,
          .pipeline = candidate.spec.pipeline,
          .tile = candidate.spec.tile,
          .dependent_launch = candidate.dependent_launch,
          .median_us = 5.25,
          .min_us = 5.125,
          .max_us = 6};
}

/// A table of the fake H200 with rows for kProblem: candidate number `i` up to `max_m`.
TuningTable table_of(const std::vector<std::pair<std::uint64_t, std::size_t>>& rows, bool promise = false,
                     const DeviceInfo& info = typical_device(90)) {
  TuningTable table(hardware_of(info, kTarget), std::string(64, 'a'));
  for (const auto& [max_m, i] : rows) {
    table.set(row_of(candidate_specializations(kProblem, info, kTarget, true, max_m, promise).at(i), max_m, promise));
  }
  return table;
}

std::string error_of(const std::string& text) {
  return thrown_by<Error>([&] { (void)TuningTable::from_json(text); });
}

/// The table's JSON with a change.
std::string changed(const TuningTable& table, const std::function<void(nlohmann::json&)>& change) {
  nlohmann::json all = nlohmann::json::parse(table.to_json());
  change(all);
  return all.dump();
}

class Folder {
 public:
  Folder() : path_((fs::temp_directory_path() / fmt::format("qkvjit_tune_{}", getpid())).string()) {
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] std::string file(const char* name) const { return path_ + "/" + name; }
  [[nodiscard]] std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
  }

 private:
  std::string path_;
};

TunedTimes times_of(double median, double min, double max) { return {{}, median, min, max}; }

QkvTensors tensors_of(const QkvProblem& p, std::int64_t m) {
  const auto matrix = [&](DType dtype, std::uint64_t rows, std::uint64_t columns) {
    return TensorView::matrix(fake::make_memory(0, rows * columns * element_bytes(dtype)), dtype,
                              static_cast<std::int64_t>(rows), static_cast<std::int64_t>(columns));
  };
  const auto rows = static_cast<std::uint64_t>(m);
  QkvTensors t;
  t.x = matrix(DType::f16, rows, p.k);
  t.w_q_packed = matrix(DType::u32, p.k / 64, p.n_q / 64 * 512);
  t.w_k_packed = matrix(DType::u32, p.k / 64, p.n_k / 64 * 512);
  t.w_v_packed = matrix(DType::u32, p.k / 64, p.n_v / 64 * 512);
  t.scales_q = matrix(DType::f16, p.k / 128, p.n_q);
  t.scales_k = matrix(DType::f16, p.k / 128, p.n_k);
  t.scales_v = matrix(DType::f16, p.k / 128, p.n_v);
  t.q = matrix(DType::f16, rows, p.n_q);
  t.k = matrix(DType::f16, rows, p.n_k);
  t.v = matrix(DType::f16, rows, p.n_v);
  return t;
}

}  // namespace

TEST_SUITE("tune") {
  TEST_CASE("candidates at an M: every tile ordinary, with the promise before that dependent, the same order always") {
    for (const unsigned sm : {80u, 90u, 120u}) {
      const DeviceInfo info = typical_device(sm);
      const auto specs = candidate_specializations(kProblem, info, {.sm = sm}, true);
      const auto ordinary = candidate_specializations(kProblem, info, {.sm = sm}, true, 100, false);
      REQUIRE(ordinary.size() == specs.size());
      for (std::size_t i = 0; i < specs.size(); ++i) {
        CHECK(ordinary[i].spec == specs[i]);
        CHECK(ordinary[i].max_m == 100);
        CHECK_FALSE(ordinary[i].dependent_launch);
      }
      const auto promised = candidate_specializations(kProblem, info, {.sm = sm}, true, 100, true);
      std::size_t at = 0;
      for (const Specialization& spec : specs) {
        if (waits_for_grids_ahead(spec)) {
          CHECK(promised.at(at).spec == spec);
          CHECK(promised.at(at++).dependent_launch);
        }
        CHECK(promised.at(at).spec == spec);
        CHECK_FALSE(promised.at(at++).dependent_launch);
      }
      CHECK(at == promised.size());
      CHECK((promised.size() > ordinary.size()) == (sm >= 90));
    }
  }

  TEST_CASE("candidates at an M leave away tiles that would need more blocks than a grid has") {
    const DeviceInfo info = typical_device(90);
    const std::uint64_t m = std::uint64_t{1} << 31;
    const auto some = candidate_specializations(kProblem, info, kTarget, true, m, false);
    CHECK_FALSE(some.empty());
    CHECK(some.size() < candidate_specializations(kProblem, info, kTarget, true).size());
    for (const SelectedRow& row : some) {
      CHECK(m / row.spec.tile.block_m * column_tiles(row.spec) * row.spec.tile.cluster_k <= 0x7fffffff);
    }
  }

  TEST_CASE("near ties go to the first in order, real differences to the faster") {
    const auto winner = [](std::vector<TunedTimes> times) { return tuning_winner(times); };
    CHECK(winner({times_of(5, 5, 5)}) == 0);
    CHECK(winner({times_of(5, 4.99, 5.01), times_of(4, 3.99, 4.01)}) == 1);
    CHECK(winner({times_of(5.04, 5.03, 5.05), times_of(5, 4.999, 5.001)}) == 0);   // within 1 %
    CHECK(winner({times_of(5.06, 5.055, 5.07), times_of(5, 4.999, 5.001)}) == 1);  // beyond
    CHECK(winner({times_of(5.2, 4.9, 5.3), times_of(5, 4.8, 5.3)}) == 0);          // within the spread
    CHECK(winner({times_of(5.2, 5.1, 5.3), times_of(5, 4.8, 9)}) == 1);            // one late batch is none
    CHECK(winner({times_of(9, 8, 10), times_of(5.01, 5, 5.1), times_of(5, 4.9, 5.1)}) == 1);
    CHECK(winner({times_of(5, 4.9, 5.1), times_of(5.01, 5, 5.1), times_of(9, 8, 10)}) == 0);
  }

  TEST_CASE("the fastest tile at each M, ordinary and dependent launches apart, with its spread") {
    Bench bench;
    const auto candidates = bench.candidates(1, true);
    const Specialization few = candidates[2].spec, many = bench.candidates(1, false).back().spec;
    REQUIRE_FALSE(few == many);
    REQUIRE(waits_for_grids_ahead(few));
    int noise = 0;
    bench.set_times(kProblem, [&](const Specialization& spec, const fake::Launch& launch) {
      const double base =
          launch.params.m <= 8 ? (spec == few ? (launch.dependent ? 3 : 5) : 9) : (spec == many ? 40 : 90);
      return base * (1 + 0.002 * (noise++ % 3));
    });
    std::vector<std::uint64_t> seen;
    const TuningTable table = tune(*bench.cache, *bench.context, kProblem,
                                   {.ms = {64, 8, 1, 8, 65}, .rest_ms = 0, .progress = [&](const TuneProgress& p) {
                                      if (!p.weights_are_constant) seen.push_back(p.m);
                                      CHECK(p.winner < p.times.size());
                                      return true;
                                    }});
    CHECK(seen == std::vector<std::uint64_t>{1, 8, 64, 65});
    CHECK(table.hardware() == hardware_of(bench.context->info(), kTarget));
    CHECK(table.templates_digest() == templates_digest());
    REQUIRE(table.rows().size() == 8);
    for (const TunedRow& row : table.rows()) {
      CHECK(row.problem == kProblem);
      CHECK(row.aligned);
      CHECK(row.tile == (row.max_m <= 8 ? few.tile : many.tile));
      CHECK(row.dependent_launch == (row.weights_are_constant && row.max_m <= 8));
      CHECK(row.median_us == doctest::Approx(row.max_m > 8 ? 40 : row.dependent_launch ? 3 : 5).epsilon(0.01));
      CHECK(row.min_us <= row.median_us);
      CHECK(row.median_us <= row.max_us);
    }
  }

  TEST_CASE("equal times: the same table every time, of the first candidates") {
    Bench bench;
    bench.set_times(kProblem, [](const Specialization&, const fake::Launch&) { return 7.0; });
    const TuneOptions options{.ms = {1, 100}, .batches = 3, .rest_ms = 0};
    const TuningTable table = tune(*bench.cache, *bench.context, kProblem, options);
    CHECK(table == tune(*bench.cache, *bench.context, kProblem, options));
    for (const TunedRow& row : table.rows()) {
      const auto first = bench.candidates(row.max_m, row.weights_are_constant).front();
      CHECK(row.tile == first.spec.tile);
      CHECK(row.pipeline == first.spec.pipeline);
      CHECK(row.dependent_launch == first.dependent_launch);
      CHECK(row.min_us == row.max_us);
    }
  }

  TEST_CASE("weights rotate: launches in turn read other sets, four times the L2 cache in all") {
    Bench bench;
    const QkvProblem large{.n_q = 4096, .n_k = 1024, .n_v = 1024, .k = 4096};
    std::set<const void*> sets;
    bench.set_times(large, [&](const Specialization&, const fake::Launch& launch) {
      sets.insert(launch.params.weights[0]);
      return 9.0;
    });
    (void)tune(*bench.cache, *bench.context, large,
               {.ms = {4}, .weights_are_constant = false, .batches = 1, .rest_ms = 0});
    const std::size_t set_bytes = 6144 * 4096 / 2 + 6144 * 32 * 2;
    CHECK(sets.size() * set_bytes > 4 * bench.context->info().l2_bytes);
    CHECK(tune_memory_bytes(large, bench.context->info(), {.ms = {4}}) > sets.size() * set_bytes);
  }

  TEST_CASE("lent memory is used and not allocated; too little or a crooked address is refused before any launch") {
    Bench bench;
    bench.set_times(kProblem, [](const Specialization&, const fake::Launch&) { return 7.0; });
    TuneOptions options{.ms = {3}, .batches = 1, .rest_ms = 0};
    options.memory_bytes = tune_memory_bytes(kProblem, bench.context->info(), options);
    options.memory = fake::make_memory(0, options.memory_bytes);
    fake::clear_log();
    CHECK(tune(*bench.cache, *bench.context, kProblem, options).rows().size() == 2);
    CHECK(fake::calls("cuMemAllocAsync") == 0);
    for (const fake::Launch& launch : fake::launches()) {
      const auto* base = static_cast<const char*>(options.memory);
      for (const void* pointer : {launch.params.x, launch.params.weights[2], launch.params.scales[2],
                                  static_cast<const void*>(launch.params.outputs[2])}) {
        CHECK(static_cast<const char*>(pointer) >= base);
        CHECK(static_cast<const char*>(pointer) < base + options.memory_bytes);
      }
    }
    fake::clear_log();
    --options.memory_bytes;
    CHECK(
        has(thrown_by<InvalidProblem>([&] { (void)tune(*bench.cache, *bench.context, kProblem, options); }), "memory"));
    options.memory_bytes += 1;
    options.memory = static_cast<char*>(options.memory) + 8;
    CHECK_THROWS_AS((void)tune(*bench.cache, *bench.context, kProblem, options), InvalidProblem);
    CHECK_THROWS_AS((void)tune(*bench.cache, *bench.context, kProblem, {.ms = {0, 1}}), InvalidProblem);
    CHECK_THROWS_AS((void)tune(*bench.cache, *bench.context, {.n_q = 8, .n_k = 8, .n_v = 8, .k = 100}), InvalidProblem);
    CHECK(fake::call_log().empty());
  }

  TEST_CASE("progress can stop it; what is known by then is kept") {
    Bench bench;
    bench.set_times(kProblem, [](const Specialization&, const fake::Launch&) { return 7.0; });
    const TuningTable table =
        tune(*bench.cache, *bench.context, kProblem,
             {.ms = {1, 2, 3}, .batches = 1, .rest_ms = 0, .progress = [](const TuneProgress& p) { return p.m < 2; }});
    CHECK(table.rows().size() == 3);
  }

  TEST_CASE("a driver call that fails: the error comes out, and nothing stays behind") {
    for (const auto& [function, nth] : {std::pair{"cuStreamCreate", 1},
                                        {"cuEventCreate", 2},
                                        {"cuMemAllocAsync", 1},
                                        {"cuMemcpyHtoDAsync", 3},
                                        {"cuMemcpyDtoDAsync", 1},
                                        {"cuLaunchKernelEx", 1},
                                        {"cuLaunchKernelEx", 200},
                                        {"cuStreamBeginCapture", 1},
                                        {"cuStreamEndCapture", 2},
                                        {"cuGraphInstantiate", 2},
                                        {"cuGraphLaunch", 4},
                                        {"cuEventElapsedTime", 5}}) {
      CAPTURE(function);
      Bench bench;
      bench.set_times(kProblem, [](const Specialization&, const fake::Launch&) { return 7.0; });
      fake::fail(function, nth, CUDA_ERROR_UNKNOWN);
      CHECK_THROWS_AS((void)tune(*bench.cache, *bench.context, kProblem, {.ms = {1}, .batches = 1, .rest_ms = 0}),
                      DriverError);
      CHECK(fake::clear_faults());
      CHECK(fake::context_stack().empty());
    }
  }

  TEST_CASE("a problem whose rows are no vectors is tuned for any alignment") {
    Bench bench;
    const QkvProblem odd{.n_q = 7, .n_k = 8, .n_v = 8, .k = 128};
    bench.set_times(odd, [](const Specialization& spec, const fake::Launch&) {
      return spec.pipeline == Pipeline::simple ? 1.0 : 2.0;
    });
    const TuningTable table = tune(*bench.cache, *bench.context, odd, {.ms = {5}, .batches = 1, .rest_ms = 0});
    CHECK_FALSE(table.rows().at(0).aligned);
    for (const bool aligned : {true, false}) {
      const DeviceInfo& info = bench.context->info();
      CHECK(select_specialization(odd, info, kTarget, aligned, 5, false, &table).pipeline == Pipeline::simple);
      CHECK(select_specialization(odd, info, kTarget, aligned, 6, false, &table).pipeline != Pipeline::simple);
    }
  }

  TEST_CASE("selection: the smallest tuned M that is not below, the built-in rows beyond, and elsewhere") {
    const DeviceInfo info = typical_device(90);
    const auto candidates = candidate_specializations(kProblem, info, kTarget, true, 1, false);
    const TuningTable table = table_of({{4, 3}, {64, 5}, {128, 3}});
    const auto spec_at = [&](std::uint64_t m, bool promise = false, bool aligned = true) {
      return select_specialization(kProblem, info, kTarget, aligned, m, promise, &table);
    };
    for (const std::uint64_t m : {1, 4, 65, 128}) CHECK(spec_at(m) == candidates[3].spec);
    for (const std::uint64_t m : {5, 64}) CHECK(spec_at(m) == candidates[5].spec);
    for (const std::uint64_t m : {std::uint64_t{129}, std::uint64_t{4096}, kAll}) {
      CHECK(spec_at(m) == select_specialization(kProblem, info, kTarget, true, m));
    }
    for (const std::uint64_t m : {1, 64, 128}) {
      CHECK(spec_at(m, true) == select_specialization(kProblem, info, kTarget, true, m, true));
      CHECK(spec_at(m, false, false) == select_specialization(kProblem, info, kTarget, false, m));
    }
    const auto rows = select_rows(kProblem, info, kTarget, true, false, &table);
    REQUIRE(rows.size() >= 4);
    CHECK(rows[0].max_m == 4);
    CHECK(rows[1].max_m == 64);
    CHECK(rows[2].max_m == 128);
    CHECK(rows.back().max_m == kAll);
    QkvProblem other = kProblem;
    other.n_v = 72;
    CHECK(select_specialization(other, info, kTarget, true, 4, false, &table) ==
          select_specialization(other, info, kTarget, true, 4));
  }

  TEST_CASE("neighbours that launch the same kernel are one row, also where the built-in rows go on") {
    const DeviceInfo info = typical_device(90);
    const TuningTable table = table_of({{1, 3}, {2, 3}, {4, 3}, {8, 4}});
    const auto rows = select_rows(kProblem, info, kTarget, true, false, &table);
    CHECK(rows[0].max_m == 4);
    CHECK(rows[1].max_m == 8);
    const auto built_in = select_rows(kProblem, info, kTarget, true);
    TuningTable same(hardware_of(info, kTarget), std::string(64, 'a'));
    for (const std::uint64_t m : {1, 2, 4, 8, 16, 300}) {
      same.set(row_of({m, select_specialization(kProblem, info, kTarget, true, m), false}, m));
    }
    const auto again = select_rows(kProblem, info, kTarget, true, false, &same);
    CHECK(again.back().max_m == kAll);
    CHECK(again.back().spec == built_in.back().spec);
    for (std::size_t i = 1; i < again.size(); ++i) CHECK_FALSE(again[i].spec == again[i - 1].spec);
  }

  TEST_CASE("a table of other hardware changes nothing; clocks, name and driver are not hardware") {
    const DeviceInfo info = typical_device(90);
    const TuningTable table = table_of({{64, 3}});
    const auto tuned = select_specialization(kProblem, info, kTarget, true, 64, false, &table);
    REQUIRE_FALSE(tuned == select_specialization(kProblem, info, kTarget, true, 64));
    DeviceInfo same = info;
    same.clock_khz = 1, same.name = "other", same.driver_version = 12040, same.ordinal = 3, same.total_memory_bytes = 1;
    CHECK(select_specialization(kProblem, same, kTarget, true, 64, false, &table) == tuned);
    const auto untouched = [&](const std::function<void(DeviceInfo&)>& change) {
      DeviceInfo other = info;
      change(other);
      return select_specialization(kProblem, other, kTarget, true, 64, false, &table) ==
             select_specialization(kProblem, other, kTarget, true, 64);
    };
    CHECK(untouched([](DeviceInfo& d) { d.multiprocessors = 114; }));
    CHECK(untouched([](DeviceInfo& d) { d.l2_bytes = 50u << 20; }));
    CHECK(untouched([](DeviceInfo& d) { d.smem_per_block_bytes -= 1024; }));
    CHECK(untouched([](DeviceInfo& d) { d.smem_per_multiprocessor_bytes -= 1024; }));
    CHECK(select_specialization(kProblem, info, {.sm = 80}, true, 64, false, &table) ==
          select_specialization(kProblem, info, {.sm = 80}, true, 64));
  }

  TEST_CASE("a tile that is gone or cannot run here is never chosen: its range goes to the built-in rows") {
    const DeviceInfo info = typical_device(90);
    TuningTable table = table_of({{4, 3}, {200, 4}});
    TunedRow gone = table.rows()[0];
    gone.max_m = 64;
    gone.tile.stages = 77;  // older kernels' tile, or one with more shared memory than there is
    table.set(gone);
    const auto rows = select_rows(kProblem, info, kTarget, true, false, &table);
    for (std::uint64_t m = 5; m <= 64; ++m) {
      CHECK(select_specialization(kProblem, info, kTarget, true, m, false, &table) ==
            select_specialization(kProblem, info, kTarget, true, m));
    }
    CHECK(rows.front().max_m == 4);
    for (std::size_t i = 1; i < rows.size(); ++i) CHECK(rows[i].max_m > rows[i - 1].max_m);
    // wgmma is for Hopper: a table that claims another architecture may have it is not believed.
    const DeviceInfo ada = typical_device(89);
    TuningTable foreign(hardware_of(ada, {.sm = 89}), std::string(64, 'a'));
    for (const SelectedRow& row : candidate_specializations(kProblem, info, kTarget, true, 64, false)) {
      if (row.spec.pipeline == Pipeline::wgmma) foreign.set(row_of(row, 64));
    }
    REQUIRE(foreign.rows().size() == 1);
    CHECK(select_specialization(kProblem, ada, {.sm = 89}, true, 64, false, &foreign).pipeline != Pipeline::wgmma);
    for (std::uint64_t m = 1; m <= 600; ++m) {
      CHECK(select_specialization(kProblem, ada, {.sm = 89}, true, m, false, &foreign) ==
            select_specialization(kProblem, ada, {.sm = 89}, true, m));
    }
  }

  TEST_CASE("a plan takes the rows over: it launches the tuned tile, how the table says, and outlives the table") {
    Bench bench;
    const CUstream stream = fake::make_stream(bench.context->handle());
    const auto candidates = bench.candidates(8, true);
    auto table = std::make_unique<TuningTable>(table_of({{8, 4}, {32, 5}}, true, bench.context->info()));
    REQUIRE_FALSE(candidates[4].dependent_launch == candidates[5].dependent_launch);
    REQUIRE_FALSE(candidates[4].spec == select_specialization(kProblem, bench.context->info(), kTarget, true, 8, true));
    const QkvPlan plan(*bench.cache, *bench.context, kProblem,
                       {.max_m = 100, .weights_are_constant = true, .tuning = table.get()});
    table.reset();
    const int compiled = fake::nvrtc_compiles;
    for (const auto& [m, i] : {std::pair{1, 4}, {8, 4}, {9, 5}, {32, 5}}) {
      const SelectedRow& want = candidates[static_cast<std::size_t>(i)];
      CHECK(plan.row(static_cast<std::uint64_t>(m)) == want.spec);
      fake::clear_log();
      plan(tensors_of(kProblem, m), stream);
      CHECK(fake::call_log().size() == 4);  // as without a table: the context, the launch, the context back
      REQUIRE(fake::launches().size() == 1);
      CHECK(fake::launches()[0].function == bench.cache->find(*bench.context, want.spec)->function());
      CHECK(fake::launches()[0].dependent == want.dependent_launch);
    }
    CHECK(fake::nvrtc_compiles == compiled);
    CHECK(plan.row(33) == select_specialization(kProblem, bench.context->info(), kTarget, true, 33, true));
    CHECK_FALSE(plan.row(8, false).aligned);
    const QkvPlan without(*bench.cache, *bench.context, kProblem);
    CHECK(without.row(8) == select_specialization(kProblem, bench.context->info(), kTarget, true, 8));
  }

  TEST_CASE("a table is a value: set, replaced, ordered, merged with its like alone") {
    TuningTable table = table_of({{64, 3}, {1, 2}, {8, 2}});
    CHECK(table.rows().size() == 3);
    CHECK(std::is_sorted(table.rows().begin(), table.rows().end(),
                         [](const TunedRow& a, const TunedRow& b) { return a.max_m < b.max_m; }));
    const TuningTable copy = table;
    TunedRow row = table.rows()[1];
    row.median_us = row.min_us = row.max_us = 1;
    table.set(row);
    CHECK(table.rows().size() == 3);
    CHECK_FALSE(table == copy);
    TuningTable both = copy;
    both.merge(table);
    CHECK(both == table);
    both.merge(table_of({{128, 1}}));
    CHECK(both.rows().size() == 4);
    CHECK(has(thrown_by<InvalidProblem>([&] { both.merge(table_of({}, false, typical_device(80))); }), "hardware"));
    CHECK(has(thrown_by<InvalidProblem>([&] { both.merge(TuningTable(both.hardware(), std::string(64, 'b'))); }),
              "templates_digest"));
    const auto refused = [&](const std::function<void(TunedRow&)>& spoil) {
      TunedRow bad = row;
      spoil(bad);
      return thrown_by<InvalidProblem>([&] { table.set(bad); });
    };
    CHECK(has(refused([](TunedRow& r) { r.max_m = 0; }), "max_m"));
    CHECK(has(refused([](TunedRow& r) { r.median_us = -1; }), "median_us"));
    CHECK(has(refused([](TunedRow& r) { r.min_us = 2; }), "min_us"));
    CHECK(has(refused([](TunedRow& r) { r.max_us = std::numeric_limits<double>::infinity(); }), "max_us"));
    CHECK(has(refused([](TunedRow& r) { r.dependent_launch = true; }), "dependent_launch"));
    CHECK(has(refused([](TunedRow& r) { r.problem.k = 100; }), "problem"));
    CHECK_THROWS_AS(TuningTable({}, "abc"), Error);
  }

  TEST_CASE("the file: there and back, replaced whole, nothing left beside it") {
    const Folder folder;
    TuningTable table = table_of({{1, 2}, {64, 3}});
    for (const SelectedRow& row : candidate_specializations(kProblem, typical_device(90), kTarget, true, 3, true)) {
      TunedRow tuned = row_of(row, 100 + table.rows().size(), true);
      tuned.median_us = 1.0 / 3 + 5.2;
      table.set(tuned);
    }
    CHECK(TuningTable::from_json(table.to_json()) == table);
    CHECK(TuningTable::from_json(TuningTable().to_json()) == TuningTable());
    const std::string file = folder.file("t.json");
    table.save(file);
    CHECK(TuningTable::load(file) == table);
    TuningTable().save(file);
    CHECK(TuningTable::load(file) == TuningTable());
    CHECK(folder.files() == 1);
    fs::create_directory(folder.file("taken"));
    CHECK(has(thrown_by<Error>([&] { table.save(folder.file("taken")); }), "taken"));
    CHECK(has(thrown_by<Error>([&] { table.save("/nonexistent/folder/t.json"); }), "/nonexistent/folder/t.json"));
    CHECK(folder.files() == 2);
    CHECK(has(thrown_by<Error>([&] { (void)TuningTable::load(folder.file("none")); }), "none"));
    std::ofstream(file) << "{}";
    CHECK(has(thrown_by<Error>([&] { (void)TuningTable::load(file); }), "t.json': tuning table: format: is missing"));
    fs::resize_file(file, std::uintmax_t{65} << 20);
    CHECK(has(thrown_by<Error>([&] { (void)TuningTable::load(file); }), "bytes"));
  }

  TEST_CASE("what no version of ours wrote is refused, and the message names the field") {
    const TuningTable table = table_of({{1, 2}, {64, 3}});
    const std::string text = table.to_json();
    for (std::size_t length = 0; length + 2 < text.size(); length += 7) {  // a file cut short
      CHECK(has(error_of(text.substr(0, length)), "tuning table"));
    }
    for (const char* bad :
         {"", "[]", "3", "null", "{\"rows\":[]}", "\x01\x02", "{\"format\":\"qkvjit tuning table\"}"}) {
      CHECK_MESSAGE(has(error_of(bad), "tuning table"), bad);
    }
    CHECK(has(error_of(std::string(200000, '[')), "tuning table"));
    using J = nlohmann::json;
    struct Case {
      const char* field;
      std::function<void(J&)> change;
    };
    const std::vector<Case> cases{
        {"format", [](J& j) { j["format"] = "other"; }},
        {"version", [](J& j) { j["version"] = kTuningTableVersion + 1; }},
        {"version", [](J& j) { j["version"] = "1"; }},
        {"surprise", [](J& j) { j["surprise"] = 1; }},
        {"hardware", [](J& j) { j["hardware"] = 3; }},
        {"hardware.target", [](J& j) { j["hardware"]["target"] = "sm_9x"; }},
        {"hardware.multiprocessors", [](J& j) { j["hardware"]["multiprocessors"] = -1; }},
        {"hardware.multiprocessors", [](J& j) { j["hardware"]["multiprocessors"] = 1e9; }},
        {"hardware.multiprocessors", [](J& j) { j["hardware"]["multiprocessors"] = 4000000000u; }},
        {"hardware.l2_bytes", [](J& j) { j["hardware"].erase("l2_bytes"); }},
        {"hardware.clock", [](J& j) { j["hardware"]["clock"] = 1; }},
        {"templates_digest", [](J& j) { j["templates_digest"] = "xyz"; }},
        {"rows", [](J& j) { j["rows"] = J::object(); }},
        {"rows[1]", [](J& j) { j["rows"][1] = nullptr; }},
        {"rows[1].k", [](J& j) { j["rows"][1]["k"] = 4096.5; }},
        {"rows[0].problem", [](J& j) { j["rows"][0]["k"] = 100; }},
        {"rows[0].problem", [](J& j) { j["rows"][0]["n_v"] = ~std::uint64_t{0}; }},
        {"rows[0].layout", [](J& j) { j["rows"][0]["layout"] = "k9n"; }},
        {"rows[0].layout", [](J& j) { j["rows"][0]["layout"] = "unknown"; }},
        {"rows[0].activation_dtype", [](J& j) { j["rows"][0]["activation_dtype"] = "an unknown type"; }},
        {"rows[0].max_m", [](J& j) { j["rows"][0]["max_m"] = 0; }},
        {"rows[0].max_m", [](J& j) { j["rows"][0]["max_m"] = -3; }},
        {"rows[0].pipeline", [](J& j) { j["rows"][0]["pipeline"] = "tensor"; }},
        {"rows[0].pipeline", [](J& j) { j["rows"][0]["pipeline"] = "a\nb"; }},
        {"rows[0].tile", [](J& j) { j["rows"][0]["tile"] = "m8n32_w1x1x8_s2_b3x"; }},
        {"rows[0].tile", [](J& j) { j["rows"][0]["tile"] = std::string(5000, 'm'); }},
        {"rows[0].tile", [](J& j) { j["rows"][0]["tile"] = "m99999999999999999999n1_w1x1x1_s1_b1"; }},
        {"rows[0].aligned", [](J& j) { j["rows"][0]["aligned"] = 1; }},
        {"rows[0].dependent_launch", [](J& j) { j["rows"][0]["dependent_launch"] = true; }},
        {"rows[0].median_us", [](J& j) { j["rows"][0]["median_us"] = "fast"; }},
        {"rows[0].median_us", [](J& j) { j["rows"][0]["median_us"] = nullptr; }},
        {"rows[0].min_us", [](J& j) { j["rows"][0]["min_us"] = 1e9; }},
        {"rows[0].max_us", [](J& j) { j["rows"][0].erase("max_us"); }},
        {"rows[1].note", [](J& j) { j["rows"][1]["note"] = "x"; }},
        {"rows", [](J& j) { j["rows"].push_back(j["rows"][0]); }},
    };
    for (const Case& c : cases) {
      const std::string message = error_of(changed(table, c.change));
      CHECK_MESSAGE(has(message, fmt::format("tuning table: {}", c.field)), c.field << " but: " << message);
      CHECK(message.size() < 2000);
    }
    // A key twice: one of the two would be dropped silently.
    std::string twice = text;
    twice.insert(twice.find('{') + 1, "\"version\": 1,");
    CHECK(has(error_of(twice), "version: is there twice"));
  }

#ifdef QKVJIT_TUNE_TOOL
  TEST_CASE("the tool: shows a file, refuses what makes no sense; without a GPU a sentence and exit code 2") {
    if (!fs::exists(QKVJIT_TUNE_TOOL)) {
      std::puts("SKIPPED: qkvjit-tune is not built here (builds with sanitizers leave the tools away)");
      return;
    }
    const auto tool = [](const std::string& arguments) {
      const std::string command = fmt::format("CUDA_VISIBLE_DEVICES= '{}' {} 2>&1", QKVJIT_TUNE_TOOL, arguments);
      FILE* pipe = popen(command.c_str(), "r");
      REQUIRE(pipe != nullptr);
      std::string out;
      char buffer[4096];
      for (std::size_t n = 0; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) out.append(buffer, n);
      const int status = pclose(pipe);
      return std::pair(WIFEXITED(status) ? WEXITSTATUS(status) : -1, out);
    };
    const Folder folder;
    const std::string file = folder.file("t.json");
    table_of({{64, 3}}).save(file);
    const auto [code, out] = tool(fmt::format("--show '{}'", file));
    CHECK(code == 0);
    CHECK(has(out, "512:256,64,64"));
    CHECK(has(out, "M <= 64"));
    CHECK(has(out, "not those of this build"));
    std::ofstream(file) << "{}";
    CHECK(tool(fmt::format("--show '{}'", file)).first == 3);
    CHECK(tool("").first == 2);
    CHECK(tool(fmt::format("-o '{}'", folder.file("new.json"))).first == 2);
    CHECK(tool(fmt::format("-o '{}' --shape 12", folder.file("new.json"))).first == 2);
    CHECK(tool("--show a -o b").first == 2);
    const auto none = tool(fmt::format("-o '{}' --shape 128:8,8,8", folder.file("new.json")));
    CHECK(none.first == 2);
    CHECK(has(none.second, "qkvjit-tune: "));
    CHECK_FALSE(fs::exists(folder.file("new.json")));
  }
#endif
}
