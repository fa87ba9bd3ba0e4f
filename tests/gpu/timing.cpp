// SPDX-License-Identifier: Apache-2.0
// qkvjit_gpu_timing: times host overhead and cold specialisation on the GPU present, and writes JSON. Kernels are timed
// by qkvjit-bench.
//
//   qkvjit_gpu_timing --json out.json
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "compile/kernel_templates.h"
#include "cuda/device_state.h"
#include "qkvjit/qkvjit.h"

namespace {

using namespace qkvjit;
using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// One device, its driver and a stream.
struct Bench {
  DeviceContext context{0};
  const DriverTable& driver = *context.state()->driver;
  ContextScope scope{*context.state()};
  CUstream stream = nullptr;

  Bench() { ok(driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)); }
  void ok(CUresult code) const { check(driver, code, "timing"); }

  DeviceBuffer buffer(std::size_t bytes) const { return {context, bytes, stream}; }
  void upload(void* to, const void* from, std::size_t bytes) const {
    ok(driver.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream));
    ok(driver.cuStreamSynchronize(stream));
  }
};

/// Median nanoseconds a call of each of `calls`, over batches that never fill the launch queue, on `threads` threads at
/// once. The calls take turns batch by batch, so that what else the machine does meets all alike.
std::vector<double> call_ns(const Bench& bench, unsigned threads,
                            const std::vector<std::function<void(CUstream)>>& calls) {
  constexpr unsigned kBatch = 200, kBatches = 5000;  // 10^6 of each call, all threads together
  std::vector<std::vector<double>> results(calls.size());
  std::mutex mutex;
  {
    std::vector<std::jthread> workers;
    for (unsigned t = 0; t < threads; ++t) {
      workers.emplace_back([&] {
        const ContextScope scope(*bench.context.state());
        CUstream stream = nullptr;
        bench.ok(bench.driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        std::vector<std::vector<double>> mine(calls.size());
        for (unsigned batch = 0; batch < kBatches / threads; ++batch) {
          for (std::size_t c = 0; c < calls.size(); ++c) {
            const auto start = Clock::now();
            for (unsigned i = 0; i < kBatch; ++i) calls[c](stream);
            mine[c].push_back(us_since(start) * 1000 / kBatch);
            bench.ok(bench.driver.cuStreamSynchronize(stream));
          }
        }
        bench.ok(bench.driver.cuStreamDestroy(stream));
        const std::lock_guard lock(mutex);
        for (std::size_t c = 0; c < calls.size(); ++c)
          results[c].insert(results[c].end(), mine[c].begin(), mine[c].end());
      });
    }
  }
  std::vector<double> medians;
  for (auto& values : results) medians.push_back(median(std::move(values)));
  return medians;
}

nlohmann::json overhead(const Bench& bench) {
  const QkvProblem problem{.n_q = 64, .n_k = 64, .n_v = 64, .k = 128};
  // One buffer serves for all: only launches are timed.
  const DeviceBuffer memory(bench.context, 10u << 16, bench.stream);
  const auto matrix = [&](unsigned slot, DType dtype, std::int64_t rows, std::int64_t columns) {
    return TensorView::matrix(static_cast<char*>(memory.data()) + (slot << 16), dtype, rows, columns);
  };
  QkvTensors tensors;
  tensors.x = matrix(0, DType::f16, 1, 128);
  tensors.w_q_packed = matrix(1, DType::u32, 16, 64), tensors.w_k_packed = matrix(2, DType::u32, 16, 64);
  tensors.w_v_packed = matrix(3, DType::u32, 16, 64);
  tensors.scales_q = matrix(4, DType::f16, 1, 64), tensors.scales_k = matrix(5, DType::f16, 1, 64);
  tensors.scales_v = matrix(6, DType::f16, 1, 64);
  tensors.q = matrix(7, DType::f16, 1, 64), tensors.k = matrix(8, DType::f16, 1, 64);
  tensors.v = matrix(9, DType::f16, 1, 64);
  KernelCache cache({.directory = ""});  // cold
  const QkvPlan plan(cache, bench.context, problem);
  const auto kernel = cache.get(bench.context, plan.row(1));
  qkv_project_int4(cache, bench.context, tensors, bench.stream);

  // What the plan's launch does, without the plan.
  struct Params {
    const void* x;
    const void* w[3];
    const void* s[3];
    void* o[3];
    unsigned long long m;
    unsigned weights_are_constant;
  } params{tensors.x.data,
           {tensors.w_q_packed.data, tensors.w_k_packed.data, tensors.w_v_packed.data},
           {tensors.scales_q.data, tensors.scales_k.data, tensors.scales_v.data},
           {tensors.q.data, tensors.k.data, tensors.v.data},
           1,
           0};
  void* arguments[] = {&params};
  const auto bare = [&](CUstream stream) {
    CUlaunchConfig config{};
    config.gridDimX = column_tiles(kernel->spec());
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = threads_per_block(kernel->spec().tile);
    config.sharedMemBytes = smem_bytes(kernel->spec());
    config.hStream = stream;
    bench.driver.cuLaunchKernelEx(&config, kernel->function(), arguments, nullptr);
  };
  nlohmann::json rows = nlohmann::json::array();
  for (const unsigned threads : {1u, 8u}) {
    const auto ns = call_ns(bench, threads,
                            {bare, [&](CUstream s) { plan(tensors, s); },
                             [&](CUstream s) { qkv_project_int4(cache, bench.context, tensors, s); }});
    rows.push_back({{"threads", threads},
                    {"bare_ns", ns[0]},
                    {"plan_ns", ns[1]},
                    {"strict_ns", ns[2]},
                    {"plan_over_bare_ns", ns[1] - ns[0]},
                    {"strict_over_bare_ns", ns[2] - ns[0]}});
    fmt::print("{} thread(s): bare {:.0f} ns, plan +{:.0f} ns, strict +{:.0f} ns\n", threads, ns[0], ns[1] - ns[0],
               ns[2] - ns[0]);
  }
  return rows;
}

/// Cold specialisations: a fresh cache, compile and load, one thread, median of three. CUDA_CACHE_DISABLE=1 must be set
/// outside.
nlohmann::json cold(const Bench& bench) {
  nlohmann::json rows = nlohmann::json::array();
  const QkvProblem problem{.n_q = 4096, .n_k = 4096, .n_v = 4096, .k = 4096};
  KernelCache cache({.directory = ""});  // cold
  const Target target = cache.target_for(bench.context.info());
  // NVRTC's own first-use set-up is measured apart: a compile of another shape.
  auto start = Clock::now();
  cache.get(bench.context, candidate_specializations(QkvProblem{.n_q = 64, .n_k = 64, .n_v = 64, .k = 128},
                                                     bench.context.info(), target, true)
                               .back());
  rows.push_back({{"row", "first use of NVRTC (simple kernel, K = 128)"}, {"ms", us_since(start) / 1000}});
  // The rows that a plan of this shape may use, in each layout, with the promise and without.
  std::vector<Specialization> specs;
  for (const WeightLayout layout : {WeightLayout::prepacked, WeightLayout::k8n, WeightLayout::nk8}) {
    for (const bool promise : {false, true}) {
      QkvProblem variant = problem;
      variant.layout = layout;
      for (const SelectedRow& row : select_rows(variant, bench.context.info(), target, true, promise)) {
        if (std::find(specs.begin(), specs.end(), row.spec) == specs.end()) specs.push_back(row.spec);
      }
    }
  }
  for (const Specialization& spec : specs) {
    std::vector<double> times;
    std::shared_ptr<const Kernel> kernel;
    for (int repeat = 0; repeat < 3; ++repeat) {
      KernelCache fresh;
      start = Clock::now();
      kernel = fresh.get(bench.context, spec);
      times.push_back(us_since(start) / 1000);
    }
    const double ms = median(times);
    rows.push_back(
        {{"row", fmt::format("{} {} {}", to_string(spec.pipeline), to_string(spec.layout), tile_name(spec.tile))},
         {"ms", ms},
         {"ms_min", *std::min_element(times.begin(), times.end())},
         {"ms_max", *std::max_element(times.begin(), times.end())},
         {"registers", kernel->compiled().registers},
         {"spill_bytes", kernel->compiled().spill_bytes}});
    fmt::print("cold {:<9} {:<9} {:<28} {:6.1f} ms\n", to_string(spec.pipeline), to_string(spec.layout),
               tile_name(spec.tile), ms);
  }
  return rows;
}

/// The smallest kernel there is, to learn the compiler's version from.
Specialization nvrtc_probe(const Bench& bench) {
  const QkvProblem problem{.n_q = 8, .n_k = 8, .n_v = 8, .k = 128};
  return candidate_specializations(problem, bench.context.info(), KernelCache().target_for(bench.context.info()), true)
      .back();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Bench bench;
    const std::string mode = argc == 3 ? argv[1] : "";
    if (mode != "--json") {
      std::cerr << "usage: qkvjit_gpu_timing --json FILE\n";
      return 2;
    }
    nlohmann::json report;
    report["templates_digest"] = std::string(templates_digest());
    report["device"] = bench.context.info().name;
    report["driver"] = bench.context.info().driver_version;
    report["nvrtc"] = KernelCache().compile(nvrtc_probe(bench))->nvrtc_version;
    report["cold"] = cold(bench);
    report["overhead"] = overhead(bench);
    std::ofstream(argv[2]) << report.dump(1) << '\n';
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "qkvjit_gpu_timing: " << error.what() << '\n';
    return 1;
  }
}
