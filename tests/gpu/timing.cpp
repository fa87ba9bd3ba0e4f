// SPDX-License-Identifier: Apache-2.0
// qkvjit_gpu_timing: times kernels, host overhead and cold specialisation on the GPU present, and writes JSON.
//
// Protocol of the kernel times: a CUDA graph of L calls over L distinct weight sets (more than 600 MB together, so
// that weights come from memory as in a model), median of seven batches of replays, microseconds a call. cuBLAS f16
// of the merged GEMM, opened at run time, is timed the same way beside it. From 256 tokens on a batch is one short
// graph after a rest (time_graph, `burst`).
//
//   qkvjit_gpu_timing --json out.json            the committed table
//   qkvjit_gpu_timing --explore tiles.txt        lines "pipeline layout tile-name m": times any tile, prints a table
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
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

struct Times {
  double median = 0, min = 0, max = 0;
};

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

  /// `burst`: the chip rests before each batch, and a batch is short. Long matrix work is limited by power, so that
  /// what ran before would decide the clocks.
  Times time_graph(unsigned calls, unsigned replays, bool burst, const std::function<void(unsigned)>& call) const {
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    ok(driver.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    for (unsigned i = 0; i < calls; ++i) call(i);
    ok(driver.cuStreamEndCapture(stream, &graph));
    ok(driver.cuGraphInstantiate(&exec, graph, 0));
    CUevent begin = nullptr, end = nullptr;
    ok(driver.cuEventCreate(&begin, CU_EVENT_DEFAULT));
    ok(driver.cuEventCreate(&end, CU_EVENT_DEFAULT));
    std::vector<double> batches;
    for (int batch = -1; batch < 7; ++batch) {  // the first warms up
      if (burst) {
        std::this_thread::sleep_for(std::chrono::milliseconds(15));
        ok(driver.cuGraphLaunch(exec, stream));
        ok(driver.cuStreamSynchronize(stream));
        std::this_thread::sleep_for(std::chrono::milliseconds(15));
      }
      ok(driver.cuEventRecord(begin, stream));
      for (unsigned i = 0; i < replays; ++i) ok(driver.cuGraphLaunch(exec, stream));
      ok(driver.cuEventRecord(end, stream));
      ok(driver.cuEventSynchronize(end));
      float ms = 0;
      ok(driver.cuEventElapsedTime(&ms, begin, end));
      if (batch >= 0) batches.push_back(ms * 1000.0 / (replays * calls));
    }
    ok(driver.cuEventDestroy(begin));
    ok(driver.cuEventDestroy(end));
    ok(driver.cuGraphExecDestroy(exec));
    ok(driver.cuGraphDestroy(graph));
    return {median(batches), *std::min_element(batches.begin(), batches.end()),
            *std::max_element(batches.begin(), batches.end())};
  }
};

std::vector<std::uint16_t> random_f16(std::size_t count, float scale, bool positive, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> pool(1u << 20), values(count);
  for (auto& v : pool) v = float_to_f16(positive ? scale * (0.5f + std::fabs(normal(random))) : scale * normal(random));
  for (std::size_t i = 0; i < count; ++i) values[i] = pool[(i + (i >> 20) * 7919) & (pool.size() - 1)];
  return values;
}

/// L sets of weights and scales, x for the largest M, and outputs.
struct Operands {
  QkvProblem problem;
  unsigned sets;
  std::uint64_t max_m;
  std::size_t weight_bytes[3], scale_bytes[3], set_bytes = 0;
  DeviceBuffer weights, x, out;

