// SPDX-License-Identifier: Apache-2.0
// KernelCache for those who run it: freeze(), events, statistics, whole compile errors. Driver and NVRTC are fakes, but
// for one case.
#include <doctest/doctest.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "compile/name_expression.h"
#include "qkvjit/error.h"
#include "qkvjit/kernel_cache.h"
#include "support/cache_fixture.h"
#include "support/parallel.h"
#include "support/rate_limit.h"

namespace {

using namespace qkvjit;
using fake::begin;
using fake::check_clean;
using fake::kThreads;
using fake::Outcome;
using fake::race;
using fake::spec_of;

/// Events of any thread.
struct Events {
  std::mutex mutex;
  std::vector<CacheEvent> all;

  void add(const CacheEvent& event) {
    const std::lock_guard lock(mutex);
    all.push_back(event);
  }
  std::map<CacheEventKind, int> counts() {
    const std::lock_guard lock(mutex);
    std::map<CacheEventKind, int> counts;
    for (const CacheEvent& event : all) ++counts[event.kind];
    return counts;
  }
};

}  // namespace

TEST_SUITE("cache_service") {
  TEST_CASE("a frozen cache compiles nothing: CacheFrozen names the specialisation, to everyone who waits") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({}, fake::nvrtc());
      const auto kernel = cache.get(context, spec_of(1));
      cache.compile(spec_of(2));
      cache.freeze();
      CHECK(cache.get(context, spec_of(1)) == kernel);
      CHECK(cache.get(context, spec_of(2)) != nullptr);  // a load compiles nothing
      for (const Outcome& outcome : race(kThreads, [&](int) { return cache.get(context, spec_of(3)); })) {
        CHECK(has(outcome.error, "the cache is frozen"));
        CHECK(has(outcome.error, describe(spec_of(3))));
        CHECK(has(outcome.error, "prepare()"));
      }
      CHECK_THROWS_AS(cache.get(context, spec_of(3)), CacheFrozen);
      CHECK_THROWS_AS(cache.compile(spec_of(3)), CacheFrozen);
      CHECK(fake::nvrtc_compiles == 2);
      CHECK(cache.stats().frozen_refusals >= 3);
      CHECK(cache.stats().frozen_compiles == 0);
      CHECK(cache.stats().compile_failures == 0);

      cache.unfreeze();
      CHECK(cache.get(context, spec_of(3)) != nullptr);
      cache.freeze(FreezePolicy::warn);
      CHECK(cache.get(context, spec_of(4)) != nullptr);
      CHECK(cache.stats().frozen_compiles == 1);
    }
    check_clean();
  }

  TEST_CASE("statistics and events tell the same story") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      Events events;
      KernelCache cache({.max_modules = 2, .on_event = [&](const CacheEvent& event) { events.add(event); }},
                        fake::nvrtc());
      fake::nvrtc_milliseconds = 50;
      race(8, [&](int) { return cache.get(context, spec_of(1)); });
      fake::nvrtc_milliseconds = 0;
      cache.get(context, spec_of(2));
      cache.get(context, spec_of(2));
      cache.get(context, spec_of(3));  // unloads 1
      fake::nvrtc_failures = 1;
      CHECK_THROWS_AS(cache.get(context, spec_of(4)), CompileError);
      fake::fail("cuModuleLoadData", 1, CUDA_ERROR_OUT_OF_MEMORY);
      CHECK_THROWS_AS(cache.get(context, spec_of(4)), DriverError);
      cache.freeze();
      CHECK_THROWS_AS(cache.get(context, spec_of(5)), CacheFrozen);

      const CacheStats stats = cache.stats();
      CHECK(stats.compiles == 4);
      CHECK(stats.compile_failures == 1);
      CHECK(stats.loads == 3);
      CHECK(stats.load_failures == 1);
      CHECK(stats.waits == 7);
      CHECK(stats.memory_hits == 1);
      CHECK(stats.module_evictions == 1);
      CHECK(stats.frozen_refusals == 1);
      CHECK(stats.modules == 2);
      CHECK(stats.artifact_bytes > 4 * sizeof(CompiledKernel));
      CHECK(stats.compile_ms >= 50);
      CHECK(stats.load_ms > 0);

      auto counts = events.counts();
      CHECK(counts[CacheEventKind::compiled] == 4);
      CHECK(counts[CacheEventKind::compile_failed] == 1);
      CHECK(counts[CacheEventKind::compile_refused] == 1);
      CHECK(counts[CacheEventKind::loaded] == 3);
      CHECK(counts[CacheEventKind::load_failed] == 1);
      CHECK(counts[CacheEventKind::waited] == 7);
      CHECK(counts[CacheEventKind::module_evicted] == 1);
      for (const CacheEvent& event : events.all) {
        CHECK(event.kernel == kernel_label(event.spec));
        CHECK(event.key == describe(event.spec));
        const std::string kind = to_string(event.kind);
        CHECK(event.error.empty() == (kind.find("failed") == std::string::npos && kind != "compile_refused"));
        if (event.kind == CacheEventKind::waited) CHECK(event.milliseconds > 0);
      }
    }
    check_clean();
  }

  TEST_CASE("an event's callback may use the cache, also for the same kernel, and may throw") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      KernelCache* self = nullptr;
      std::atomic<int> calls{0};
      const auto on_event = [&](const CacheEvent& event) {
        ++calls;
        static_cast<void>(self->stats());
        if (event.error.empty()) self->get(context, event.spec);
        throw std::runtime_error("the callback's own");
      };
      KernelCache cache({.on_event = on_event}, fake::nvrtc());
      self = &cache;
      race(8, [&](int i) { return cache.get(context, spec_of(1 + unsigned(i) % 2)); });
      CHECK(calls >= 4);
      CHECK(fake::nvrtc_compiles == 2);
      fake::nvrtc_failures = 1;
      CHECK_THROWS_AS(cache.get(context, spec_of(9)), CompileError);
    }
    check_clean();
  }

  TEST_CASE("a compile error has the lines of each header that the log names") {
    begin();
    fake::nvrtc_failures = 1;
    fake::nvrtc_failure_log = "common/dequantize.cuh(3): error: nonsense";
    KernelCache cache({}, fake::nvrtc());
    const std::string text = thrown_by<CompileError>([&] { cache.compile(spec_of()); });
    CHECK(has(text, "\n  qkv_simple.cu:\n    1 | // SPDX"));
    CHECK(has(text, "\n  common/dequantize.cuh:\n    1 | // SPDX"));
    CHECK_FALSE(has(text, "qkv_decode.cu:"));
    CHECK(has(text, "a fake libnvrtc.so.13"));
    CHECK(has(text, "--gpu-architecture=sm_90"));
    CHECK_FALSE(cache.is_compiled(spec_of()));
    CHECK(cache.compile(spec_of()) != nullptr);
  }

  TEST_CASE("threads of all kinds at once: gets, pins, evictions, events, freezing") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      std::atomic<int> events{0};
      KernelCache cache({.max_modules = 8, .on_event = [&](const CacheEvent&) { ++events; }}, fake::nvrtc());
      const auto outcomes = race(kThreads, [&](int thread) {
        std::shared_ptr<const Kernel> last;
        for (unsigned i = 0; i < 200; ++i) {
          const Specialization spec = spec_of(1 + (i * 7 + unsigned(thread) * 13) % 40);
          if (i % 50 == 49) last = cache.pin(context, spec_of(1));
          if (thread == 0 && i % 20 == 0) cache.freeze(FreezePolicy::warn);
          if (thread == 0 && i % 20 == 10) cache.unfreeze();
          last = cache.get(context, spec);
          if (!(last->spec() == spec)) throw Error("another kernel");
          if (fake::image_of(last->function()).bytes.empty()) throw Error("an unloaded kernel");
          static_cast<void>(cache.stats());
        }
        return last;
      });
      for (const Outcome& outcome : outcomes) CHECK_MESSAGE(outcome.error.empty(), outcome.error);
      CHECK(events > 0);
      CHECK(cache.find(context, spec_of(1)) != nullptr);
    }
    check_clean();
  }

  TEST_CASE("the real NVRTC: a frozen cache refuses before it compiles") {
    begin();
    const DeviceContext context(0, fake::table());
    KernelCache cache;
    const Target target = cache.target_for(context.info());
    CHECK(cache.get(context, spec_of(64, target.sm)) != nullptr);
    cache.freeze();
    CHECK_THROWS_AS(cache.get(context, spec_of(72, target.sm)), CacheFrozen);
    CHECK(cache.stats().compiles == 1);
  }

  TEST_CASE("RateLimit lets one through and counts the rest") {
    RateLimit limit(std::chrono::milliseconds(50));
    CHECK(limit.try_pass() == 0);
    CHECK_FALSE(limit.try_pass().has_value());
    CHECK_FALSE(limit.try_pass().has_value());
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    CHECK(limit.try_pass() == 2);
  }

  TEST_CASE("for_each_parallel does each step once") {
    std::vector<std::atomic<int>> done(1000);
    for_each_parallel(done.size(), 7, [&](std::size_t i) { ++done[i]; });
    for (const auto& count : done) CHECK(count == 1);
    for_each_parallel(0, 0, [](std::size_t) { FAIL("no step"); });
  }
}
