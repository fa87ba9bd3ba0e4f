// SPDX-License-Identifier: Apache-2.0
// KernelCache: one compile a key however many ask, failures that reach everyone and are forgotten, modules of the
// right context that never leak. A driver of plain C++; NVRTC is a fake that answers at once, or the real one.
#include <doctest/doctest.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/device_state.h"
#include "qkvjit/error.h"
#include "qkvjit/kernel_cache.h"
#include "qkvjit/select.h"
#include "support/cache_fixture.h"
#include "support/driver_faults.h"
#include "support/fake_driver.h"
#include "support/fake_nvrtc.h"
#include "support/messages.h"

namespace {

using namespace qkvjit;
using fake::begin;
using fake::check_clean;
using fake::kThreads;
using fake::Outcome;
using fake::race;
using fake::spec_of;

}  // namespace

TEST_SUITE("cache") {
  TEST_CASE("the first get compiles and loads, the next finds") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({}, fake::nvrtc());
      const Specialization spec = spec_of();
      CHECK(cache.find(context, spec) == nullptr);
      const auto kernel = cache.get(context, spec);
      CHECK(kernel->spec() == spec);
      CHECK_FALSE(kernel->loaded_from_ptx());
      CHECK(kernel->compiled().registers == 40);
      CHECK_FALSE(fake::image_of(kernel->function()).is_ptx);
      CHECK(has(fake::image_of(kernel->function()).bytes, kernel->compiled().lowered_name));
      CHECK(fake::function_attribute(kernel->function(), CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) ==
            static_cast<int>(smem_bytes(spec)));
      CHECK(fake::is_function_loaded(kernel->function()));

      fake::clear_log();
      CHECK(cache.get(context, spec) == kernel);
      CHECK(cache.find(context, spec) == kernel);
      CHECK(fake::call_log().empty());  // a hit asks the driver nothing
      const CacheStats stats = cache.stats();
      CHECK(stats.compiles == 1);
      CHECK(stats.loads == 1);
      CHECK(stats.memory_hits == 1);
      CHECK(stats.compile_failures == 0);
      CHECK(stats.compile_ms > 0);
    }
    check_clean();
  }

  TEST_CASE("each field of the specialisation is part of the key") {
    begin();
    const DeviceContext context(0, fake::table());
    KernelCache cache({}, fake::nvrtc());
    std::vector<Specialization> specs(12, spec_of());
    specs[1].layout = WeightLayout::nk8;
    specs[2].n_q = 65;
    specs[3].n_k = 65;
    specs[4].n_v = 65;
    specs[5].k = 256;
    specs[6].aligned = true;
    specs[7].tile.block_m = 16;
    specs[8].tile.stages = 2;
    specs[9].target.sm = 80;
    specs[10].pipeline = Pipeline::mma_sync;
    std::swap(specs[11].n_q, specs[11].n_k);
    std::set<CUfunction> functions;
    for (const Specialization& spec : specs) functions.insert(cache.get(context, spec)->function());
    CHECK(functions.size() == specs.size());
    CHECK(cache.stats().compiles == specs.size());
  }

  TEST_CASE("LoadFrom::ptx, and a GPU that is newer than NVRTC, load the PTX") {
    begin({{.sm_major = 9}, {.name = "Fake RTX 5090", .sm_major = 12, .sm_minor = 0}});
    const DeviceContext hopper(0, fake::table()), blackwell(1, fake::table());
    KernelCache from_ptx({.load = LoadFrom::ptx}, fake::nvrtc());
    CHECK(from_ptx.get(hopper, spec_of())->loaded_from_ptx());
    CHECK(fake::image_of(from_ptx.get(hopper, spec_of())->function()).is_ptx);

    KernelCache cache({}, fake::nvrtc({80, 86, 89, 90}));  // no sm_120
    const Target target = cache.target_for(blackwell.info());
    CHECK(target == Target{.sm = 90});
    const auto kernel = cache.get(blackwell, spec_of(64, target.sm));
    CHECK(kernel->loaded_from_ptx());
    CHECK(fake::image_of(kernel->function()).is_ptx);
    CHECK_FALSE(cache.get(hopper, spec_of(64, target.sm))->loaded_from_ptx());
    CHECK(cache.stats().compiles == 1);  // one artifact serves both
  }

  TEST_CASE("a cubin of an older minor of the GPU's major is loaded as it is") {
    begin({{.sm_major = 8, .sm_minor = 9}});
    const DeviceContext ada(0, fake::table());
    KernelCache other({}, fake::nvrtc());
    CHECK_FALSE(other.get(ada, spec_of(64, 80))->loaded_from_ptx());
  }

  TEST_CASE("a driver before 12.4, which has no cuFuncLoad") {
    begin();
    auto table = std::make_shared<DriverTable>(*fake::table());
    table->cuFuncLoad = nullptr;
    const DeviceContext context(0, table);
    KernelCache cache({}, fake::nvrtc());
    CHECK_FALSE(fake::is_function_loaded(cache.get(context, spec_of())->function()));
  }

  TEST_CASE("32 threads, one key: one compile, one load, one kernel") {
    begin();
    fake::nvrtc_milliseconds = 100;
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({}, fake::nvrtc());
      const auto outcomes = race(kThreads, [&](int) { return cache.get(context, spec_of()); });
      for (const Outcome& outcome : outcomes) {
        CHECK(outcome.error.empty());
        CHECK(outcome.kernel != nullptr);
        CHECK(outcome.kernel == outcomes[0].kernel);
      }
      CHECK(fake::nvrtc_compiles == 1);
      CHECK(fake::calls("cuModuleLoadData") == 1);
      CHECK(cache.stats().compiles == 1);
      CHECK(cache.stats().loads == 1);
    }
    check_clean();
  }

  TEST_CASE("32 threads, 16 keys: one compile each, side by side") {
    begin();
    fake::nvrtc_milliseconds = 50;
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({}, fake::nvrtc());
      const auto outcomes = race(kThreads, [&](int i) { return cache.get(context, spec_of(100 + unsigned(i) / 2)); });
      for (int i = 0; i < kThreads; ++i) {
        const Outcome& outcome = outcomes[static_cast<std::size_t>(i)];
        REQUIRE(outcome.error.empty());
        CHECK(outcome.kernel->spec().n_q == 100 + unsigned(i) / 2);
        CHECK(outcome.kernel == outcomes[static_cast<std::size_t>(i ^ 1)].kernel);
      }
      CHECK(fake::nvrtc_compiles == 16);
      CHECK(fake::nvrtc_most_at_once > 4);
      CHECK(fake::alive().modules == 16);
    }
    check_clean();
  }

  TEST_CASE("a compile that ends while others are about to ask is not repeated") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({}, fake::nvrtc());
      constexpr unsigned kKeys = 3000;
      race(4, [&](int) {
        std::shared_ptr<const Kernel> last;
        for (unsigned n = 1; n <= kKeys; ++n) last = cache.get(context, spec_of(n));
        return last;
      });
      CHECK(fake::nvrtc_compiles == int(kKeys));
      CHECK(fake::calls("cuModuleLoadData") == int(kKeys));
    }
    check_clean();
  }

  TEST_CASE("the real NVRTC: 32 threads, the same and different keys") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache;
      const Target target = cache.target_for(context.info());
      const auto outcomes =
          race(kThreads, [&](int i) { return cache.get(context, spec_of(1 + unsigned(i) % 8, target.sm)); });
      for (int i = 0; i < kThreads; ++i) {
        const Outcome& outcome = outcomes[static_cast<std::size_t>(i)];
        REQUIRE_MESSAGE(outcome.error.empty(), outcome.error);
        CHECK(outcome.kernel == outcomes[static_cast<std::size_t>(i % 8)].kernel);
        CHECK(outcome.kernel->spec().n_q == 1 + unsigned(i) % 8);
        CHECK_FALSE(outcome.kernel->loaded_from_ptx());
        CHECK(has(fake::image_of(outcome.kernel->function()).bytes, outcome.kernel->compiled().lowered_name));
        CHECK(has(outcome.kernel->compiled().ptx, outcome.kernel->compiled().lowered_name));
      }
      CHECK(cache.stats().compiles == 8);
      CHECK(fake::alive().modules == 8);
    }
    check_clean();
  }

  TEST_CASE("a failed compile reaches everyone who waits, with the log, and is forgotten") {
    begin();
    fake::nvrtc_milliseconds = 300;
    fake::nvrtc_failures = 1000;
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({}, fake::nvrtc());
      for (const Outcome& outcome : race(kThreads, [&](int) { return cache.get(context, spec_of()); })) {
        CHECK(outcome.kernel == nullptr);
        for (const char* part :
             {"nvrtcCompileProgram", "NVRTC_ERROR_COMPILATION", "identifier \"nonsense\" is undefined",
              "--gpu-architecture=sm_90", "a fake libnvrtc.so.13", "13.0", "qkv_simple.cu",
              "    1 | // SPDX-License-Identifier", "n_q=64"}) {
          CHECK_MESSAGE(has(outcome.error, part), part << " in " << outcome.error.substr(0, 600));
        }
      }
      CHECK(fake::nvrtc_compiles == 1);
      CHECK(cache.stats().compile_failures == 1);
      CHECK(fake::calls("cuModuleLoadData") == 0);

      fake::nvrtc_failures = 0;
      fake::nvrtc_milliseconds = 0;
      CHECK(cache.get(context, spec_of()) != nullptr);  // nothing of the failure stayed
      CHECK(cache.stats().compiles == 1);
      CHECK(cache.stats().compile_failures == 1);
    }
    check_clean();
  }

  TEST_CASE("the real NVRTC fails: the whole log, and nothing stays") {
    begin();
    const DeviceContext context(0, fake::table());
    KernelCache cache;
    Specialization spec = spec_of(64, 7);  // no such architecture
    try {
      cache.get(context, spec);
      FAIL("did not throw");
    } catch (const CompileError& error) {
      CHECK(has(error.what(), "sm_7"));
      CHECK(has(error.what(), "options"));
    }
    CHECK(cache.stats().compile_failures == 1);
    CHECK(cache.find(context, spec) == nullptr);
    CHECK(fake::alive().modules == 0);
  }

  TEST_CASE("a failed load reaches everyone who waits and is forgotten; the artifact is kept") {
    begin();
    fake::nvrtc_milliseconds = 200;
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({}, fake::nvrtc());
      fake::fail("cuModuleLoadData", 1, CUDA_ERROR_OUT_OF_MEMORY);
      for (const Outcome& outcome : race(kThreads, [&](int) { return cache.get(context, spec_of()); })) {
        CHECK(has(outcome.error, "cuModuleLoadData (cubin) failed with CUDA_ERROR_OUT_OF_MEMORY"));
      }
      CHECK(fake::clear_faults());
      CHECK(fake::calls("cuModuleLoadData") == 1);
      CHECK(cache.get(context, spec_of()) != nullptr);
      CHECK(fake::nvrtc_compiles == 1);
      CHECK(cache.stats().loads == 1);
    }
    check_clean();
  }

  TEST_CASE("every driver call failing in turn") {
    for (const bool bound_to_other_gpu : {false, true}) {
      fake::fail_each_call(bound_to_other_gpu, [](const auto& begin_teardown) {
        const DeviceContext context(0, fake::table());
        KernelCache cache({}, fake::nvrtc());
        cache.get(context, spec_of(64));
        cache.get(context, spec_of(72));
        begin_teardown();
      });
    }
  }

  TEST_CASE("modules belong to a context, artifacts to no one") {
    begin({fake::Gpu{}, fake::Gpu{}});
    {
      KernelCache cache({}, fake::nvrtc());
      std::optional<DeviceContext> first(std::in_place, 0, fake::table());
      const DeviceContext second(1, fake::table());
      const auto a = cache.get(*first, spec_of());
      const auto b = cache.get(second, spec_of());
      CHECK(a != b);
      CHECK(&a->compiled() == &b->compiled());
      CHECK(fake::alive().modules == 2);

      // A later context of the first GPU is another one: its kernels are loaded anew.
      first.reset();
      const DeviceContext later(0, fake::table());
      CHECK(cache.find(later, spec_of()) == nullptr);
      CHECK(cache.get(later, spec_of()) != a);
      CHECK(fake::nvrtc_compiles == 1);
    }
    check_clean();
  }

  TEST_CASE("compile needs no context, and get uses what it made") {
    begin();
    KernelCache cache({}, fake::nvrtc());
    const auto artifact = cache.compile(spec_of());
    CHECK(cache.compile(spec_of()) == artifact);
    CHECK(fake::call_log().empty());
    const DeviceContext context(0, fake::table());
    CHECK(&cache.get(context, spec_of())->compiled() == artifact.get());
    CHECK(fake::nvrtc_compiles == 1);
  }

  TEST_CASE("get_all: every kernel in its place, many at once, and the failure of one") {
    begin();
    fake::nvrtc_milliseconds = 20;
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({}, fake::nvrtc());
      std::vector<Specialization> specs;
      for (unsigned n = 1; n <= 12; ++n) specs.push_back(spec_of(n));
      specs.push_back(spec_of(3));  // twice
      const auto kernels = cache.get_all(context, specs, 6);
      REQUIRE(kernels.size() == 13);
      for (std::size_t i = 0; i < kernels.size(); ++i) CHECK(kernels[i]->spec() == specs[i]);
      CHECK(kernels[12] == kernels[2]);
      CHECK(fake::nvrtc_compiles == 12);
      CHECK(fake::nvrtc_most_at_once > 1);
      CHECK(fake::nvrtc_most_at_once <= 6);
      CHECK(cache.get_all(context, {}).empty());

      specs.clear();
      for (unsigned n = 101; n <= 108; ++n) specs.push_back(spec_of(n));
      fake::nvrtc_failures = 1;
      CHECK_THROWS_AS(cache.get_all(context, specs, 4), CompileError);
      CHECK(cache.get_all(context, specs, 4).size() == 8);
      CHECK(cache.stats().compile_failures == 1);
    }
    check_clean();
  }

  TEST_CASE("a kernel outlives cache and context") {
    begin();
    std::shared_ptr<const Kernel> kernel;
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({}, fake::nvrtc());
      kernel = cache.get(context, spec_of());
      cache.get(context, spec_of(72));
    }
    CHECK(fake::alive() == fake::Alive{.primary_retains = 1, .modules = 1});
    CHECK(has(fake::image_of(kernel->function()).bytes, kernel->compiled().lowered_name));
    std::jthread([&] { kernel.reset(); }).join();  // the last owner may be any thread
    check_clean();
  }

  TEST_CASE("a load while another thread captures leaves the capture valid") {
    begin();
    const DeviceContext context(0, fake::table());
    KernelCache cache({}, fake::nvrtc());
    const CUstream stream = fake::make_stream(context.handle());
    fake::begin_capture(stream);
    std::jthread([&] {
      cache.get(context, spec_of());
      CHECK(fake::capture_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL);
    }).join();
    cache.get(context, spec_of(72));
    CHECK(fake::capture_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK(fake::end_capture(stream));
  }

  TEST_CASE("a driver that is gone when the cache ends is met with silence") {
    begin();
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({}, fake::nvrtc());
      cache.get(context, spec_of());
      fake::shut_down();
    }
    CHECK(fake::misuses().empty());
  }

  TEST_CASE("a primary context reset by someone else: a typed error, and a new context works") {
    begin();
    {
      KernelCache cache({}, fake::nvrtc());
      const DeviceContext context(0, fake::table());
      cache.get(context, spec_of());
      fake::reset_primary_context(0);
      CHECK_THROWS_AS(cache.get(context, spec_of(72)), DriverError);
      const DeviceContext fresh(0, fake::table());
      CHECK(cache.get(fresh, spec_of()) != nullptr);
      CHECK(cache.get(fresh, spec_of(72)) != nullptr);
    }
    check_clean();
  }
}