  Operands(const Bench& bench, const QkvProblem& p, std::uint64_t largest_m) : problem(p), max_m(largest_m) {
    const std::uint64_t ns[3] = {p.n_q, p.n_k, p.n_v};
    std::uint64_t total_n = 0;
    for (int i = 0; i < 3; ++i) {
      weight_bytes[i] = p.k / 2 * ns[i];
      scale_bytes[i] = (p.k / 128 * ns[i] * 2 + 255) / 256 * 256;
      set_bytes += weight_bytes[i] + scale_bytes[i];
      total_n += ns[i];
    }
    sets = static_cast<unsigned>(640'000'000 / set_bytes + 1);
    weights = bench.buffer(sets * set_bytes);
    x = bench.buffer(max_m * p.k * 2);
    out = bench.buffer(max_m * total_n * 2);
    std::mt19937 random(7);
    std::vector<std::uint32_t> words(set_bytes / 4);
    for (auto& w : words) w = random();
    std::size_t at = 0;
    for (int i = 0; i < 3; ++i) {
      at += weight_bytes[i];
      const auto scales = random_f16(scale_bytes[i] / 2, 0.01f, true, 11u + static_cast<unsigned>(i));
      std::memcpy(reinterpret_cast<char*>(words.data()) + at, scales.data(), scale_bytes[i]);
      at += scale_bytes[i];
    }
    for (unsigned s = 0; s < sets; ++s)
      bench.upload(static_cast<char*>(weights.data()) + s * set_bytes, words.data(), set_bytes);
    const auto values = random_f16(max_m * p.k, 1.0f, false, 3);
    bench.upload(x.data(), values.data(), values.size() * 2);
  }

  [[nodiscard]] QkvTensors tensors(unsigned set, std::uint64_t m) const {
    QkvTensors t;
    const auto rows = static_cast<std::int64_t>(m), k = static_cast<std::int64_t>(problem.k);
    t.x = TensorView::matrix(x.data(), DType::f16, rows, k);
    TensorView* w[3] = {&t.w_q_packed, &t.w_k_packed, &t.w_v_packed};
    TensorView* s[3] = {&t.scales_q, &t.scales_k, &t.scales_v};
    TensorView* o[3] = {&t.q, &t.k, &t.v};
    const std::uint64_t ns[3] = {problem.n_q, problem.n_k, problem.n_v};
    char* base = static_cast<char*>(weights.data()) + set * set_bytes;
    char* output = static_cast<char*>(out.data());
    for (int i = 0; i < 3; ++i) {
      const auto n = static_cast<std::int64_t>(ns[i]);
      *w[i] = problem.layout == WeightLayout::k8n ? TensorView::matrix(base, DType::u32, k / 8, n)
                                                  : TensorView::matrix(base, DType::u32, n, k / 8);
      base += weight_bytes[i];
      *s[i] = TensorView::matrix(base, DType::f16, k / 128, n);
      base += scale_bytes[i];
      *o[i] = TensorView::matrix(output, DType::f16, rows, n);
      output += m * ns[i] * 2;
    }
    return t;
  }
};

/// cuBLAS, declared by hand: its ABI, no header and no link.
class Cublas {
 public:
  explicit Cublas(const Bench& bench) : workspace_(bench.buffer(64u << 20)) {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12", "/usr/local/cuda/lib64/libcublas.so"}) {
      if ((library_ = dlopen(name, RTLD_NOW)) != nullptr) break;
    }
    if (library_ == nullptr) return;
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library_, "cublasCreate_v2"));
    const auto set_stream = reinterpret_cast<int (*)(void*, CUstream)>(dlsym(library_, "cublasSetStream_v2"));
    const auto set_workspace =
        reinterpret_cast<int (*)(void*, void*, std::size_t)>(dlsym(library_, "cublasSetWorkspace_v2"));
    gemm_ = reinterpret_cast<Gemm>(dlsym(library_, "cublasGemmEx"));
    if (create(&handle_) != 0) library_ = nullptr;
    if (library_ == nullptr) return;
    set_stream(handle_, bench.stream);
    set_workspace(handle_, workspace_.data(), workspace_.bytes());
  }
  [[nodiscard]] bool available() const { return library_ != nullptr; }

  /// out[m, n] = x[m, k] * w[k, n], all f16, f32 sums.
  void gemm(void* out, const void* x, const void* w, int m, int n, int k) const {
    const float one = 1.f, zero = 0.f;
    if (gemm_(handle_, 0, 0, n, m, k, &one, w, 2, n, x, 2, k, &zero, out, 2, n, 68, -1) != 0)
      throw Error("cublasGemmEx failed");
  }

 private:
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                       const void*, void*, int, int, int, int);
  void* library_ = nullptr;
  void* handle_ = nullptr;
  Gemm gemm_ = nullptr;
  DeviceBuffer workspace_;
};

constexpr std::uint64_t kBurstM = 256;  // from here on the chip is limited by power

