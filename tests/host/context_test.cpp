// SPDX-License-Identifier: Apache-2.0
// DeviceContext and the guards around driver calls, against a driver made of plain C++: facts, refusals, every call
// failing in turn, whose context is current where, and a driver that goes away.
#include <doctest/doctest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/device_state.h"
#include "qkvjit/device_context.h"
#include "support/driver_faults.h"
#include "support/fake_driver.h"
#include "support/messages.h"

namespace {

using namespace qkvjit;

const std::vector<fake::Gpu> kTwoGpus{{},
                                      {.name = "Fake RTX 4090", .sm_major = 8, .sm_minor = 9, .multiprocessors = 128}};

void check_clean() {
  CHECK(fake::alive() == fake::Alive{});
  CHECK(fake::misuses().empty());
  CHECK(fake::context_stack().empty());
  CHECK(fake::capture_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

/// Runs `work` on a thread that never saw CUDA; checks that it left no context behind.
void on_fresh_thread(const std::function<void()>& work) {
  std::jthread([&] {
    work();
    CHECK(fake::context_stack().empty());
    CHECK(fake::capture_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL);
  }).join();
}

UniqueModule load_module(const std::shared_ptr<DeviceState>& state) {
  const ContextScope scope(*state);
  const RelaxedCapture relaxed(*state->driver);
  CUmodule module = nullptr;
  check(*state->driver, state->driver->cuModuleLoadData(&module, "some PTX"), "cuModuleLoadData");
  return {state, module};
}

}  // namespace

TEST_SUITE("context") {
  TEST_CASE("the facts of the GPU, and one retain that the last owner gives back") {
    fake::reset(kTwoGpus);
    std::shared_ptr<DeviceState> last;
    {
      const DeviceContext context(1, fake::table());
      CHECK(context.info().ordinal == 1);
      CHECK(context.info().name == "Fake RTX 4090");
      CHECK(context.info().sm() == 89);
      CHECK(context.info().multiprocessors == 128);
      CHECK(context.info().smem_per_block_bytes == 227 * 1024);
      CHECK(context.info().smem_per_multiprocessor_bytes == 228 * 1024);
      CHECK(context.info().registers_per_multiprocessor == 65536);
      CHECK(context.info().l2_bytes == 60 << 20);
      CHECK(context.info().total_memory_bytes == std::size_t{141} << 30);
      CHECK(context.info().clock_khz == 1980000);
      CHECK(context.info().driver_version == 13000);
      CHECK(context.handle() != nullptr);
      const DeviceContext copy = context;
      CHECK(copy.handle() == context.handle());
      CHECK(fake::alive().primary_retains == 1);
      const DeviceContext second(1, fake::table());
      CHECK(second.handle() == context.handle());  // the primary context is one
      CHECK(second.state()->id != context.state()->id);
      CHECK(fake::alive().primary_retains == 2);
      last = copy.state();
    }
    CHECK(fake::alive().primary_retains == 1);
    last.reset();
    check_clean();
  }

  TEST_CASE("an ordinal that no GPU has") {
    fake::reset(kTwoGpus);
    for (const int ordinal : {-1, 2, 3, 1000, -2147483647}) {
      const std::string text = thrown_by<UnsupportedDevice>([&] { DeviceContext(ordinal, fake::table()); });
      CHECK(has(text, "got " + std::to_string(ordinal)));
      CHECK(has(text, "below 2"));
    }
    CHECK(fake::calls("cuDevicePrimaryCtxRetain") == 0);
    fake::reset({});
    CHECK(has(thrown_by<UnsupportedDevice>([] { DeviceContext(0, fake::table()); }), "below 0"));
    check_clean();
  }

  TEST_CASE("a GPU below SM 8.0") {
    for (const auto& [major, minor] : {std::pair(7, 5), std::pair(7, 0), std::pair(6, 1)}) {
      fake::reset({{.name = "Fake Turing", .sm_major = major, .sm_minor = minor}});
      const std::string text = thrown_by<UnsupportedDevice>([] { DeviceContext(0, fake::table()); });
      CHECK(has(text, "Fake Turing"));
      CHECK(has(text, std::to_string(major) + "." + std::to_string(minor)));
      CHECK(has(text, "8.0"));
      CHECK(fake::calls("cuDevicePrimaryCtxRetain") == 0);
      check_clean();
    }
    fake::reset({{.sm_major = 8, .sm_minor = 0}});
    DeviceContext(0, fake::table());
    check_clean();
  }

  TEST_CASE("every driver call failing in turn") {
    for (const bool bound_to_other_gpu : {false, true}) {
      fake::fail_each_call(bound_to_other_gpu, [](const auto& begin_teardown) {
        const DeviceContext context(0, fake::table());
        const CUstream stream = fake::make_stream(context.handle()), other = fake::make_stream(context.handle());
        (void)context.pointer_facts(fake::make_memory(0, 64));
        (void)context.is_foreign_stream(stream);
        (void)context.is_capturing(stream);
        {
          const ContextScope scope(*context.state());
          context.state()->join(stream, other);
          context.state()->join(other, stream);
        }
        const UniqueModule module = load_module(context.state());
        begin_teardown();
      });
    }
  }

  TEST_CASE("the context is current inside a scope only") {
    fake::reset(kTwoGpus);
    const DeviceContext context(0, fake::table());
    const CUcontext ours = context.handle();
    const auto use = [&] {
      const ContextScope scope(*context.state());
      CHECK(fake::context_stack().back() == ours);
      const ContextScope inner(*context.state());
      CHECK(fake::context_stack().back() == ours);
    };
    on_fresh_thread(use);
    on_fresh_thread([&] {
      CHECK_THROWS_AS(([&] {
                        use();
                        throw std::runtime_error("x");
                      }()),
                      std::runtime_error);
    });

    // A thread that works with another GPU, or with another context of this one.
    for (const int ordinal : {0, 1}) {
      const CUcontext theirs = fake::make_context(ordinal);
      fake::push_context(theirs);
      use();
      CHECK(fake::context_stack() == std::vector{theirs});
      try {
        const ContextScope scope(*context.state());
        throw std::runtime_error("unwinds");
      } catch (const std::runtime_error&) {
        CHECK(fake::context_stack() == std::vector{theirs});
      }
      fake::pop_context();
    }

    // A thread that has it already pays for one query.
    fake::push_context(ours);
    fake::clear_log();
    use();
    CHECK(fake::calls("cuCtxGetCurrent") == 2);
    CHECK(fake::calls("cuCtxPushCurrent") == 0);
    CHECK(fake::calls("cuCtxPopCurrent") == 0);
    CHECK(fake::context_stack() == std::vector{ours});
    fake::pop_context();
    CHECK(fake::misuses().empty());
  }

  TEST_CASE("what the driver says of a pointer") {
    fake::reset(kTwoGpus);
    const DeviceContext context(0, fake::table());
    const CUcontext second = fake::make_context(0), far = fake::make_context(1);
    const auto facts = [&](const void* pointer) {
      PointerFacts result;
      on_fresh_thread([&] { result = context.pointer_facts(pointer); });
      return result;
    };
    const auto check_facts = [&](const void* pointer, MemoryKind kind, int ordinal, bool is_foreign) {
      const PointerFacts got = facts(pointer);
      CHECK(got.kind == kind);
      if (kind != MemoryKind::host) CHECK(got.ordinal == ordinal);
      CHECK(got.foreign_context == is_foreign);
    };
    int local = 0;
    check_facts(&local, MemoryKind::host, -1, false);
    check_facts(nullptr, MemoryKind::host, -1, false);
    char* const memory = static_cast<char*>(fake::make_memory(0, 1000));
    check_facts(memory, MemoryKind::cuda, 0, false);
    check_facts(memory + 999, MemoryKind::cuda, 0, false);
    check_facts(memory + 1000, MemoryKind::host, -1, false);
    check_facts(fake::make_memory(0, 64, fake::Memory::pool), MemoryKind::cuda, 0, false);
    check_facts(fake::make_memory(0, 64, fake::Memory::managed), MemoryKind::managed, 0, false);
    check_facts(fake::make_memory(0, 64, fake::Memory::pinned), MemoryKind::host_pinned, 0, false);
    check_facts(fake::make_memory(0, 64, fake::Memory::device, second), MemoryKind::cuda, 0, true);
    // Of another GPU: its ordinal says all; that its context is another one is no further fault.
    check_facts(fake::make_memory(1, 64), MemoryKind::cuda, 1, false);
    check_facts(fake::make_memory(1, 64, fake::Memory::device, far), MemoryKind::cuda, 1, false);

    fake::fail("cuPointerGetAttributes", 1, CUDA_ERROR_INVALID_VALUE);  // what some drivers say of host memory
    check_facts(memory, MemoryKind::host, -1, false);
    fake::fail("cuPointerGetAttributes", 1, CUDA_ERROR_LAUNCH_FAILED);
    CHECK(has(thrown_by<DriverError>([&] { (void)context.pointer_facts(memory); }), "cuPointerGetAttributes"));
    CHECK(fake::context_stack().empty());
  }

  TEST_CASE("what the driver says of a stream") {
    fake::reset(kTwoGpus);
    const DeviceContext context(0, fake::table());
    const CUstream own = fake::make_stream(context.handle());
    const CUstream foreign = fake::make_stream(fake::make_context(0));
    on_fresh_thread([&] {
      CHECK_FALSE(context.is_foreign_stream(own));
      CHECK_FALSE(context.is_foreign_stream(nullptr));
      CHECK_FALSE(context.is_foreign_stream(CU_STREAM_LEGACY));
      CHECK_FALSE(context.is_foreign_stream(CU_STREAM_PER_THREAD));
      CHECK(context.is_foreign_stream(foreign));
      CHECK_FALSE(context.is_capturing(own));
      fake::begin_capture(own);
      CHECK(context.is_capturing(own));
      CHECK(fake::end_capture(own));
      CHECK_FALSE(context.is_capturing(own));
    });
  }

  TEST_CASE("joins: an event each way, cached, none where the streams are equal") {
    fake::reset();
    {
      const DeviceContext context(0, fake::table());
      const CUstream a = fake::make_stream(context.handle()), b = fake::make_stream(context.handle());
      const ContextScope scope(*context.state());
      fake::clear_log();
      context.state()->join(a, a);
      CHECK(fake::call_log().empty());
      for (int i = 0; i < 100; ++i) {
        context.state()->join(a, b);
        context.state()->join(b, a);
      }
      CHECK(fake::waits_of(a) == std::vector<CUstream>(100, b));
      CHECK(fake::waits_of(b) == std::vector<CUstream>(100, a));
      CHECK(fake::calls("cuEventCreate") == 1);

      // A failure keeps the event for later and says which call it was.
      fake::fail("cuEventRecord", 1, CUDA_ERROR_UNKNOWN);
      CHECK(has(thrown_by<DriverError>([&] { context.state()->join(a, b); }), "cuEventRecord"));
      CHECK(fake::waits_of(b).size() == 100);  // waits for nothing where nothing was recorded
      fake::fail("cuStreamWaitEvent", 1, CUDA_ERROR_UNKNOWN);
      CHECK(has(thrown_by<DriverError>([&] { context.state()->join(a, b); }), "cuStreamWaitEvent"));
      context.state()->join(a, b);
      CHECK(fake::calls("cuEventCreate") == 1);
      CHECK(fake::alive().events == 1);
    }
    check_clean();
  }

  TEST_CASE("joins of many threads at once: never the same event") {
    fake::reset();
    {
      const DeviceContext context(0, fake::table());
      constexpr int kThreads = 16, kRounds = 50;
      std::vector<std::pair<CUstream, CUstream>> streams;
      for (int i = 0; i < kThreads; ++i) {
        streams.emplace_back(fake::make_stream(context.handle()), fake::make_stream(context.handle()));
      }
      {
        std::vector<std::jthread> threads;
        for (const auto& [from, to] : streams) {
          threads.emplace_back([&context, from = from, to = to] {
            for (int i = 0; i < kRounds; ++i) {
              const ContextScope scope(*context.state());
              context.state()->join(from, to);
            }
          });
        }
      }
      // An event shared by two threads would make a stream wait for the other's.
      for (const auto& [from, to] : streams) CHECK(fake::waits_of(to) == std::vector<CUstream>(kRounds, from));
      CHECK(fake::alive().events >= 1);
      CHECK(fake::alive().events <= kThreads);
    }
    check_clean();
  }

  TEST_CASE("modules are unloaded in their own context, wherever the last owner lets go") {
    fake::reset(kTwoGpus);
    DeviceContext context(0, fake::table());
    UniqueModule first = load_module(context.state());
    on_fresh_thread([&] { first.reset(); });
    CHECK(fake::alive().modules == 0);

    const CUcontext theirs = fake::make_context(1);
    fake::push_context(theirs);
    {
      UniqueModule module = load_module(context.state());
      UniqueModule moved = std::move(module);
      CHECK(module.get() == nullptr);  // NOLINT(bugprone-use-after-move): that it is empty is what is tested
      module = load_module(context.state());
      CHECK(fake::alive().modules == 2);
      module = std::move(moved);
      CHECK(fake::alive().modules == 1);
      UniqueModule& self = module;
      module = std::move(self);
      CHECK(fake::alive().modules == 1);
    }
    CHECK(fake::alive().modules == 0);
    CHECK(fake::context_stack() == std::vector{theirs});
    fake::pop_context();

    // A module keeps the context that it is in.
    UniqueModule last = load_module(context.state());
    context = DeviceContext(1, fake::table());
    CHECK(fake::alive().primary_retains == 2);
    last = {};
    CHECK(fake::alive().primary_retains == 1);
    CHECK(fake::misuses().empty());
  }

  TEST_CASE("loads, unloads and releases leave the captures of all threads alone") {
    for (const CUstreamCaptureMode mode :
         {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
      fake::reset();
      auto context = std::make_unique<DeviceContext>(0, fake::table());
      const CUstream stream = fake::make_stream(context->handle());
      fake::begin_capture(stream, mode);
      load_module(context->state());  // by the capturing thread
      on_fresh_thread([&] { load_module(context->state()); });
      CHECK(fake::calls("cuModuleUnload") == 2);
      context.reset();
      CHECK(fake::end_capture(stream));
      check_clean();
    }
    // That the fake driver would have noticed.
    fake::reset();
    const DeviceContext context(0, fake::table());
    const CUstream stream = fake::make_stream(context.handle());
    fake::begin_capture(stream);
    const ContextScope scope(*context.state());
    CUmodule module = nullptr;
    CHECK(context.state()->driver->cuModuleLoadData(&module, "PTX") == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_FALSE(fake::end_capture(stream));
  }

  TEST_CASE("a driver that is gone is met with silence") {
    fake::reset();
    {
      const DeviceContext context(0, fake::table());
      const CUstream a = fake::make_stream(context.handle()), b = fake::make_stream(context.handle());
      UniqueModule module;
      {
        const ContextScope scope(*context.state());
        context.state()->join(a, b);
        module = load_module(context.state());
      }
      fake::shut_down();
      CHECK(has(thrown_by<DriverError>([&] { (void)context.is_capturing(a); }), "CUDA_ERROR_DEINITIALIZED"));
    }
    CHECK(fake::misuses().empty());
    CHECK(fake::context_stack().empty());
  }

  TEST_CASE("a primary context reset by someone else: a typed error, and a new context works") {
    fake::reset();
    {
      const DeviceContext context(0, fake::table());
      const UniqueModule module = load_module(context.state());
      fake::reset_primary_context(0);
      const int somewhere = 0;
      CHECK(has(thrown_by<DriverError>([&] { (void)context.pointer_facts(&somewhere); }),
                "CUDA_ERROR_CONTEXT_IS_DESTROYED"));
      CHECK(fake::context_stack().empty());

      const DeviceContext fresh(0, fake::table());
      CHECK(fresh.handle() != context.handle());
      CHECK(fresh.pointer_facts(fake::make_memory(0, 64)).kind == MemoryKind::cuda);
    }
    check_clean();
  }
}
