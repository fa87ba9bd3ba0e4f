// SPDX-License-Identifier: Apache-2.0
// QkvPlan and qkv_project_int4 as the driver sees them: which kernel for which M, the launch's every parameter, no
// call more than needed, refusals before any, captures, joins and faults. Drivers and NVRTC are fakes.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device_state.h"
#include "qkvjit/qkvjit.h"
#include "support/driver_faults.h"
#include "support/fake_driver.h"
#include "support/fake_nvrtc.h"
#include "support/fake_tensors.h"
#include "support/messages.h"

namespace {

using namespace qkvjit;
using fake::tensors_of;
using Log = std::vector<std::string>;

void begin(std::vector<fake::Gpu> gpus = {fake::Gpu{}}) {
  fake::reset(std::move(gpus));
  fake::reset_nvrtc();
}

QkvProblem problem_of(std::uint64_t n_q, std::uint64_t n_k, std::uint64_t n_v, std::uint64_t k) {
  return {.n_q = n_q, .n_k = n_k, .n_v = n_v, .k = k};
}
const QkvProblem kProblem = problem_of(256, 64, 72, 512);
const QkvProblem kStrict = problem_of(96, 96, 96, 384);

/// The GPU, its context and a cache.
struct Bench {
  explicit Bench(std::vector<fake::Gpu> gpus = {fake::Gpu{}}) {
    begin(std::move(gpus));
    context.emplace(0, fake::table());
    cache.emplace(CacheOptions{}, fake::nvrtc());
    stream = fake::make_stream(context->handle());
  }
  ~Bench() {
    cache.reset();
    context.reset();
    CHECK(fake::alive() == fake::Alive{});
    CHECK(fake::misuses().empty());
    CHECK(fake::nvrtc_programs == 0);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  std::optional<DeviceContext> context;
  std::optional<KernelCache> cache;
  CUstream stream = nullptr;
};

void check_launch(const fake::Launch& launch, const Specialization& spec, const QkvTensors& t, CUstream stream,
                  CUcontext context) {
  const std::uint64_t m = static_cast<std::uint64_t>(t.x.shape[0]);
  const std::uint64_t row_tiles = (m + spec.tile.block_m - 1) / spec.tile.block_m;
  CHECK(launch.grid[0] == row_tiles * column_tiles(spec) * spec.tile.cluster_k);
  CHECK(launch.grid[1] == 1);
  CHECK(launch.grid[2] == 1);
  CHECK(launch.block[0] == threads_per_block(spec.tile));
  CHECK(launch.block[1] == 1);
  CHECK(launch.block[2] == 1);
  CHECK(launch.smem_bytes == smem_bytes(spec));
  CHECK(launch.cluster == spec.tile.cluster_k);
  CHECK(launch.attributes == (spec.tile.cluster_k > 1 ? 1 : 0));
  CHECK(launch.params.weights_are_constant == 0);
  CHECK(launch.stream == stream);
  CHECK(launch.context == context);
  CHECK(launch.params.m == m);
  CHECK(launch.params.x == t.x.data);
  const TensorView* const weights[] = {&t.w_q_packed, &t.w_k_packed, &t.w_v_packed};
  const TensorView* const scales[] = {&t.scales_q, &t.scales_k, &t.scales_v};
  const TensorView* const outputs[] = {&t.q, &t.k, &t.v};
  for (int i = 0; i < 3; ++i) {
    CHECK(launch.params.weights[i] == weights[i]->data);
    CHECK(launch.params.scales[i] == scales[i]->data);
    CHECK(launch.params.outputs[i] == outputs[i]->data);
  }
}

}  // namespace

TEST_SUITE("plan") {
  TEST_CASE("the row by M, and every parameter of the launch") {
    Bench bench;
    std::mt19937 random(4);
    for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8}) {
      for (QkvProblem problem : {kProblem, problem_of(1, 2, 7, 128), problem_of(40, 1000, 8, 1024)}) {
        problem.layout = layout;
        const QkvPlan plan(*bench.cache, *bench.context, problem);
        CHECK(plan.problem() == problem);
        std::vector<std::int64_t> ms;
        for (std::int64_t m = 1; m <= 33; ++m) ms.push_back(m);
        for (const std::int64_t m : {64, 65, 127, 128, 129, 512, 513, 1000, 4099, 70000}) ms.push_back(m);
        for (int i = 0; i < 10; ++i) ms.push_back(1 + random() % 100000);
        for (const std::int64_t m : ms) {
          for (const std::size_t shift : {0u, 4u, 8u}) {
            CAPTURE(m);
            CAPTURE(shift);
            const QkvTensors tensors = tensors_of(problem, m, shift);
            const Target target = bench.cache->target_for(bench.context->info());
            const Specialization want = select_specialization(problem, bench.context->info(), target, shift == 0,
                                                              static_cast<std::uint64_t>(m));
            CHECK(plan.row(static_cast<std::uint64_t>(m), shift == 0) == want);
            fake::clear_log();
            plan(tensors, bench.stream);
            const auto launches = fake::launches();
            REQUIRE(launches.size() == 1);
            CHECK(launches[0].function == bench.cache->find(*bench.context, want)->function());
            check_launch(launches[0], want, tensors, bench.stream, bench.context->handle());
          }
        }
      }
    }
  }

  TEST_CASE("one misaligned base of the ten is enough for the unaligned row") {
    Bench bench;
    const QkvPlan plan(*bench.cache, *bench.context, kProblem);
    REQUIRE(plan.row(5, true).aligned);
    REQUIRE_FALSE(plan.row(5, false).aligned);
    for (int i = -1; i < 10; ++i) {
      CAPTURE(i);
      QkvTensors t = tensors_of(kProblem, 5);
      const QkvTensors shifted = tensors_of(kProblem, 5, 8);
      TensorView* const views[] = {&t.x,        &t.w_q_packed, &t.w_k_packed, &t.w_v_packed, &t.scales_q,
                                   &t.scales_k, &t.scales_v,   &t.q,          &t.k,          &t.v};
      const TensorView* const others[] = {
          &shifted.x,        &shifted.w_q_packed, &shifted.w_k_packed, &shifted.w_v_packed, &shifted.scales_q,
          &shifted.scales_k, &shifted.scales_v,   &shifted.q,          &shifted.k,          &shifted.v};
      if (i >= 0) views[i]->data = others[i]->data;
      fake::clear_log();
      plan(t, bench.stream);
      CHECK(fake::launches().at(0).function == bench.cache->find(*bench.context, plan.row(5, i < 0))->function());
    }
  }

  TEST_CASE("a bound launch asks the driver for nothing but the launch") {
    Bench bench;
    const QkvPlan plan(*bench.cache, *bench.context, kProblem);
    const QkvTensors tensors = tensors_of(kProblem, 17);
    fake::clear_log();
    plan(tensors, bench.stream);
    CHECK(fake::call_log() == Log{"cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"});
    fake::push_context(bench.context->handle());
    fake::clear_log();
    plan(tensors, bench.stream);
    CHECK(fake::call_log() == Log{"cuCtxGetCurrent", "cuLaunchKernelEx"});
    fake::clear_log();
    plan(tensors, bench.stream, {.producer = bench.stream, .consumer = bench.stream});
    CHECK(fake::call_log() == Log{"cuCtxGetCurrent", "cuLaunchKernelEx"});
    fake::pop_context();
    CHECK(plan.workspace_bytes(1u << 20) == 0);
  }

  TEST_CASE("M = 0 passes the checks and asks the driver nothing") {
    Bench bench;
    const QkvPlan lazy(*bench.cache, *bench.context, kProblem, {.binding = Binding::lazy});
    QkvTensors tensors = tensors_of(kProblem, 0);
    fake::clear_log();
    lazy(tensors, bench.stream, {.producer = fake::make_stream(bench.context->handle())});
    CHECK(fake::call_log().empty());
    CHECK(fake::nvrtc_compiles == 0);
    tensors.v.shape[1] = 3;
    CHECK_THROWS_AS(lazy(tensors, bench.stream), InvalidProblem);
  }

  TEST_CASE("refusals come before any driver call and any compile") {
    Bench bench;
    const QkvPlan plan(*bench.cache, *bench.context, kProblem, {.binding = Binding::lazy, .max_m = 100});
    const auto refuse = [&](const std::function<void(QkvTensors&)>& spoil) {
      QkvTensors tensors = tensors_of(kProblem, 20);
      spoil(tensors);
      fake::clear_log();
      const std::string text = thrown_by<InvalidProblem>([&] { plan(tensors, bench.stream); });
      CHECK(fake::call_log().empty());
      return text;
    };
    CHECK(has(refuse([](QkvTensors& t) { t.k.shape[1] = 65; }), "k:"));
    CHECK(has(refuse([](QkvTensors& t) { t.x.dtype = DType::f32; }), "x:"));
    CHECK(has(refuse([](QkvTensors& t) { t.w_v_packed.data = nullptr; }), "w_v_packed"));
    CHECK(has(refuse([](QkvTensors& t) { t.q.data = static_cast<char*>(t.q.data) + 1; }), "q:"));
    CHECK(has(refuse([](QkvTensors& t) { t.v.data = t.q.data; }), "v"));
    CHECK(has(refuse([](QkvTensors& t) { t = tensors_of(kProblem, 101); }), "M = 101"));
    QkvTensors far = tensors_of(kProblem, 20);
    far.scales_k.device.ordinal = 1;
    CHECK(has(thrown_by<DeviceMismatch>([&] { plan(far, bench.stream); }), "scales_k"));
    CHECK(fake::nvrtc_compiles == 0);
    CHECK_THROWS_AS(QkvPlan(*bench.cache, *bench.context, problem_of(0, 8, 8, 128)), InvalidProblem);
    CHECK_THROWS_AS(QkvPlan(*bench.cache, *bench.context, problem_of(8, 8, 8, 100)), InvalidProblem);
    CHECK(fake::nvrtc_compiles == 0);
  }

  TEST_CASE("more blocks than a grid has are refused, not launched wrongly") {
    Bench bench;
    const QkvProblem wide = problem_of(1u << 20, 1u << 20, 1u << 20, 128);
    const QkvPlan plan(*bench.cache, *bench.context, wide, {.binding = Binding::lazy});
    const QkvTensors tensors = tensors_of(wide, std::int64_t{1} << 31);
    CHECK(has(thrown_by<InvalidProblem>([&] { plan(tensors, bench.stream); }), "M = 2147483648"));
    CHECK(fake::launches().empty());
    // Offsets past 2^31 elements are no reason to refuse.
    const QkvTensors large = tensors_of(wide, 100000);
    plan(large, bench.stream);
    check_launch(fake::launches().at(0), plan.row(100000), large, bench.stream, bench.context->handle());
  }

  TEST_CASE("eager binding loads every kernel once, lazy binding what is launched") {
    Bench bench;
    const Target target = bench.cache->target_for(bench.context->info());
    std::vector<Specialization> kernels;  // one may serve two rows
    for (const bool aligned : {true, false}) {
      for (const auto& row : select_rows(kProblem, bench.context->info(), target, aligned)) {
        if (std::find(kernels.begin(), kernels.end(), row.spec) == kernels.end()) kernels.push_back(row.spec);
      }
    }
    const auto count = int(kernels.size());
    {
      QkvPlan lazy(*bench.cache, *bench.context, kProblem, {.binding = Binding::lazy});
      CHECK(fake::nvrtc_compiles == 0);
      lazy(tensors_of(kProblem, 2), bench.stream);
      lazy(tensors_of(kProblem, 3), bench.stream);
      CHECK(fake::nvrtc_compiles == 1);
      lazy(tensors_of(kProblem, 100000), bench.stream);
      CHECK(fake::nvrtc_compiles == 2);
      lazy.prepare();
      CHECK(fake::nvrtc_compiles == count);
      lazy.prepare();
      CHECK(fake::calls("cuModuleLoadData") == count);
    }
    const QkvPlan eager(*bench.cache, *bench.context, kProblem);
    CHECK(fake::nvrtc_compiles == count);  // the cache has them all
    CHECK(fake::calls("cuModuleLoadData") == count);
  }

  TEST_CASE("with a small max_m only the rows that can serve it are bound") {
    Bench bench;
    const QkvPlan small(*bench.cache, *bench.context, kProblem, {.max_m = 1});
    CHECK(fake::nvrtc_compiles == 2);  // aligned and unaligned
    small(tensors_of(kProblem, 1), bench.stream);
    CHECK_THROWS_AS(small(tensors_of(kProblem, 2), bench.stream), InvalidProblem);
  }

  TEST_CASE("a lazily bound row while the stream captures: refused, the capture lives, prepare() mends it") {
    Bench bench;
    QkvPlan plan(*bench.cache, *bench.context, kProblem, {.binding = Binding::lazy});
    const QkvTensors tensors = tensors_of(kProblem, 3);
    fake::begin_capture(bench.stream);
    const std::string text = thrown_by<CaptureWouldLoad>([&] { plan(tensors, bench.stream); });
    CHECK(has(text, "prepare()"));
    CHECK(fake::nvrtc_compiles == 0);
    CHECK(fake::calls("cuModuleLoadData") == 0);
    CHECK(fake::launches().empty());
    CHECK_THROWS_AS(qkv_project_int4(*bench.cache, *bench.context, tensors_of(kStrict, 3), bench.stream),
                    CaptureWouldLoad);
    CHECK(fake::end_capture(bench.stream));

    plan.prepare();
    fake::begin_capture(bench.stream);
    plan(tensors, bench.stream);
    CHECK(fake::launches().size() == 1);
    CHECK(fake::end_capture(bench.stream));

    // What another plan loaded needs no load.
    const QkvPlan second(*bench.cache, *bench.context, kProblem, {.binding = Binding::lazy});
    fake::begin_capture(bench.stream);
    second(tensors, bench.stream);
    CHECK(fake::launches().size() == 2);
    CHECK(fake::end_capture(bench.stream));
  }

  TEST_CASE("producer and consumer: joins before and after, in that order") {
    Bench bench;
    const QkvPlan plan(*bench.cache, *bench.context, kProblem);
    const QkvTensors tensors = tensors_of(kProblem, 3);
    const CUstream producer = fake::make_stream(bench.context->handle());
    const CUstream consumer = fake::make_stream(bench.context->handle());
    fake::push_context(bench.context->handle());
    plan(tensors, bench.stream, {.producer = producer, .consumer = consumer});  // makes the event
    fake::clear_log();
    plan(tensors, bench.stream, {.producer = producer, .consumer = consumer});
    CHECK(fake::call_log() == Log{"cuCtxGetCurrent", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernelEx",
                                  "cuEventRecord", "cuStreamWaitEvent"});
    CHECK(fake::waits_of(bench.stream) == std::vector{producer, producer});
    CHECK(fake::waits_of(consumer) == std::vector{bench.stream, bench.stream});
    fake::clear_log();
    plan(tensors, bench.stream, {.consumer = consumer});
    CHECK(fake::call_log() == Log{"cuCtxGetCurrent", "cuLaunchKernelEx", "cuEventRecord", "cuStreamWaitEvent"});
    plan(tensors, bench.stream, {.producer = CU_STREAM_LEGACY});
    CHECK(fake::waits_of(bench.stream).back() == CU_STREAM_LEGACY);
    fake::pop_context();
    CHECK(fake::alive().events == 1);
  }

  TEST_CASE("a fresh thread, and a thread bound to another GPU, get their contexts back") {
    Bench bench({fake::Gpu{}, fake::Gpu{}});
    const QkvPlan plan(*bench.cache, *bench.context, kProblem, {.binding = Binding::lazy});
    const QkvTensors tensors = tensors_of(kProblem, 3), strict = tensors_of(kStrict, 3);
    for (const bool is_bound : {false, true}) {
      std::jthread([&] {
        std::vector<CUcontext> base;
        if (is_bound) {
          base.push_back(fake::make_context(1));
          fake::push_context(base[0]);
        }
        plan(tensors, bench.stream);
        CHECK(fake::context_stack() == base);
        qkv_project_int4(*bench.cache, *bench.context, strict, bench.stream);
        CHECK(fake::context_stack() == base);
        fake::fail("cuLaunchKernelEx", 1, CUDA_ERROR_LAUNCH_FAILED);
        CHECK(has(thrown_by<DriverError>([&] { plan(tensors, bench.stream); }), "cuLaunchKernelEx"));
        CHECK(fake::context_stack() == base);
        CHECK(fake::capture_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL);
      }).join();
    }
    for (const fake::Launch& launch : fake::launches()) CHECK(launch.context == bench.context->handle());
    CHECK(fake::launches().size() == 4);
  }

  TEST_CASE("many threads launch one lazily bound plan") {
    Bench bench;
    fake::nvrtc_milliseconds = 20;
    const QkvPlan plan(*bench.cache, *bench.context, kProblem, {.binding = Binding::lazy});
    constexpr int kThreads = 16, kRounds = 20;
    std::barrier start(kThreads);
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back([&, i] {
          const QkvTensors tensors = tensors_of(kProblem, 1 + i % 4 * 40, i % 2 * 8);
          start.arrive_and_wait();
          for (int round = 0; round < kRounds; ++round) plan(tensors, bench.stream);
        });
      }
    }
    CHECK(fake::launches().size() == kThreads * kRounds);
    CHECK(bench.cache->stats().compiles == bench.cache->stats().loads);
    for (const fake::Launch& launch : fake::launches()) {
      const bool is_aligned = reinterpret_cast<std::uintptr_t>(launch.params.x) % 16 == 0;
      const Specialization& row = plan.row(launch.params.m, is_aligned);
      CHECK(launch.function == bench.cache->find(*bench.context, row)->function());
    }
  }

  TEST_CASE("with the promise launches are dependent ones, padded to as many blocks on every multiprocessor") {
    Bench bench;
    QkvProblem problem = problem_of(4096, 1024, 1024, 4096);
    problem.layout = WeightLayout::prepacked;
    const auto blocks = [&](std::uint64_t n) { return (n + 63) / 64 * 512; };
    const QkvPlan plain(*bench.cache, *bench.context, problem, {.binding = Binding::lazy});
    const QkvPlan promised(*bench.cache, *bench.context, problem,
                           {.binding = Binding::lazy, .weights_are_constant = true});
    for (const std::int64_t m : {1, 8, 16, 32, 64, 100}) {
      QkvTensors tensors = tensors_of(problem, m);
      const auto packed = [&](std::uint64_t n) {
        return TensorView::matrix(fake::make_memory(0, blocks(n) * 64 * 4), DType::u32, 64,
                                  static_cast<std::int64_t>(blocks(n)));
      };
      tensors.w_q_packed = packed(problem.n_q);
      tensors.w_k_packed = packed(problem.n_k);
      tensors.w_v_packed = packed(problem.n_v);
      CAPTURE(m);
      fake::clear_log();
      plain(tensors, bench.stream);
      promised(tensors, bench.stream);
      REQUIRE(fake::launches().size() == 2);
      const fake::Launch ordinary = fake::launches()[0], dependent = fake::launches()[1];
      CHECK_FALSE(ordinary.dependent);
      CHECK(ordinary.params.weights_are_constant == 0);
      const Specialization& spec = promised.row(static_cast<std::uint64_t>(m));
      const bool can_be = spec.pipeline != Pipeline::mma_sync;
      CHECK(dependent.dependent == can_be);
      CHECK(dependent.params.weights_are_constant == (can_be ? 1 : 0));
      CHECK(dependent.cluster == spec.tile.cluster_k);
      const unsigned needed = column_tiles(spec) * spec.tile.cluster_k;
      CHECK(dependent.grid[0] >= needed);
      if (can_be) CHECK(dependent.grid[0] == (needed + 131) / 132 * 132 / spec.tile.cluster_k * spec.tile.cluster_k);
    }
  }

  TEST_CASE("a GPU before 9.0 has no dependent launches") {
    Bench bench({fake::Gpu{.name = "A100", .sm_major = 8, .smem_per_block_bytes = 163 * 1024}});
    const QkvPlan plan(*bench.cache, *bench.context, kProblem,
                       {.binding = Binding::lazy, .weights_are_constant = true});
    plan(tensors_of(kProblem, 1), bench.stream);
    CHECK_FALSE(fake::launches().at(0).dependent);
    CHECK(fake::launches()[0].params.weights_are_constant == 0);
  }

  TEST_CASE("a plan can be moved, and keeps context and kernels") {
    Bench bench;
    QkvPlan plan(*bench.cache, *bench.context, kProblem);
    QkvPlan moved = std::move(plan);
    plan = QkvPlan(*bench.cache, *bench.context, kStrict);
    moved(tensors_of(kProblem, 3), bench.stream);
    plan(tensors_of(kStrict, 3), bench.stream);
    const QkvTensors tensors = tensors_of(kProblem, 4);
    bench.cache.reset();    // an eagerly bound plan may outlive the cache,
    bench.context.reset();  // and the caller's context
    moved(tensors, bench.stream);
    CHECK(fake::launches().size() == 3);
  }

  TEST_CASE("launch_kernel: any tile, and never an aligned kernel on odd addresses") {
    Bench bench;
    const Target target = bench.cache->target_for(bench.context->info());
    for (const bool aligned : {true, false}) {
      for (const Specialization& spec : candidate_specializations(kProblem, bench.context->info(), target, aligned)) {
        const auto kernel = bench.cache->get(*bench.context, spec);
        const QkvTensors tensors = tensors_of(kProblem, 37);
        fake::clear_log();
        launch_kernel(*kernel, *bench.context, tensors, bench.stream);
        REQUIRE(fake::launches().size() == 1);
        CHECK(fake::launches()[0].function == kernel->function());
        check_launch(fake::launches()[0], spec, tensors, bench.stream, bench.context->handle());
        launch_kernel(*kernel, *bench.context, tensors_of(kProblem, 0), bench.stream);
        CHECK(fake::launches().size() == 1);
        if (aligned) {
          CHECK_THROWS_AS(launch_kernel(*kernel, *bench.context, tensors_of(kProblem, 37, 8), bench.stream),
                          InvalidProblem);
        }
      }
    }
  }

  TEST_CASE("the strict call: asks about every pointer and the stream, compiles once, remembers") {
    Bench bench;
    const QkvTensors tensors = tensors_of(kStrict, 7);
    qkv_project_int4(*bench.cache, *bench.context, tensors, bench.stream);
    CHECK(fake::nvrtc_compiles == 1);
    const auto first = fake::launches();
    REQUIRE(first.size() == 1);
    const Specialization want =
        select_specialization(kStrict, bench.context->info(), bench.cache->target_for(bench.context->info()), true, 7);
    check_launch(first[0], want, tensors, bench.stream, bench.context->handle());

    fake::clear_log();
    for (int i = 0; i < 10; ++i) qkv_project_int4(*bench.cache, *bench.context, tensors, bench.stream);
    CHECK(fake::nvrtc_compiles == 1);
    CHECK(fake::calls("cuPointerGetAttributes") == 100);
    CHECK(fake::calls("cuStreamGetCtx") == 10);
    CHECK(fake::calls("cuModuleLoadData") == 0);
    CHECK(fake::calls("cuLaunchKernelEx") == 10);
    // Nothing that waits, allocates or asks what is known already.
    for (const char* never : {"cuDeviceGetAttribute", "cuStreamIsCapturing", "cuEventCreate", "cuMemAllocAsync"}) {
      CHECK(fake::calls(never) == 0);
    }

    QkvProblem other = kStrict;
    other.layout = WeightLayout::nk8;
    qkv_project_int4(*bench.cache, *bench.context, tensors_of(other, 7), bench.stream, WeightLayout::nk8);
    CHECK(fake::nvrtc_compiles == 2);
    fake::clear_log();
    qkv_project_int4(*bench.cache, *bench.context, tensors_of(kStrict, 0), bench.stream);
    CHECK(fake::launches().empty());
  }

  TEST_CASE("the strict call: a shape that was seen is not selected for again") {
    Bench bench;
    const auto nvrtc = fake::nvrtc();
    KernelCache cache({}, nvrtc);
    const QkvTensors tensors = tensors_of(kStrict, 7);
    qkv_project_int4(cache, *bench.context, tensors, bench.stream);
    nvrtc->targets.clear();  // which selection would need
    qkv_project_int4(cache, *bench.context, tensors, bench.stream);
    CHECK(fake::launches().size() == 2);
    QkvProblem other = kStrict;
    other.layout = WeightLayout::nk8;
    CHECK_THROWS_AS(qkv_project_int4(cache, *bench.context, tensors_of(other, 7), bench.stream, WeightLayout::nk8),
                    UnsupportedDevice);
  }

  TEST_CASE("the strict call: what only the driver can tell") {
    Bench bench({fake::Gpu{}, fake::Gpu{}});
    const CUcontext second = fake::make_context(0);
    const auto refuse = [&](const std::function<void(QkvTensors&, CUstream&, LaunchOptions&)>& spoil) {
      QkvTensors tensors = tensors_of(kStrict, 5);
      CUstream stream = bench.stream;
      LaunchOptions options;
      spoil(tensors, stream, options);
      const std::string text = thrown_by<Error>(
          [&] { qkv_project_int4(*bench.cache, *bench.context, tensors, stream, WeightLayout::k8n, options); });
      CHECK(fake::nvrtc_compiles == 0);
      CHECK(fake::launches().empty());
      CHECK(fake::context_stack().empty());
      return text;
    };
    std::vector<char> host(1 << 16);
    CHECK(has(refuse([&](auto& t, auto&, auto&) { t.scales_v.data = host.data(); }), "scales_v"));
    CHECK(has(refuse([&](auto& t, auto&, auto&) { t.x.data = fake::make_memory(0, 1 << 16, fake::Memory::managed); }),
              "managed"));
    CHECK(has(
        refuse([&](auto& t, auto&, auto&) { t.w_k_packed.data = fake::make_memory(0, 1 << 16, fake::Memory::pinned); }),
        "w_k_packed"));
    CHECK(has(refuse([&](auto& t, auto&, auto&) { t.v.data = fake::make_memory(1, 1 << 16); }), "v:"));
    CHECK(has(
        refuse([&](auto& t, auto&, auto&) { t.k.data = fake::make_memory(0, 1 << 16, fake::Memory::device, second); }),
        "context"));
    CHECK(has(refuse([&](auto&, auto& stream, auto&) { stream = fake::make_stream(second); }), "stream"));
    CHECK(has(refuse([&](auto&, auto&, auto& options) { options.producer = fake::make_stream(second); }), "producer"));
    CHECK(has(refuse([&](auto&, auto&, auto& options) { options.consumer = fake::make_stream(second); }), "consumer"));
  }

  TEST_CASE("the allocating form: outputs of the right size, owned, freed with their owner") {
    Bench bench;
    QkvTensors tensors = tensors_of(kStrict, 9);
    tensors.q = tensors.k = tensors.v = {};
    {
      const QkvOutputs outputs = qkv_project_int4_alloc(*bench.cache, *bench.context, tensors, bench.stream);
      CHECK(fake::alive().allocations == 3);
      CHECK(outputs.q_buffer.bytes() == 9 * 96 * 2);
      CHECK(outputs.v.shape[0] == 9);
      CHECK(outputs.v.shape[1] == 96);
      tensors.q = outputs.q;
      tensors.k = outputs.k;
      tensors.v = outputs.v;
      check_launch(
          fake::launches().at(0),
          bench.cache
              ->find(*bench.context, select_specialization(kStrict, bench.context->info(),
                                                           bench.cache->target_for(bench.context->info()), true, 9))
              ->spec(),
          tensors, bench.stream, bench.context->handle());
    }
    CHECK(fake::alive().allocations == 0);
    const QkvOutputs empty = qkv_project_int4_alloc(*bench.cache, *bench.context, tensors_of(kStrict, 0), bench.stream);
    CHECK(empty.q_buffer.data() == nullptr);
    CHECK(empty.q.shape[0] == 0);
    CHECK(empty.k.shape[1] == 96);
  }

  TEST_CASE("DeviceBuffer: moves, and frees wherever it ends") {
    Bench bench({fake::Gpu{}, fake::Gpu{}});
    DeviceBuffer a(*bench.context, 100, bench.stream);
    DeviceBuffer b(std::move(a));
    CHECK(a.data() == nullptr);  // NOLINT(bugprone-use-after-move): that it is empty is what is tested
    CHECK(b.bytes() == 100);
    b = DeviceBuffer(*bench.context, 200, bench.stream);
    CHECK(fake::alive().allocations == 1);
    CHECK(DeviceBuffer(*bench.context, 0, bench.stream).data() == nullptr);
    std::jthread([owned = std::move(b)] { fake::push_context(fake::make_context(1)); }).join();
    CHECK(fake::alive().allocations == 0);
  }

  TEST_CASE("every driver call failing in turn: the plan, with joins") {
    for (const bool bound_to_other_gpu : {false, true}) {
      fake::fail_each_call(bound_to_other_gpu, [](const auto& begin_teardown) {
        const DeviceContext context(0, fake::table());
        KernelCache cache({}, fake::nvrtc());
        const QkvPlan plan(cache, context, kProblem, {.binding = Binding::lazy});
        const CUstream stream = fake::make_stream(context.handle());
        const LaunchOptions options{.producer = fake::make_stream(context.handle()),
                                    .consumer = fake::make_stream(context.handle())};
        plan(tensors_of(kProblem, 3), stream, options);
        plan(tensors_of(kProblem, 300), stream, options);
        begin_teardown();
      });
    }
  }

  TEST_CASE("every driver call failing in turn: the strict call that allocates") {
    for (const bool bound_to_other_gpu : {false, true}) {
      fake::fail_each_call(bound_to_other_gpu, [](const auto& begin_teardown) {
        const DeviceContext context(0, fake::table());
        KernelCache cache({}, fake::nvrtc());
        const CUstream stream = fake::make_stream(context.handle());
        const QkvOutputs outputs = qkv_project_int4_alloc(cache, context, tensors_of(kStrict, 3), stream);
        begin_teardown();
      });
    }
  }

  TEST_CASE("a failed launch leaves plan and context usable") {
    Bench bench;
    const QkvPlan plan(*bench.cache, *bench.context, kProblem);
    const QkvTensors tensors = tensors_of(kProblem, 3);
    fake::fail("cuLaunchKernelEx", 1, CUDA_ERROR_OUT_OF_MEMORY);
    try {
      plan(tensors, bench.stream);
      FAIL("did not throw");
    } catch (const DriverError& error) {
      CHECK(error.code() == CUDA_ERROR_OUT_OF_MEMORY);
    }
    plan(tensors, bench.stream);
    CHECK(fake::launches().size() == 1);
  }

  TEST_CASE("a failed compile of a lazily bound row is tried again by the next launch") {
    Bench bench;
    const QkvPlan plan(*bench.cache, *bench.context, kProblem, {.binding = Binding::lazy});
    const QkvTensors tensors = tensors_of(kProblem, 3);
    fake::nvrtc_failures = 1;
    CHECK_THROWS_AS(plan(tensors, bench.stream), CompileError);
    CHECK(fake::launches().empty());
    plan(tensors, bench.stream);
    CHECK(fake::launches().size() == 1);
    fake::nvrtc_failures = 1;
    CHECK_THROWS_AS(QkvPlan(*bench.cache, *bench.context, kStrict), CompileError);
  }
}