/// Calls in the graph and replays of a batch: all weight sets where reading them takes the time, else a few
/// milliseconds of work.
unsigned calls_for(std::uint64_t m, unsigned sets) { return m < kBurstM ? sets : m >= 4096 ? 4 : m >= 1024 ? 12 : 24; }
unsigned replays_for(std::uint64_t m, unsigned calls) { return m < kBurstM ? std::max(1u, 96u / calls) : 1; }

/// cuBLAS needs 4x the weight bytes: as many f16 sets as hold 600 MB.
Times time_cublas(const Bench& bench, const Cublas& cublas, const Operands& operands, std::uint64_t m) {
  const int n = static_cast<int>(operands.problem.n_q + operands.problem.n_k + operands.problem.n_v);
  const int k = static_cast<int>(operands.problem.k);
  const std::size_t set = static_cast<std::size_t>(n) * static_cast<std::size_t>(k) * 2;
  const unsigned sets = static_cast<unsigned>(640'000'000 / set + 1);
  static DeviceBuffer weights;
  static std::size_t filled = 0;
  if (filled != sets * set) {
    weights = DeviceBuffer();
    weights = bench.buffer(sets * set);
    const auto values = random_f16(set / 2, 0.02f, false, 5);
    for (unsigned i = 0; i < sets; ++i) bench.upload(static_cast<char*>(weights.data()) + i * set, values.data(), set);
    filled = sets * set;
  }
  const auto call = [&](unsigned i) {
    cublas.gemm(operands.out.data(), operands.x.data(), static_cast<char*>(weights.data()) + i % sets * set,
                static_cast<int>(m), n, k);
  };
  for (unsigned i = 0; i < 2; ++i) call(i);
  bench.ok(bench.driver.cuStreamSynchronize(bench.stream));
  const unsigned calls = calls_for(m, sets * 2);
  return bench.time_graph(calls, replays_for(m, calls), m >= kBurstM, call);
}

Times time_ours(const Bench& bench, const Operands& operands, std::uint64_t m,
                const std::function<void(const QkvTensors&)>& call) {
  const unsigned calls = calls_for(m, operands.sets);
  return bench.time_graph(calls, replays_for(m, calls), m >= kBurstM,
                          [&](unsigned i) { call(operands.tensors(i % operands.sets, m)); });
}

