// SPDX-License-Identifier: Apache-2.0
// prepare() and prepare_async(): exactly the kernels that launches can need, progress, failures, cancel. Driver and
// NVRTC are fakes, but for one case.
#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "compile/name_expression.h"
#include "qkvjit/qkvjit.h"
#include "support/cache_fixture.h"
#include "support/fake_tensors.h"

namespace {

using namespace qkvjit;
using fake::begin;
using fake::check_clean;

const std::vector<QkvProblem> kProblems{{.n_q = 256, .n_k = 64, .n_v = 72, .k = 512},
                                        {.n_q = 96, .n_k = 96, .n_v = 96, .k = 384},
                                        {.n_q = 1, .n_k = 2, .n_v = 7, .k = 128},
                                        {.n_q = 256, .n_k = 64, .n_v = 72, .k = 512, .layout = WeightLayout::nk8}};

/// A GPU, its context and a cache; clean afterwards.
struct Bench {
  explicit Bench(CacheOptions options = {}) {
    begin();
    context.emplace(0, fake::table());
    cache.emplace(std::move(options), fake::nvrtc());
  }
  ~Bench() {
    cache.reset();
    context.reset();
    check_clean();
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  std::optional<DeviceContext> context;
  std::optional<KernelCache> cache;
};

std::string failure_of(const std::function<void()>& work) { return thrown_by<PrepareFailed>(work); }

}  // namespace

TEST_SUITE("prepare") {
  TEST_CASE("after prepare and freeze no launch compiles or loads: every M, odd pointers, both promises") {
    Bench bench;
    const PrepareReport report = bench.cache->prepare(*bench.context, kProblems);
    CHECK(report.kernels == std::size_t(fake::nvrtc_compiles));
    CHECK(report.already_loaded == 0);
    CHECK_FALSE(report.cancelled);
    bench.cache->freeze();
    const int loads = fake::calls("cuModuleLoadData");
    const CUstream stream = fake::make_stream(bench.context->handle());
    std::set<CUfunction> launched;
    for (const QkvProblem& problem : kProblems) {
      for (const bool constant : {false, true}) {
        const QkvPlan plan(*bench.cache, *bench.context, problem,
                           {.binding = Binding::lazy, .weights_are_constant = constant});
        for (const std::int64_t m :
             {1,  2,  3,  4,  5,   7,   8,   9,   15,  16,  17,  23,  24,  31,   32,   33,    48,
              63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 4099, 20000, 70000}) {
          for (const std::size_t shift : {0u, 4u, 8u}) plan(fake::tensors_of(problem, m, shift), stream);
        }
      }
    }
    for (const QkvProblem& problem : {kProblems[1]}) {
      for (const std::int64_t m : {1, 30, 3000}) {
        for (const std::size_t shift : {0u, 8u}) {
          qkv_project_int4(*bench.cache, *bench.context, fake::tensors_of(problem, m, shift), stream);
        }
      }
    }
    for (const fake::Launch& launch : fake::launches()) launched.insert(launch.function);
    CHECK(fake::calls("cuModuleLoadData") == loads);
    CHECK(fake::nvrtc_compiles == int(report.kernels));
    CHECK(bench.cache->stats().frozen_refusals == 0);
    CHECK(launched.size() == report.kernels);  // and none was prepared in vain
  }

  TEST_CASE("max_m and weights_are_constant narrow what is made; a second prepare makes nothing") {
    Bench bench;
    const auto count = [&](PrepareOptions options) {
      KernelCache cache({}, fake::nvrtc());
      return cache.prepare(*bench.context, {kProblems.data(), 1}, options).kernels;
    };
    const std::size_t all = count({});
    CHECK(count({.max_m = 1}) < all);
    CHECK(count({.weights_are_constant = false}) < all);
    CHECK(count({.max_m = 1, .weights_are_constant = false}) == 2);  // aligned and not

    CHECK(bench.cache->prepare(*bench.context, kProblems).already_loaded == 0);
    const int compiles = fake::nvrtc_compiles;
    const PrepareReport again = bench.cache->prepare(*bench.context, kProblems);
    CHECK(again.already_loaded == again.kernels);
    CHECK(fake::nvrtc_compiles == compiles);
  }

  TEST_CASE("progress: each kernel's phases in order, n of m complete, threads in use, the cache usable") {
    Bench bench;
    fake::nvrtc_milliseconds = 5;
    std::mutex mutex;
    std::map<std::string, std::vector<PreparePhase>> phases;
    std::set<std::size_t> done;
    std::set<std::size_t> totals;
    const PrepareReport report = bench.cache->prepare(*bench.context, kProblems,
                                                      {.threads = 4, .progress = [&](const PrepareProgress& progress) {
                                                         // No lock is held, so the cache may be used, also for the
                                                         // kernel at hand.
                                                         static_cast<void>(bench.cache->stats());
                                                         if (progress.phase != PreparePhase::compile)
                                                           bench.cache->get(*bench.context, progress.spec);
                                                         const std::lock_guard lock(mutex);
                                                         phases[describe(progress.spec)].push_back(progress.phase);
                                                         if (progress.phase == PreparePhase::ready)
                                                           done.insert(progress.done);
                                                         totals.insert(progress.total);
                                                         CHECK(progress.kernel == kernel_label(progress.spec));
                                                         CHECK(progress.elapsed_ms >= 0);
                                                       }});
    CHECK(phases.size() == report.kernels);
    for (const auto& [kernel, of_kernel] : phases) {
      CHECK(of_kernel == std::vector{PreparePhase::compile, PreparePhase::load, PreparePhase::ready});
    }
    CHECK(done.size() == report.kernels);
    CHECK(*done.begin() == 1);
    CHECK(*done.rbegin() == report.kernels);
    CHECK(totals == std::set{report.kernels});
    CHECK(fake::nvrtc_most_at_once > 1);
    CHECK(fake::nvrtc_most_at_once <= 4);
  }

  TEST_CASE("one failure: the others are done, the text names it, the cause is whole; the next prepare mends it") {
    Bench bench;
    fake::nvrtc_failures = 1;
    std::atomic<int> failed{0};
    const PrepareOptions options{.threads = 3, .progress = [&](const PrepareProgress& progress) {
                                   if (progress.phase == PreparePhase::failed) ++failed;
                                 }};
    try {
      static_cast<void>(bench.cache->prepare(*bench.context, kProblems, options));
      FAIL("did not throw");
    } catch (const PrepareFailed& error) {
      CHECK(has(error.what(), "prepare: 1 of "));
      CHECK(has(error.what(), "\n  qkv_"));
      CHECK(has(error.what(), "nvrtcCompileProgram failed with NVRTC_ERROR_COMPILATION"));
      REQUIRE(error.causes().size() == 1);
      CHECK(has(thrown_by<CompileError>([&] { std::rethrow_exception(error.causes()[0]); }), "nonsense"));
    }
    CHECK(failed == 1);
    const PrepareReport report = bench.cache->prepare(*bench.context, kProblems, options);
    CHECK(report.already_loaded == report.kernels - 1);
  }

  TEST_CASE("a progress callback that throws stops nothing") {
    Bench bench;
    const PrepareReport report = bench.cache->prepare(
        *bench.context, kProblems, {.progress = [](const PrepareProgress&) { throw std::runtime_error("no"); }});
    CHECK(bench.cache->stats().loads == report.kernels);
  }

  TEST_CASE("a refused problem throws before anything is made") {
    Bench bench;
    const std::vector<QkvProblem> problems{kProblems[0], {.n_q = 8, .n_k = 8, .n_v = 8, .k = 100}};
    CHECK_THROWS_AS(static_cast<void>(bench.cache->prepare(*bench.context, problems)), InvalidProblem);
    CHECK_THROWS_AS(static_cast<void>(bench.cache->prepare_async(*bench.context, problems)), InvalidProblem);
    CHECK(fake::nvrtc_compiles == 0);
  }

  TEST_CASE("a frozen cache prepares nothing and says so") {
    Bench bench;
    bench.cache->freeze();
    const std::string text = failure_of([&] { static_cast<void>(bench.cache->prepare(*bench.context, kProblems)); });
    CHECK(has(text, "the cache is frozen"));
    CHECK(fake::nvrtc_compiles == 0);
  }

  TEST_CASE("prepare_async: the caller goes on, the task tells the end") {
    Bench bench;
    fake::nvrtc_milliseconds = 20;
    const PrepareTask task = bench.cache->prepare_async(*bench.context, kProblems, {.threads = 2});
    CHECK_FALSE(task.is_done());
    CHECK_FALSE(task.wait_for(std::chrono::milliseconds(1)));
    const PrepareTask copy = task;
    const PrepareReport report = task.get();
    CHECK(task.is_done());
    CHECK(copy.get().kernels == report.kernels);
    CHECK(bench.cache->stats().loads == report.kernels);

    fake::nvrtc_failures = 1;
    const QkvProblem other{.n_q = 24, .n_k = 24, .n_v = 24, .k = 256};
    const PrepareTask failing = bench.cache->prepare_async(*bench.context, {&other, 1});
    CHECK(has(failure_of([&] { failing.get(); }), "prepare: 1 of "));
  }

  TEST_CASE("a cancelled task leaves out what has not begun") {
    Bench bench;
    fake::nvrtc_milliseconds = 30;
    const PrepareTask task = bench.cache->prepare_async(*bench.context, kProblems, {.threads = 2});
    task.cancel();
    const PrepareReport report = task.get();
    CHECK(report.cancelled);
    CHECK(report.skipped >= report.kernels - 4);
    CHECK(fake::nvrtc_compiles <= 4);
  }

  TEST_CASE("the cache ends while tasks run: it waits for what runs, and the task outlives it") {
    std::optional<PrepareTask> task;
    {
      Bench bench;
      fake::nvrtc_milliseconds = 30;
      for (int i = 0; i < 3; ++i) {
        task.emplace(bench.cache->prepare_async(*bench.context, kProblems, {.threads = 1, .progress = [&](const auto&) {
                                                                              static_cast<void>(bench.cache->stats());
                                                                            }}));
      }
    }
    CHECK(task->is_done());
    CHECK(task->get().cancelled);
    CHECK(fake::nvrtc_programs == 0);
  }

  TEST_CASE("the real NVRTC: one problem prepared, then frozen") {
    begin();
    const DeviceContext context(0, fake::table());
    KernelCache cache;
    const QkvProblem problem{.n_q = 64, .n_k = 8, .n_v = 8, .k = 128};
    const PrepareReport report = cache.prepare(context, {&problem, 1}, {.max_m = 1, .weights_are_constant = false});
    CHECK(report.kernels == 2);
    cache.freeze();
    const QkvPlan plan(cache, context, problem, {.max_m = 1});
    CHECK(cache.stats().compiles == 2);
  }
}
