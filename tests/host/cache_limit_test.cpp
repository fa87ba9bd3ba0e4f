// SPDX-License-Identifier: Apache-2.0
// KernelCache's limits: the least recently used goes first, what is held or pinned stays, nothing grows without end,
// and an unload leaves captures alone. Driver and NVRTC are fakes.
#include <doctest/doctest.h>

#include <memory>
#include <thread>
#include <vector>

#include "qkvjit/qkvjit.h"
#include "support/cache_fixture.h"
#include "support/fake_tensors.h"

namespace {

using namespace qkvjit;
using fake::begin;
using fake::check_clean;
using fake::spec_of;

const QkvProblem kProblem{.n_q = 96, .n_k = 96, .n_v = 96, .k = 384};

}  // namespace

TEST_SUITE("cache_limit") {
  TEST_CASE("the least recently used kernel is unloaded; its artifact serves the next load") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({.max_modules = 3}, fake::nvrtc());
      for (const unsigned n : {1u, 2u, 3u}) cache.get(context, spec_of(n));
      cache.get(context, spec_of(1));
      cache.get(context, spec_of(4));  // takes the place of 2
      CHECK(cache.find(context, spec_of(2)) == nullptr);
      for (const unsigned n : {1u, 3u, 4u}) CHECK(cache.find(context, spec_of(n)) != nullptr);
      CHECK(fake::alive().modules == 3);
      CHECK(cache.stats().module_evictions == 1);
      CHECK(cache.stats().modules == 3);
      CHECK(cache.get(context, spec_of(2)) != nullptr);
      CHECK(fake::nvrtc_compiles == 4);
      CHECK(cache.stats().loads == 5);
      CHECK(cache.stats().module_evictions == 2);
    }
    check_clean();
  }

  TEST_CASE("find() is a use as well") {
    begin();
    const DeviceContext context(0, fake::table());
    KernelCache cache({.max_modules = 2}, fake::nvrtc());
    cache.get(context, spec_of(1));
    cache.get(context, spec_of(2));
    CHECK(cache.find(context, spec_of(1)) != nullptr);
    cache.get(context, spec_of(3));
    CHECK(cache.find(context, spec_of(1)) != nullptr);
    CHECK(cache.find(context, spec_of(2)) == nullptr);
  }

  TEST_CASE("what a handle or a plan holds, what is pinned or prepared, and what a call without a plan launched stay") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({.max_modules = 1}, fake::nvrtc());
      const CUstream stream = fake::make_stream(context.handle());
      auto held = cache.get(context, spec_of(1));
      CUfunction pinned = cache.pin(context, spec_of(2))->function();
      QkvPlan plan(cache, context, {.n_q = 8, .n_k = 8, .n_v = 8, .k = 128});
      const CUfunction planned = cache.find(context, plan.row(1))->function();
      const QkvTensors tensors = fake::tensors_of(kProblem, 1);
      qkv_project_int4(cache, context, tensors, stream);
      const CUfunction launched = fake::launches().back().function;
      const QkvProblem prepared{.n_q = 16, .n_k = 16, .n_v = 16, .k = 128};
      const std::size_t kernels = cache.prepare(context, {&prepared, 1}).kernels;
      CHECK(kernels > 3);

      for (unsigned n = 100; n < 150; ++n) cache.get(context, spec_of(n));
      CHECK(cache.find(context, spec_of(1)) == held);
      CHECK(cache.find(context, spec_of(2))->function() == pinned);
      CHECK(cache.find(context, plan.row(1))->function() == planned);
      const int loads = fake::calls("cuModuleLoadData");
      qkv_project_int4(cache, context, tensors, stream);
      CHECK(fake::launches().back().function == launched);
      CHECK(cache.prepare(context, {&prepared, 1}).already_loaded == kernels);
      CHECK(fake::calls("cuModuleLoadData") == loads);

      held.reset();  // goes with the next load
      cache.get(context, spec_of(200));
      CHECK(cache.find(context, spec_of(1)) == nullptr);
    }
    check_clean();
  }

  TEST_CASE("a kernel found while it is pinned later stays from then on") {
    begin();
    const DeviceContext context(0, fake::table());
    KernelCache cache({.max_modules = 1}, fake::nvrtc());
    cache.get(context, spec_of(1));
    cache.pin(context, spec_of(1));
    cache.get(context, spec_of(2));
    cache.get(context, spec_of(3));
    CHECK(cache.find(context, spec_of(1)) != nullptr);
    CHECK(cache.find(context, spec_of(2)) == nullptr);
  }

  TEST_CASE("artifacts that no loaded kernel uses keep to their byte budget") {
    begin();
    const DeviceContext context(0, fake::table());
    KernelCache measure({}, fake::nvrtc());
    measure.compile(spec_of(1));
    const std::size_t one = measure.stats().artifact_bytes;
    CHECK(one > sizeof(CompiledKernel));

    KernelCache cache({.max_artifact_bytes = 3 * one + one / 2}, fake::nvrtc());
    const auto loaded = cache.get(context, spec_of(1));
    for (unsigned n = 2; n < 30; ++n) cache.compile(spec_of(n));
    CHECK(cache.stats().artifact_bytes <= 3 * one + one / 2);
    CHECK(cache.stats().artifact_evictions >= 25);
    CHECK(cache.is_compiled(spec_of(1)));  // in use
    CHECK_FALSE(cache.is_compiled(spec_of(2)));
    CHECK(cache.is_compiled(spec_of(29)));
  }

  TEST_CASE("0 is no limit") {
    begin();
    const DeviceContext context(0, fake::table());
    KernelCache cache({.max_modules = 0, .max_artifact_bytes = 0}, fake::nvrtc());
    for (unsigned n = 1; n <= 2000; ++n) cache.get(context, spec_of(n));
    CHECK(fake::alive().modules == 2000);
    CHECK(cache.stats().module_evictions == 0);
    CHECK(cache.stats().artifact_evictions == 0);
  }

  TEST_CASE("an unload while another thread, or this one, captures leaves the capture valid") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({.max_modules = 1}, fake::nvrtc());
      const CUstream stream = fake::make_stream(context.handle());
      for (const CUstreamCaptureMode mode :
           {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
        cache.get(context, spec_of(1));
        const int unloads = fake::calls("cuModuleUnload");
        fake::begin_capture(stream, mode);
        std::jthread([&] {
          cache.get(context, spec_of(2));
          CHECK(fake::capture_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL);
        }).join();
        cache.get(context, spec_of(3));
        CHECK(fake::capture_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL);
        CHECK(fake::calls("cuModuleUnload") == unloads + 2);
        CHECK(fake::alive().modules == 1);
        CHECK(fake::end_capture(stream));
      }
    }
    check_clean();
  }

  TEST_CASE("an unload that the driver refuses fails no call") {
    begin();
    const DeviceContext context(0, fake::table());
    KernelCache cache({.max_modules = 1}, fake::nvrtc());
    cache.get(context, spec_of(1));
    fake::fail("cuModuleUnload", 1, CUDA_ERROR_UNKNOWN);
    CHECK(cache.get(context, spec_of(2)) != nullptr);
    CHECK(fake::clear_faults());
    CHECK(cache.get(context, spec_of(1)) != nullptr);
    CHECK(cache.stats().modules == 1);
  }

  TEST_CASE("10,000 shapes on eight threads: modules and what hangs on them stay bounded") {
    begin();
    {
      constexpr std::size_t kLimit = 64;
      constexpr int kThreads = 8;
      constexpr unsigned kShapes = 10000;
      const DeviceContext context(0, fake::table());
      KernelCache cache({.max_modules = kLimit, .max_artifact_bytes = 1 << 18}, fake::nvrtc());
      fake::race(kThreads, [&](int thread) {
        std::shared_ptr<const Kernel> last;
        for (unsigned n = 1 + unsigned(thread); n <= kShapes; n += kThreads) {
          last = cache.get(context, spec_of(n));
          // One kernel on its way in for each thread, and one on its way out.
          if (fake::alive().modules > int(kLimit) + 2 * kThreads) throw Error("too many modules");
          const CacheStats stats = cache.stats();
          if (stats.artifact_bytes > (1 << 18) + (kLimit + 2 * kThreads) * 4096) throw Error("too many artifacts");
        }
        return last;
      });
      CHECK(fake::nvrtc_compiles == int(kShapes));
      const CacheStats stats = cache.stats();
      CHECK(stats.modules <= kLimit + kThreads);
      CHECK(stats.module_evictions + stats.modules == kShapes);
      CHECK(stats.artifact_evictions > 0);
      cache.get(context, spec_of(kShapes + 1));
      CHECK(cache.stats().modules == kLimit);
      CHECK(fake::alive().modules == int(kLimit));
      CHECK(fake::alive().primary_retains == 1);
    }
    check_clean();
  }
}