void explore(const Bench& bench, const std::string& file) {
  KernelCache cache;
  std::ifstream lines(file);
  const QkvProblem base{.n_q = 4096, .n_k = 4096, .n_v = 4096, .k = 4096};
  Operands operands(bench, base, 4096);
  const Cublas cublas(bench);
  std::set<std::uint64_t> cublas_done;
  for (std::string pipeline, layout, tile; lines >> pipeline >> layout >> tile;) {
    std::uint64_t m = 0;
    lines >> m;
    if (cublas.available() && m >= 64 && cublas_done.insert(m).second) {
      fmt::print("{:<9} {:<4} {:<28} m={:<5} {:8.2f} us\n", "cublas", "", "", m,
                 time_cublas(bench, cublas, operands, m).median);
    }
    try {
      Specialization spec;
      spec.pipeline = pipeline == "decode"   ? Pipeline::decode
                      : pipeline == "simple" ? Pipeline::simple
                                             : Pipeline::mma_sync;
      spec.layout = operands.problem.layout = layout == "nk8" ? WeightLayout::nk8 : WeightLayout::k8n;
      spec.n_q = spec.n_k = spec.n_v = 4096;
      spec.k = 4096;
      spec.aligned = true;
      spec.tile = parse_tile(tile);
      spec.target = cache.target_for(bench.context.info());
      const auto kernel = cache.get(bench.context, spec);
      std::vector<std::uint16_t> got(m * 12288), want(m * 12288);
      double worst = -1;
      if (m <= 256) {  // against the plain kernel
        Specialization plain = spec;
        plain.pipeline = Pipeline::simple;
        plain.tile = {.block_m = 8, .block_n = 32, .warps_m = 8};
        const auto read = [&](const Kernel& k, std::vector<std::uint16_t>& to) {
          bench.ok(bench.driver.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(operands.out.data()), 0xff, to.size() * 2,
                                                bench.stream));
          launch_kernel(k, bench.context, operands.tensors(0, m), bench.stream);
          bench.ok(bench.driver.cuStreamSynchronize(bench.stream));
          bench.ok(
              bench.driver.cuMemcpyDtoH(to.data(), reinterpret_cast<CUdeviceptr>(operands.out.data()), to.size() * 2));
        };
        read(*cache.get(bench.context, plain), want);
        read(*kernel, got);
        double difference = 0, largest = 0;
        for (std::size_t i = 0; i < got.size(); ++i) {
          const double d = std::fabs(f16_to_float(got[i]) - f16_to_float(want[i]));
          difference = d > difference || std::isnan(d) ? d : difference;
          largest = std::max<double>(largest, std::fabs(f16_to_float(want[i])));
        }
        worst = difference / largest;
      }
      const Times times = time_ours(bench, operands, m, [&](const QkvTensors& tensors) {
        launch_kernel(*kernel, bench.context, tensors, bench.stream);
      });
      int blocks = 0;
      bench.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
          &blocks, kernel->function(), static_cast<int>(threads_per_block(spec.tile)), smem_bytes(spec));
      fmt::print(
          "{:<9} {:<4} {:<28} m={:<5} {:8.2f} us  (min {:.2f}) err {:.5f} regs {} spill {} occ {} compile {:.0f} ms\n",
          pipeline, layout, tile, m, times.median, times.min, worst, kernel->compiled().registers,
          kernel->compiled().spill_bytes, blocks, kernel->compiled().compile_ms);
    } catch (const std::exception& error) {
      fmt::print("{} {} {} m={}: {}\n", pipeline, layout, tile, m, std::string(error.what()).substr(0, 600));
    }
    std::cout.flush();
  }
}

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
  const Operands operands = [&] {
    Operands o(bench, QkvProblem{.n_q = 4096, .n_k = 4096, .n_v = 4096, .k = 4096}, 8);
    o.problem = problem;
    for (int i = 0; i < 3; ++i) o.weight_bytes[i] = 64 * 64, o.scale_bytes[i] = 256;
    return o;
  }();
  KernelCache cache;
  const QkvPlan plan(cache, bench.context, problem);
  const QkvTensors tensors = operands.tensors(0, 1);
  const auto kernel = cache.get(bench.context, plan.row(1));
  qkv_project_int4(cache, bench.context, tensors, bench.stream);

  // What the plan's launch does, without the plan.
  struct Params {
    const void* x;
    const void* w[3];
    const void* s[3];
    void* o[3];
    unsigned long long m;
  } params{tensors.x.data,
           {tensors.w_q_packed.data, tensors.w_k_packed.data, tensors.w_v_packed.data},
           {tensors.scales_q.data, tensors.scales_k.data, tensors.scales_v.data},
           {tensors.q.data, tensors.k.data, tensors.v.data},
           1};
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

/// Cold specialisations: a fresh cache, compile and load, one thread, median of five. CUDA_CACHE_DISABLE=1 must be set
/// outside.
nlohmann::json cold(const Bench& bench) {
  nlohmann::json rows = nlohmann::json::array();
  const QkvProblem problem{.n_q = 4096, .n_k = 4096, .n_v = 4096, .k = 4096};
  KernelCache cache;
  const Target target = cache.target_for(bench.context.info());
  // NVRTC's own first-use set-up is measured apart: a compile of another shape.
  auto start = Clock::now();
  cache.get(bench.context, candidate_specializations(QkvProblem{.n_q = 64, .n_k = 64, .n_v = 64, .k = 128},
                                                     bench.context.info(), target, true)
                               .back());
  rows.push_back({{"row", "first use of NVRTC (simple kernel, K = 128)"}, {"ms", us_since(start) / 1000}});
  for (const bool aligned : {true, false}) {
    for (const Specialization& spec : candidate_specializations(problem, bench.context.info(), target, aligned)) {
      std::vector<double> times;
      std::shared_ptr<const Kernel> kernel;
      for (int repeat = 0; repeat < 5; ++repeat) {
        KernelCache fresh;
        start = Clock::now();
        kernel = fresh.get(bench.context, spec);
        times.push_back(us_since(start) / 1000);
      }
      const double ms = median(times);
      rows.push_back({{"row", fmt::format("{} {} {}", to_string(spec.pipeline), tile_name(spec.tile),
                                          aligned ? "aligned" : "any")},
                      {"ms", ms},
                      {"ms_min", *std::min_element(times.begin(), times.end())},
                      {"ms_max", *std::max_element(times.begin(), times.end())},
                      {"registers", kernel->compiled().registers},
                      {"spill_bytes", kernel->compiled().spill_bytes}});
      fmt::print("cold {:<9} {:<28} {:<8} {:6.1f} ms\n", to_string(spec.pipeline), tile_name(spec.tile),
                 aligned ? "aligned" : "any", ms);
    }
  }
  return rows;
}

