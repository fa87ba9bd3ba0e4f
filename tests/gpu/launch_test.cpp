// SPDX-License-Identifier: Apache-2.0
// How launches behave: the same bits every time, on any stream, in graphs and beside each other; stream joins; lazy
// binding under capture; and the strict call's refusals that only a driver can tell.
#include <doctest/doctest.h>

#include <cstring>

#include "gpu/gpu_fixture.h"
#include "qkvjit/select.h"

namespace {

using namespace qkvtest;
using qkvjit::Binding;
using qkvjit::ContextScope;
using qkvjit::QkvPlan;
using qkvjit::QkvTensors;
using qkvjit::TensorView;

/// A stream of the primary context that does not wait for the legacy default stream.
class Stream {
 public:
  Stream() {
    const ContextScope scope(*gpu().context.state());
    gpu().check(gpu().driver.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~Stream() {
    const ContextScope scope(*gpu().context.state(), std::nothrow);
    gpu().driver.cuStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;  // owns the stream
  Stream& operator=(const Stream&) = delete;
  operator CUstream() const { return stream_; }  // NOLINT: stands for its handle

 private:
  CUstream stream_ = nullptr;
};

/// Pinned host memory.
class Pinned {
 public:
  explicit Pinned(std::size_t bytes) {
    const ContextScope scope(*gpu().context.state());
    gpu().check(gpu().driver.cuMemHostAlloc(&data_, bytes, 0), "cuMemHostAlloc");
  }
  ~Pinned() {
    const ContextScope scope(*gpu().context.state(), std::nothrow);
    gpu().driver.cuMemFreeHost(data_);
  }
  Pinned(const Pinned&) = delete;  // owns the memory
  Pinned& operator=(const Pinned&) = delete;
  [[nodiscard]] void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

/// A graph that was captured, ready to launch.
class Graph {
 public:
  explicit Graph(CUgraph graph) {
    const ContextScope scope(*gpu().context.state());
    gpu().check(gpu().driver.cuGraphInstantiate(&exec_, graph, 0), "cuGraphInstantiate");
    gpu().check(gpu().driver.cuGraphDestroy(graph), "cuGraphDestroy");
  }
  ~Graph() { gpu().driver.cuGraphExecDestroy(exec_); }
  Graph(const Graph&) = delete;  // owns the executable graph
  Graph& operator=(const Graph&) = delete;
  void launch(CUstream stream) const {
    const ContextScope scope(*gpu().context.state());
    gpu().check(gpu().driver.cuGraphLaunch(exec_, stream), "cuGraphLaunch");
  }

 private:
  CUgraphExec exec_ = nullptr;
};

void begin_capture(CUstream stream, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL) {
  const ContextScope scope(*gpu().context.state());
  gpu().check(gpu().driver.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture");
}

CUgraph end_capture(CUstream stream) {
  const ContextScope scope(*gpu().context.state());
  CUgraph graph = nullptr;
  gpu().check(gpu().driver.cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
  return graph;
}

Outputs run_plan(const QkvPlan& plan, DeviceCase& device, CUstream stream) {
  device.poison();
  plan(device.tensors(), stream);
  return device.outputs(stream, device.host().m);
}

/// The text of the InvalidProblem that the strict call throws; the call must compile and launch nothing.
std::string strict_refusal(const QkvTensors& tensors, CUstream stream = gpu().stream,
                           WeightLayout layout = WeightLayout::k8n) {
  const auto before = gpu().cache.stats();
  std::string text = "(not refused)";
  try {
    qkv_project_int4(gpu().cache, gpu().context, tensors, stream, layout);
  } catch (const qkvjit::InvalidProblem& error) {
    text = error.what();
  }
  CHECK(gpu().cache.stats().compiles == before.compiles);
  CHECK(gpu().cache.stats().loads == before.loads);
  return text;
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_SUITE("launch") {
  TEST_CASE("1000 launches of every tile give the same bits") {
    for (const WeightLayout layout : kLayouts) {
      const HostCase host = HostCase::random(33, {96, 96, 96}, 4096, layout, 11);
      DeviceCase device(host);
      for (const bool aligned : {true, false}) {
        for (const auto& kernel : gpu().candidates(host.problem(), aligned)) {
          CAPTURE(describe(kernel->spec()));
          Outputs first;
          int different = 0;
          for (int i = 0; i < 1000; ++i) {
            // Poisoned and read back now and then; in between launches follow each other closely.
            const bool look = i % 20 == 0 || i == 999;
            if (look) device.poison();
            launch_kernel(*kernel, gpu().context, device.tensors(), gpu().stream);
            if (!look) continue;
            const Outputs got = device.outputs(gpu().stream, host.m);
            if (i == 0) first = got;
            different += got != first ? 1 : 0;
          }
          CHECK(different == 0);
        }
      }
    }
  }

  TEST_CASE("the strict call and its allocating form agree with a plan, on every layout") {
    for (const WeightLayout layout : kRawLayouts) {
      for (const std::uint64_t m : {1, 16, 100}) {
        const HostCase host = HostCase::random(m, {127, 127, 127}, 256, layout, 12 + m);
        DeviceCase device(host);
        const QkvPlan plan(gpu().cache, gpu().context, host.problem());
        const Outputs want = run_plan(plan, device, gpu().stream);
        Expected(host).check(want, m, plan.row(m));
        device.poison();
        qkv_project_int4(gpu().cache, gpu().context, device.tensors(), gpu().stream, layout);
        CHECK(device.outputs(gpu().stream, m) == want);

        QkvTensors inputs = device.tensors();
        inputs.q = inputs.k = inputs.v = {};
        const qkvjit::QkvOutputs allocated =
            qkv_project_int4_alloc(gpu().cache, gpu().context, inputs, gpu().stream, layout);
        gpu().synchronize(gpu().stream);
        const ContextScope scope(*gpu().context.state());
        const TensorView* const views[] = {&allocated.q, &allocated.k, &allocated.v};
        for (std::size_t i = 0; i < 3; ++i) {
          std::vector<std::uint16_t> got(want[i].size());
          CHECK(views[i]->shape[0] == static_cast<std::int64_t>(m));
          CHECK(views[i]->shape[1] == 127);
          gpu().check(
              gpu().driver.cuMemcpyDtoH(got.data(), reinterpret_cast<CUdeviceptr>(views[i]->data), 2 * got.size()),
              "cuMemcpyDtoH");
          CHECK(got == want[i]);
        }
      }
    }
  }

  TEST_CASE("M = 0 launches nothing and compiles nothing, in every form") {
    for (const WeightLayout layout : kRawLayouts) {
      const HostCase host = HostCase::random(4, {72, 72, 72}, 128, layout, 13);
      DeviceCase device(host);
      device.poison();
      const auto before = gpu().cache.stats();
      QkvTensors tensors = device.tensors(0);
      const QkvPlan plan(gpu().cache, gpu().context, host.problem(), {.binding = Binding::lazy});
      plan(tensors, gpu().stream);
      qkv_project_int4(gpu().cache, gpu().context, tensors, gpu().stream, layout);
      tensors.x.data = tensors.q.data = tensors.k.data = tensors.v.data = nullptr;
      plan(tensors, gpu().stream);
      qkv_project_int4(gpu().cache, gpu().context, tensors, gpu().stream, layout);
      const auto empty = qkv_project_int4_alloc(gpu().cache, gpu().context, tensors, gpu().stream, layout);
      CHECK(empty.q.shape[0] == 0);
      CHECK(empty.v.shape[1] == 72);
      CHECK(gpu().cache.stats().compiles == before.compiles);
      device.outputs(gpu().stream, 0);  // checks that all rows are untouched
    }
  }

  TEST_CASE("graph capture and replay: the same bits, and new inputs are read") {
    for (const WeightLayout layout : kLayouts) {
      for (const std::uint64_t m : {1, 16, 65}) {
        const HostCase host = HostCase::random(m, {96, 40, 8}, 384, layout, 14);
        const HostCase other = HostCase::random(m, {96, 40, 8}, 384, layout, 15);
        DeviceCase device(host);
        const QkvPlan plan(gpu().cache, gpu().context, host.problem());
        const Stream stream;
        const Outputs want = run_plan(plan, device, stream);

        begin_capture(stream);
        plan(device.tensors(), stream);
        const Graph graph(end_capture(stream));
        device.poison();
        device.outputs(gpu().stream, 0);  // checks that capturing launched nothing
        for (int i = 0; i < 3; ++i) {
          device.poison();
          graph.launch(stream);
          CHECK(device.outputs(stream, m) == want);
        }
        device.x().upload(other.x.data());
        device.poison();
        graph.launch(stream);
        const Outputs replayed = device.outputs(stream, m);
        CHECK(replayed == run_plan(plan, device, stream));
        CHECK_FALSE(replayed == want);
      }
    }
  }

  TEST_CASE("a lazy plan under capture: CaptureWouldLoad, and the capture stays valid") {
    for (const CUstreamCaptureMode mode :
         {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
      const HostCase host = HostCase::random(5, {56, 56, 56}, 128, WeightLayout::k8n, 16);
      DeviceCase device(host);
      qkvjit::KernelCache cache;  // has nothing yet
      QkvPlan lazy(cache, gpu().context, host.problem(), {.binding = Binding::lazy});
      const QkvPlan ready(gpu().cache, gpu().context, host.problem());
      const Stream stream;
      const Stream beside;
      const Outputs want = run_plan(ready, device, stream);

      begin_capture(stream, mode);
      CHECK_THROWS_AS(lazy(device.tensors(), stream), qkvjit::CaptureWouldLoad);
      CHECK_THROWS_AS(qkv_project_int4(cache, gpu().context, device.tensors(), stream), qkvjit::CaptureWouldLoad);
      CHECK(gpu().context.is_capturing(stream));
      CHECK(cache.stats().compiles == 0);
      ready(device.tensors(), stream);
      // Another stream may compile and load meanwhile.
      if (mode != CU_STREAM_CAPTURE_MODE_GLOBAL) lazy(device.tensors(), beside);
      lazy.prepare();
      lazy(device.tensors(), stream);
      CHECK(gpu().context.is_capturing(stream));
      const Graph graph(end_capture(stream));
      gpu().synchronize(beside);
      device.poison();
      graph.launch(stream);
      CHECK(device.outputs(stream, host.m) == want);
    }
  }

  TEST_CASE("two streams at once, different shapes: each has its own results") {
    const HostCase a = HostCase::random(65, {384, 384, 384}, 4096, WeightLayout::k8n, 17);
    const HostCase b = HostCase::random(16, {1000, 1000, 1000}, 256, WeightLayout::nk8, 18);
    DeviceCase device_a(a);
    DeviceCase device_b(b);
    const QkvPlan plan_a(gpu().cache, gpu().context, a.problem());
    const QkvPlan plan_b(gpu().cache, gpu().context, b.problem());
    const Stream stream_a;
    const Stream stream_b;
    const Outputs want_a = run_plan(plan_a, device_a, stream_a);
    const Outputs want_b = run_plan(plan_b, device_b, stream_b);
    Expected(a).check(want_a, a.m, plan_a.row(a.m));
    Expected(b).check(want_b, b.m, plan_b.row(b.m));
    for (int round = 0; round < 20; ++round) {
      device_a.poison();
      device_b.poison();
      for (int i = 0; i < 25; ++i) {
        plan_a(device_a.tensors(), stream_a);
        plan_b(device_b.tensors(), stream_b);
      }
      CHECK(device_a.outputs(stream_a, a.m) == want_a);
      CHECK(device_b.outputs(stream_b, b.m) == want_b);
    }
  }

  TEST_CASE("producer and consumer on other streams: joined by events, however slow the producer") {
    const std::size_t slow_bytes = std::size_t{256} << 20;
    if (!has_memory_for("a slow producer", slow_bytes + (64u << 20))) return;
    const HostCase host = HostCase::random(33, {96, 96, 96}, 384, WeightLayout::k8n, 19);
    DeviceCase device(host);
    const QkvPlan plan(gpu().cache, gpu().context, host.problem());
    const Stream producer;
    const Stream stream;
    const Stream consumer;
    const Outputs want = run_plan(plan, device, stream);
    GuardedBuffer slow(slow_bytes);
    const std::size_t x_bytes = host.x.size() * 2;
    const std::size_t q_bytes = want[0].size() * 2;
    const Pinned x(x_bytes);
    const Pinned q(q_bytes);
    std::memcpy(x.data(), host.x.data(), x_bytes);
    const ContextScope scope(*gpu().context.state());
    for (int round = 0; round < 5; ++round) {
      device.x().fill(0);  // what a launch without the first join would read
      device.poison();
      std::memset(q.data(), 0, q_bytes);
      for (int i = 0; i < 50; ++i) {
        gpu().check(gpu().driver.cuMemsetD8Async(slow.address(), 1, slow_bytes, producer), "cuMemsetD8Async");
      }
      gpu().check(gpu().driver.cuMemcpyHtoDAsync(device.x().address(), x.data(), x_bytes, producer),
                  "cuMemcpyHtoDAsync");
      const bool strict = round % 2 == 1;
      const qkvjit::LaunchOptions options{.producer = producer, .consumer = consumer};
      if (strict) {
        qkv_project_int4(gpu().cache, gpu().context, device.tensors(), stream, WeightLayout::k8n, options);
      } else {
        plan(device.tensors(), stream, options);
      }
      gpu().check(gpu().driver.cuMemcpyDtoHAsync(q.data(), device.output(0).address(), q_bytes, consumer),
                  "cuMemcpyDtoHAsync");
      gpu().synchronize(consumer);
      CHECK(std::memcmp(q.data(), want[0].data(), q_bytes) == 0);
      CHECK(device.outputs(stream, host.m) == want);
    }
  }

  TEST_CASE("the legacy and the per-thread default stream") {
    const HostCase host = HostCase::random(7, {40, 40, 40}, 256, WeightLayout::nk8, 20);
    DeviceCase device(host);
    const QkvPlan plan(gpu().cache, gpu().context, host.problem());
    const Outputs want = run_plan(plan, device, gpu().stream);
    for (CUstream stream : {static_cast<CUstream>(nullptr), CU_STREAM_LEGACY, CU_STREAM_PER_THREAD}) {
      CHECK(run_plan(plan, device, stream) == want);
      device.poison();
      qkv_project_int4(gpu().cache, gpu().context, device.tensors(), stream, WeightLayout::nk8);
      CHECK(device.outputs(stream, host.m) == want);
    }
  }

  TEST_CASE("strict refusals that need the driver: host, pinned, managed, freed, and their order") {
    const HostCase host = HostCase::random(3, {88, 88, 88}, 128, WeightLayout::k8n, 21);
    DeviceCase device(host);
    device.poison();
    const QkvTensors good = device.tensors();
    using Member = TensorView QkvTensors::*;
    const std::pair<const char*, Member> members[] = {{"x", &QkvTensors::x},
                                                      {"w_q_packed", &QkvTensors::w_q_packed},
                                                      {"w_k_packed", &QkvTensors::w_k_packed},
                                                      {"w_v_packed", &QkvTensors::w_v_packed},
                                                      {"scales_q", &QkvTensors::scales_q},
                                                      {"scales_k", &QkvTensors::scales_k},
                                                      {"scales_v", &QkvTensors::scales_v},
                                                      {"q", &QkvTensors::q},
                                                      {"k", &QkvTensors::k},
                                                      {"v", &QkvTensors::v}};
    std::vector<std::uint64_t> host_memory(4096);
    const Pinned pinned(32768);
    CUdeviceptr managed = 0;
    CUdeviceptr freed = 0;
    {
      const ContextScope scope(*gpu().context.state());
      gpu().check(gpu().driver.cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL), "cuMemAllocManaged");
      gpu().check(gpu().driver.cuMemAlloc(&freed, 4096), "cuMemAlloc");
      gpu().check(gpu().driver.cuMemFree(freed), "cuMemFree");
    }
    for (const auto& entry : members) {
      const std::string name = entry.first;
      const Member member = entry.second;
      const std::string prefix = "qkv_project_int4: " + name + ": ";
      CAPTURE(name);
      const auto refusal = [&](void* pointer) {
        QkvTensors tensors = good;
        (tensors.*member).data = pointer;
        std::string text = strict_refusal(tensors);
        CAPTURE(text);
        CHECK(text.rfind(prefix, 0) == 0);
        return text;
      };
      CHECK(contains(refusal(host_memory.data()), "host memory"));
      CHECK(contains(refusal(pinned.data()), "pinned host memory"));
      CHECK(contains(refusal(reinterpret_cast<void*>(managed)), "managed memory"));
      CHECK(contains(refusal(nullptr), "null pointer"));
    }
    // Memory handed back to the driver is unknown to it, as long as nothing else took the address.
    QkvTensors tensors = good;
    tensors.q.data = reinterpret_cast<void*>(freed);
    if (gpu().context.pointer_facts(tensors.q.data).kind == qkvjit::MemoryKind::host) {
      CHECK(contains(strict_refusal(tensors), "freed"));
    }
    // Each of these has a later fault too; the driver's word about x comes first.
    tensors = good;
    tensors.x.data = host_memory.data();
    tensors.scales_v.dtype = qkvjit::DType::f32;
    tensors.q.shape[1] = 3;
    CHECK(contains(strict_refusal(tensors), "x: got the pointer"));
    tensors = good;
    tensors.k.data = tensors.q.data;
    CHECK(contains(strict_refusal(tensors), "k: got the bytes"));
    device.outputs(gpu().stream, 0);  // nothing was written
    {
      const ContextScope scope(*gpu().context.state());
      gpu().check(gpu().driver.cuMemFree(managed), "cuMemFree");
    }
    device.poison();
    qkv_project_int4(gpu().cache, gpu().context, good, gpu().stream);  // and the good ones still work
    device.outputs(gpu().stream, host.m);
  }

  TEST_CASE("a plan refuses what it was not bound for, and goes on working") {
    const HostCase host = HostCase::random(9, {40, 40, 40}, 128, WeightLayout::k8n, 22);
    DeviceCase device(host);
    const QkvPlan plan(gpu().cache, gpu().context, host.problem(), {.max_m = 8});
    device.poison();
    CHECK_THROWS_AS(plan(device.tensors(), gpu().stream), qkvjit::InvalidProblem);
    QkvTensors wrong = device.tensors(8);
    wrong.x.device.ordinal = gpu().context.info().ordinal + 1;
    CHECK_THROWS_AS(plan(wrong, gpu().stream), qkvjit::DeviceMismatch);
    device.outputs(gpu().stream, 0);
    plan(device.tensors(8), gpu().stream);
    Expected(host).check(device.outputs(gpu().stream, 8), 8, plan.row(8));
  }
}
