// SPDX-License-Identifier: Apache-2.0
// The caller's CUDA context: given back by every entry point, also on a thread that has none and on one that works in
// another context. "Another GPU" is a second context on the same one here; the host suites model two GPUs.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "gpu/gpu_fixture.h"
#include "qkvjit/select.h"

namespace {

using namespace qkvtest;
using qkvjit::DeviceContext;
using qkvjit::KernelCache;
using qkvjit::QkvPlan;

CUcontext current_context() {
  CUcontext context = nullptr;
  gpu().check(gpu().driver.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  return context;
}

/// Every public entry point once, in working and in refused form; `expected` must be current after each.
void call_everything(CUcontext expected) {
  const auto check_current = [&](const std::string& after) {
    CHECK_MESSAGE(current_context() == expected, "the caller's context was not given back by " << after);
  };
  check_current("nothing yet");
  const DeviceContext context(gpu().context.info().ordinal);
  check_current("DeviceContext");
  CHECK(context.handle() == gpu().context.handle());  // the primary context, shared
  KernelCache cache;
  const HostCase host = HostCase::random(17, {40, 40, 40}, 256, WeightLayout::k8n, 31);
  DeviceCase device(host);
  check_current("the fixture");
  const qkvjit::PointerFacts facts = context.pointer_facts(device.tensors().x.data);
  check_current("pointer_facts");
  CHECK(facts.kind == qkvjit::MemoryKind::cuda);
  CHECK(facts.ordinal == context.info().ordinal);
  CHECK_FALSE(facts.foreign_context);
  CHECK_FALSE(context.is_foreign_stream(gpu().stream));
  CHECK_FALSE(context.is_capturing(gpu().stream));
  check_current("the stream queries");

  QkvPlan plan(cache, context, host.problem(), {.binding = qkvjit::Binding::lazy});
  check_current("QkvPlan");
  device.poison();
  plan(device.tensors(), gpu().stream);
  check_current("a launch that loads");
  plan(device.tensors(), gpu().stream);
  check_current("a launch");
  Expected(host).check(device.outputs(gpu().stream, host.m), host.m, plan.row(host.m));
  plan.prepare();
  check_current("prepare");
  qkv_project_int4(cache, context, device.tensors(), gpu().stream);
  check_current("qkv_project_int4");
  {
    const auto outputs = qkv_project_int4_alloc(cache, context, device.tensors(), gpu().stream);
    check_current("qkv_project_int4_alloc");
  }
  check_current("~QkvOutputs");
  qkvjit::QkvTensors wrong = device.tensors();
  wrong.q.data = wrong.k.data;
  CHECK_THROWS_AS(plan(wrong, gpu().stream), qkvjit::InvalidProblem);
  CHECK_THROWS_AS(qkv_project_int4(cache, context, wrong, gpu().stream), qkvjit::InvalidProblem);
  check_current("a refusal");
  qkvjit::Specialization absurd = plan.row(1);
  absurd.target = {.sm = 10};  // no compiler makes code for it
  CHECK_THROWS_AS(cache.get(context, absurd), qkvjit::Error);
  check_current("a failed compile");
  gpu().synchronize(gpu().stream);
  check_current("all of it");
}

}  // namespace

TEST_SUITE("context") {
  TEST_CASE("every entry point gives the caller's context back: none, the primary, a second one") {
    call_everything(current_context());
    {
      const qkvjit::ContextScope scope(*gpu().context.state());
      call_everything(gpu().context.handle());
    }
    CUcontext before = current_context();
    try {
      const SecondContext second;
      call_everything(second.handle());
    } catch (const qkvjit::DriverError& error) {
      skip("a second context", error.what());
    }
    CHECK(current_context() == before);
  }

  TEST_CASE("a fresh thread, which never saw CUDA") {
    std::atomic<bool> done = false;
    std::string problem;
    // doctest's checks are safe from one other thread at a time.
    std::thread([&] {
      try {
        call_everything(nullptr);
        done = true;
      } catch (const std::exception& error) {
        problem = error.what();
      }
    }).join();
    CHECK_MESSAGE(done, problem);
  }

  TEST_CASE("a fresh thread in a second context") {
    std::string problem;
    std::thread([&] {
      try {
        const SecondContext second;
        call_everything(second.handle());
      } catch (const std::exception& error) {
        problem = error.what();
      }
    }).join();
    CHECK_MESSAGE(problem.empty(), problem);
  }

  TEST_CASE("eight threads launch one plan at once") {
    const HostCase host = HostCase::random(16, {96, 96, 96}, 384, WeightLayout::k8n, 32);
    const QkvPlan plan(gpu().cache, gpu().context, host.problem());
    std::vector<std::unique_ptr<DeviceCase>> devices;
    for (int i = 0; i < 8; ++i) devices.push_back(std::make_unique<DeviceCase>(host));
    for (auto& device : devices) device->poison();
    std::atomic<int> failures = 0;
    std::vector<std::thread> threads;
    for (auto& device : devices) {
      threads.emplace_back([&, tensors = device->tensors()] {
        try {
          for (int i = 0; i < 200; ++i) plan(tensors, CU_STREAM_PER_THREAD);
          gpu().synchronize(CU_STREAM_PER_THREAD);
        } catch (const std::exception&) {
          ++failures;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(failures == 0);
    const Outputs want = devices[0]->outputs(gpu().stream, host.m);
    Expected(host).check(want, host.m, plan.row(host.m));
    for (auto& device : devices) CHECK(device->outputs(gpu().stream, host.m) == want);
  }

  TEST_CASE("memory and streams of another context on this device are refused by the strict call") {
    const HostCase host = HostCase::random(5, {40, 40, 40}, 128, WeightLayout::k8n, 33);
    DeviceCase device(host);
    CUdeviceptr foreign = 0;
    CUstream foreign_stream = nullptr;
    try {
      const SecondContext second;
      gpu().check(gpu().driver.cuMemAlloc(&foreign, 4096), "cuMemAlloc");
      gpu().check(gpu().driver.cuStreamCreate(&foreign_stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      CHECK(gpu().context.pointer_facts(reinterpret_cast<void*>(foreign)).foreign_context);
      CHECK(gpu().context.is_foreign_stream(foreign_stream));
      const auto refusal = [&](const qkvjit::QkvTensors& tensors, CUstream stream,
                               const qkvjit::LaunchOptions& options = {}) -> std::string {
        try {
          qkv_project_int4(gpu().cache, gpu().context, tensors, stream, WeightLayout::k8n, options);
          return "(not refused)";
        } catch (const qkvjit::InvalidProblem& error) {
          return error.what();
        }
      };
      qkvjit::QkvTensors tensors = device.tensors();
      tensors.v.data = reinterpret_cast<void*>(foreign);
      const std::string memory = refusal(tensors, gpu().stream);
      CHECK_MESSAGE(memory.find("v: got memory") != std::string::npos, memory);
      CHECK_MESSAGE(memory.find("another context") != std::string::npos, memory);
      const std::string stream = refusal(device.tensors(), foreign_stream);
      CHECK_MESSAGE(stream.find("stream of another context") != std::string::npos, stream);
      const std::string producer = refusal(device.tensors(), gpu().stream, {.producer = foreign_stream});
      CHECK_MESSAGE(producer.find("producer") != std::string::npos, producer);
      gpu().check(gpu().driver.cuStreamDestroy(foreign_stream), "cuStreamDestroy");
      gpu().check(gpu().driver.cuMemFree(foreign), "cuMemFree");
    } catch (const qkvjit::DriverError& error) {
      skip("memory of another context", error.what());
    }
  }

  TEST_CASE("DeviceInfo is of this GPU, and an ordinal that does not exist is refused") {
    const qkvjit::DeviceInfo& info = gpu().context.info();
    CHECK(info.sm() >= 80);
    CHECK_FALSE(info.name.empty());
    CHECK(info.multiprocessors > 0);
    CHECK(info.smem_per_block_bytes >= 99 * 1024);
    CHECK(info.smem_per_multiprocessor_bytes >= info.smem_per_block_bytes);
    CHECK(info.registers_per_multiprocessor == 65536);
    CHECK(info.total_memory_bytes > (std::size_t{1} << 30));
    CHECK(info.driver_version >= 12000);
    CHECK_THROWS_AS(DeviceContext(-1), qkvjit::UnsupportedDevice);
    CHECK_THROWS_AS(DeviceContext(1000), qkvjit::UnsupportedDevice);
  }

  TEST_CASE("plans, kernels and buffers may outlive their cache and context") {
    const HostCase host = HostCase::random(4, {40, 40, 40}, 128, WeightLayout::nk8, 34);
    DeviceCase device(host);
    std::unique_ptr<QkvPlan> plan;
    std::shared_ptr<const qkvjit::Kernel> kernel;
    qkvjit::DeviceBuffer buffer;
    {
      const DeviceContext context(0);
      KernelCache cache;
      plan = std::make_unique<QkvPlan>(cache, context, host.problem());
      kernel = cache.get(context, plan->row(4));
      buffer = qkvjit::DeviceBuffer(context, 4096, gpu().stream);
    }
    device.poison();
    (*plan)(device.tensors(), gpu().stream);
    const Outputs first = device.outputs(gpu().stream, host.m);
    Expected(host).check(first, host.m, plan->row(4));
    plan.reset();
    device.poison();
    launch_kernel(*kernel, gpu().context, device.tensors(), gpu().stream);
    CHECK(device.outputs(gpu().stream, host.m) == first);
  }
}