/// The smallest kernel there is, to learn the compiler's version from.
Specialization nvrtc_probe(const Bench& bench) {
  const QkvProblem problem{.n_q = 8, .n_k = 8, .n_v = 8, .k = 128};
  return candidate_specializations(problem, bench.context.info(), KernelCache().target_for(bench.context.info()), true)
      .back();
}

nlohmann::json kernel_table(const Bench& bench) {
  nlohmann::json rows = nlohmann::json::array();
  KernelCache cache;
  const Cublas cublas(bench);
  if (!cublas.available()) fmt::print("cuBLAS was not found: no ratio to it\n");
  for (const auto& [k, n_q, n_kv] : {std::tuple{4096, 4096, 4096}, std::tuple{4096, 4096, 1024}}) {
    for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8}) {
      const QkvProblem problem{.n_q = static_cast<std::uint64_t>(n_q),
                               .n_k = static_cast<std::uint64_t>(n_kv),
                               .n_v = static_cast<std::uint64_t>(n_kv),
                               .k = static_cast<std::uint64_t>(k),
                               .layout = layout};
      const QkvPlan plan(cache, bench.context, problem);
      const Operands operands(bench, problem, 4096);
      for (const std::uint64_t m : {1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096}) {
        const Times ours =
            time_ours(bench, operands, m, [&](const QkvTensors& tensors) { plan(tensors, bench.stream); });
        nlohmann::json row = {{"k", k},
                              {"n_q", n_q},
                              {"n_k", n_kv},
                              {"n_v", n_kv},
                              {"m", m},
                              {"layout", to_string(layout)},
                              {"pipeline", to_string(plan.row(m).pipeline)},
                              {"tile", tile_name(plan.row(m).tile)},
                              {"us", ours.median},
                              {"us_min", ours.min},
                              {"us_max", ours.max}};
        double reference = 0;
        if (cublas.available()) row["cublas_f16_us"] = reference = time_cublas(bench, cublas, operands, m).median;
        rows.push_back(row);
        fmt::print("K {} N {}+2*{} {} M {:<5} {:9.2f} us ({:.2f}-{:.2f})  cuBLAS f16 {:9.2f} us  x{:.2f}  {} {}\n", k,
                   n_q, n_kv, to_string(layout), m, ours.median, ours.min, ours.max, reference, reference / ours.median,
                   to_string(plan.row(m).pipeline), tile_name(plan.row(m).tile));
        std::cout.flush();
      }
    }
  }
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Bench bench;
    const std::string mode = argc == 3 ? argv[1] : "";
    if (mode == "--explore") {
      explore(bench, argv[2]);
      return 0;
    }
    if (mode != "--json") {
      std::cerr << "usage: qkvjit_gpu_timing --json FILE | --explore FILE\n";
      return 2;
    }
    nlohmann::json report;
    report["templates_digest"] = std::string(templates_digest());
    report["device"] = bench.context.info().name;
    report["driver"] = bench.context.info().driver_version;
    report["nvrtc"] = KernelCache().compile(nvrtc_probe(bench))->nvrtc_version;
    report["protocol"] =
        "CUDA graph of L calls over L distinct weight sets (> 600 MB), median of 7 batches, us a call; M >= 256: "
        "bursts of a few ms after 15 ms of rest";
    report["cold"] = cold(bench);
    report["overhead"] = overhead(bench);
    report["rows"] = kernel_table(bench);
    std::ofstream(argv[2]) << report.dump(1) << '\n';
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "qkvjit_gpu_timing: " << error.what() << '\n';
    return 1;
  }
}
