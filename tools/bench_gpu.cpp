// SPDX-License-Identifier: Apache-2.0
#include "bench_gpu.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <map>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "bench_cublas.h"
#include "bench_read.h"
#include "compile/kernel_templates.h"
#include "cuda/device_state.h"
#include "cuda/nvrtc.h"
#include "reference/qkv_reference.h"

namespace qkvbench {

using namespace qkvjit;

const char* const kProtocol =
    "up to 64 tokens: CUDA graph of L calls over L distinct weight sets (> 600 MB together, so weights come from "
    "memory), "
    "median, minimum and maximum of 7 batches of replays, microseconds a call; from 65 tokens on bursts: 15 ms of "
    "rest, a "
    "warm replay, 15 ms of rest, one graph of 2 to 5 ms, in shuffled order over dependent launches off, on, and "
    "cuBLAS, "
    "median, minimum and maximum of the repetitions; rows marked interleaved: the same graphs in turn without any rest";

namespace {

constexpr std::size_t kSetBytes = 640'000'000;

std::vector<std::uint16_t> random_f16(std::size_t count, float scale, bool positive, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> pool(1u << 20), values(count);
  for (auto& v : pool) v = float_to_f16(positive ? scale * (0.5f + std::fabs(normal(random))) : scale * normal(random));
  for (std::size_t i = 0; i < count; ++i) values[i] = pool[(i + (i >> 20) * 7919) & (pool.size() - 1)];
  return values;
}

QkvProblem problem_of(const Shape& s, WeightLayout layout) {
  return {.n_q = s.n_q, .n_k = s.n_k, .n_v = s.n_v, .k = s.k, .layout = layout};
}

struct Times {
  double median = 0, min = 0, max = 0;
};

Times times_of(std::vector<double> batches) {
  std::sort(batches.begin(), batches.end());
  return {batches[batches.size() / 2], batches.front(), batches.back()};
}

unsigned calls_for(unsigned sets) { return sets * std::max(1u, 96 / sets); }

/// A captured sequence of calls.
class CallGraph {
 public:
  CallGraph(const DriverTable& driver, CUstream stream, unsigned calls, const std::function<void(unsigned)>& call)
      : driver_(&driver) {
    CUgraph graph = nullptr;
    check(driver, driver.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
    for (unsigned i = 0; i < calls; ++i) call(i);
    check(driver, driver.cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
    const CUresult code = driver.cuGraphInstantiate(&exec_, graph, 0);
    driver.cuGraphDestroy(graph);
    check(driver, code, "cuGraphInstantiate");
  }
  ~CallGraph() {
    if (exec_ != nullptr) driver_->cuGraphExecDestroy(exec_);
  }
  CallGraph(CallGraph&& other) noexcept : driver_(other.driver_), exec_(std::exchange(other.exec_, nullptr)) {}
  CallGraph& operator=(CallGraph&&) = delete;

  void launch(CUstream stream) const { check(*driver_, driver_->cuGraphLaunch(exec_, stream), "cuGraphLaunch"); }

 private:
  const DriverTable* driver_;
  CUgraphExec exec_ = nullptr;
};

/// Two events around work on a stream.
class Stopwatch {
 public:
  Stopwatch(const DriverTable& driver, CUstream stream) : driver_(&driver), stream_(stream) {
    check(driver, driver.cuEventCreate(&begin_, CU_EVENT_DEFAULT), "cuEventCreate");
    check(driver, driver.cuEventCreate(&end_, CU_EVENT_DEFAULT), "cuEventCreate");
  }
  ~Stopwatch() {
    if (begin_ != nullptr) driver_->cuEventDestroy(begin_);
    if (end_ != nullptr) driver_->cuEventDestroy(end_);
  }
  Stopwatch(Stopwatch&& other) noexcept
      : driver_(other.driver_),
        stream_(other.stream_),
        begin_(std::exchange(other.begin_, nullptr)),
        end_(std::exchange(other.end_, nullptr)) {}
  Stopwatch& operator=(Stopwatch&&) = delete;

  void start() const { check(*driver_, driver_->cuEventRecord(begin_, stream_), "cuEventRecord"); }
  void stop() const { check(*driver_, driver_->cuEventRecord(end_, stream_), "cuEventRecord"); }
  /// Waits for it.
  [[nodiscard]] double us() const {
    check(*driver_, driver_->cuEventSynchronize(end_), "cuEventSynchronize");
    float ms = 0;
    check(*driver_, driver_->cuEventElapsedTime(&ms, begin_, end_), "cuEventElapsedTime");
    return double{ms} * 1000;
  }

 private:
  const DriverTable* driver_;
  CUstream stream_;
  CUevent begin_ = nullptr, end_ = nullptr;
};

}  // namespace

struct GpuBench::Impl {
  Impl(int ordinal, BenchOptions bench_options) : options(std::move(bench_options)), context(ordinal) {
    ok(driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    cublas = std::make_unique<CublasLt>();
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    measure_read_bandwidth();
  }
  ~Impl() { driver.cuStreamDestroy(stream); }

  BenchOptions options;
  DeviceContext context;
  const DriverTable& driver = *context.state()->driver;
  ContextScope scope{*context.state()};
  CUstream stream = nullptr;
  KernelCache cache;
  std::unique_ptr<CublasLt> cublas;
  void* nvml = nullptr;
  double read_tb_s = 0;
  double clock_sum = 0;
  unsigned clock_count = 0;
  std::mt19937 shuffler{20261201};

  // The operands of one shape and layout at a time.
  Shape shape;
  WeightLayout layout = WeightLayout::k8n;
  std::uint64_t max_m = 0;
  unsigned sets = 0;
  std::array<std::size_t, 3> weight_bytes{}, scale_bytes{};
  std::size_t set_bytes = 0;
  DeviceBuffer weights, x, out, f16_weights, workspace;
  std::size_t f16_set_bytes = 0;
  std::array<std::vector<std::uint32_t>, 3> raw;  // k8n, on the host, for the check
  std::array<std::vector<std::uint16_t>, 3> scales;
  std::vector<std::uint16_t> host_x;
  std::unique_ptr<QkvPlan> plans[2];  // by dependent launch
  std::vector<Row> expected;

  void ok(CUresult code) const { check(driver, code, "qkvjit-bench"); }
  void wait() const { ok(driver.cuStreamSynchronize(stream)); }
  void upload(void* to, const void* from, std::size_t bytes) const {
    ok(driver.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream));
    wait();
  }
  [[nodiscard]] std::array<std::uint64_t, 3> columns() const { return {shape.n_q, shape.n_k, shape.n_v}; }

  void measure_read_bandwidth();
  void sample_clock();
  void prepare(const Shape& wanted, WeightLayout wanted_layout, std::uint64_t m);
  [[nodiscard]] const TuningTable* tuning() const { return options.tuning ? &*options.tuning : nullptr; }
  [[nodiscard]] QkvTensors tensors(unsigned set, std::uint64_t m) const;
  using Call = std::function<void(unsigned)>;
  [[nodiscard]] Times time(unsigned calls, const Call& call);
  [[nodiscard]] std::vector<Times> bursts(const std::vector<Call>& contestants, unsigned calls, unsigned repetitions);
  [[nodiscard]] std::vector<Times> interleaved(const std::vector<Call>& contestants, unsigned calls);
  [[nodiscard]] double single_us(const Call& call) const;
  struct Prepared {
    Row* row;
    Specialization spec;
    Call call;
  };
  [[nodiscard]] Prepared prepare_row(Row& row);
  void measure_few(const Prepared& prepared);
  void measure_many(const std::vector<Prepared>& group);
  [[nodiscard]] bool is_right(std::uint64_t m, Pipeline pipeline) const;
  [[nodiscard]] std::vector<Call> cublas_calls(std::uint64_t m);
  std::optional<double> cublas_us(std::uint64_t m);
  std::map<std::uint64_t, double> cublas_known;            // of this shape, by M
  std::map<std::uint64_t, std::size_t> cublas_algorithms;  // the fastest in bursts
  [[nodiscard]] std::optional<double> three_launches_us(const Row& row, unsigned calls);
};

void GpuBench::Impl::measure_read_bandwidth() {
  const auto nvrtc = open_nvrtc();
  nvrtcProgram program = nullptr;
  const std::string arch = "--gpu-architecture=" + to_string(cache.target_for(context.info()));
  const char* options[] = {arch.c_str()};
  std::string ptx;
  std::size_t size = 0;
  if (nvrtc->nvrtcCreateProgram(&program, kBenchReadSource, "bench_read.cu", 0, nullptr, nullptr) != NVRTC_SUCCESS ||
      nvrtc->nvrtcCompileProgram(program, 1, options) != NVRTC_SUCCESS ||
      nvrtc->nvrtcGetPTXSize(program, &size) != NVRTC_SUCCESS) {
    throw CompileError("bench_read.cu does not compile");
  }
  ptx.resize(size);
  nvrtc->nvrtcGetPTX(program, ptx.data());
  nvrtc->nvrtcDestroyProgram(&program);
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  ok(driver.cuModuleLoadData(&module, ptx.c_str()));
  ok(driver.cuModuleGetFunction(&function, module, "bench_read"));
  const std::size_t bytes = std::size_t{2} << 30;
  {
    const DeviceBuffer data(context, bytes, stream), sink(context, 4, stream);
    const auto values = random_f16(std::size_t{32} << 20, 1.f, false, 9);
    for (std::size_t at = 0; at < bytes; at += values.size() * 2)
      upload(static_cast<char*>(data.data()) + at, values.data(), values.size() * 2);
    CUdeviceptr pointer = reinterpret_cast<CUdeviceptr>(data.data()), to = reinterpret_cast<CUdeviceptr>(sink.data());
    unsigned long long vectors = bytes / 16;
    void* arguments[] = {&pointer, &vectors, &to};
    const auto blocks = static_cast<unsigned>(context.info().multiprocessors) * 4;
    const Times times = time(4, [&](unsigned) {
      ok(driver.cuLaunchKernel(function, blocks, 1, 1, 512, 1, 1, 0, stream, arguments, nullptr));
    });
    read_tb_s = static_cast<double>(bytes) / times.median / 1e6;
  }
  wait();
  driver.cuModuleUnload(module);
}

void GpuBench::Impl::sample_clock() {
  if (nvml == nullptr) return;
  const auto init = reinterpret_cast<int (*)()>(dlsym(nvml, "nvmlInit_v2"));
  const auto by_index = reinterpret_cast<int (*)(unsigned, void**)>(dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"));
  const auto clock = reinterpret_cast<int (*)(void*, int, unsigned*)>(dlsym(nvml, "nvmlDeviceGetClockInfo"));
  void* device = nullptr;
  unsigned mhz = 0;
  constexpr int kMultiprocessors = 1;  // NVML_CLOCK_SM
  if (init == nullptr || by_index == nullptr || clock == nullptr || init() != 0 ||
      by_index(static_cast<unsigned>(context.info().ordinal), &device) != 0 ||
      clock(device, kMultiprocessors, &mhz) != 0) {
    nvml = nullptr;
    return;
  }
  clock_sum += mhz;
  ++clock_count;
}

Times GpuBench::Impl::time(unsigned calls, const Call& call) {
  const CallGraph graph(driver, stream, calls, call);
  const Stopwatch watch(driver, stream);
  constexpr unsigned kReplays = 2;
  std::vector<double> batches;
  for (int batch = -1; batch < 7; ++batch) {  // the first warms up
    watch.start();
    for (unsigned i = 0; i < kReplays; ++i) graph.launch(stream);
    watch.stop();
    if (batch == 3) sample_clock();  // while it runs
    const double us = watch.us();
    if (batch >= 0) batches.push_back(us / (kReplays * calls));
  }
  return times_of(std::move(batches));
}

/// A call with nothing beside it, launched from the host: to size a graph by.
double GpuBench::Impl::single_us(const Call& call) const {
  constexpr unsigned kCalls = 4;
  const Stopwatch watch(driver, stream);
  call(0);
  watch.start();
  for (unsigned i = 0; i < kCalls; ++i) call(i);
  watch.stop();
  return watch.us() / kCalls;
}

/// The clock that the one before has left the chip with must not count, so each gets the same rest, and chance decides
/// the order.
std::vector<Times> GpuBench::Impl::bursts(const std::vector<Call>& contestants, unsigned calls, unsigned repetitions) {
  constexpr auto kRest = std::chrono::milliseconds(15);
  std::vector<CallGraph> graphs;
  for (const Call& call : contestants) graphs.emplace_back(driver, stream, calls, call);
  const Stopwatch watch(driver, stream);
  std::vector<std::vector<double>> batches(graphs.size());
  std::vector<std::size_t> order(graphs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (unsigned repetition = 0; repetition < repetitions; ++repetition) {
    std::shuffle(order.begin(), order.end(), shuffler);
    for (const std::size_t i : order) {
      wait();
      std::this_thread::sleep_for(kRest);
      graphs[i].launch(stream);
      wait();
      std::this_thread::sleep_for(kRest);
      watch.start();
      graphs[i].launch(stream);
      watch.stop();
      if (repetition == repetitions / 2) sample_clock();  // while it runs
      batches[i].push_back(watch.us() / calls);
    }
  }
  std::vector<Times> times;
  for (auto& list : batches) times.push_back(times_of(std::move(list)));
  return times;
}

/// In turn, everything queued at once: the chip never rests, and its clock is that of long work. The first rounds, a
/// fifth of a second, are for it to get there.
std::vector<Times> GpuBench::Impl::interleaved(const std::vector<Call>& contestants, unsigned calls) {
  std::vector<CallGraph> graphs;
  for (const Call& call : contestants) graphs.emplace_back(driver, stream, calls, call);
  const auto round = [&](std::vector<Stopwatch>* watches) {
    for (const CallGraph& graph : graphs) {
      if (watches != nullptr) watches->emplace_back(driver, stream).start();
      graph.launch(stream);
      if (watches != nullptr) watches->back().stop();
    }
  };
  const Stopwatch whole(driver, stream);
  whole.start();
  round(nullptr);
  whole.stop();
  const double round_us = std::max(whole.us(), 1.0);
  constexpr double kWarmUs = 200'000;
  std::vector<Stopwatch> watches;
  for (double us = 0; us < kWarmUs; us += round_us) round(nullptr);
  for (unsigned repetition = 0; repetition < options.repetitions; ++repetition) round(&watches);
  sample_clock();
  std::vector<std::vector<double>> batches(graphs.size());
  for (std::size_t i = 0; i < watches.size(); ++i) batches[i % graphs.size()].push_back(watches[i].us() / calls);
  std::vector<Times> times;
  for (auto& list : batches) times.push_back(times_of(std::move(list)));
  return times;
}

void GpuBench::Impl::prepare(const Shape& wanted, WeightLayout wanted_layout, std::uint64_t m) {
  if (shape == wanted && layout == wanted_layout && m <= max_m) return;
  const bool new_shape = !(shape == wanted) || m > max_m;
  plans[0].reset(), plans[1].reset();
  weights = DeviceBuffer();
  if (new_shape) x = DeviceBuffer(), out = DeviceBuffer(), f16_weights = DeviceBuffer(), f16_set_bytes = 0;
  if (new_shape) cublas_known.clear(), cublas_algorithms.clear();
  wait();
  shape = wanted;
  layout = wanted_layout;
  max_m = std::max<std::uint64_t>(m, 64);
  const std::uint64_t k = shape.k;
  const auto ns = columns();
  const QkvProblem raw_problem = problem_of(shape, layout == WeightLayout::nk8 ? WeightLayout::nk8 : WeightLayout::k8n);
  set_bytes = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    weight_bytes[i] = layout == WeightLayout::prepacked ? (k + 63) / 64 * ((ns[i] + 63) / 64) * 2048 : k / 2 * ns[i];
    weight_bytes[i] = (weight_bytes[i] + 255) / 256 * 256;
    scale_bytes[i] = (k / 128 * ns[i] * 2 + 255) / 256 * 256;
    set_bytes += weight_bytes[i] + scale_bytes[i];
  }
  sets = static_cast<unsigned>(kSetBytes / set_bytes + 1);
  weights = DeviceBuffer(context, sets * set_bytes, stream);
  if (new_shape) {
    std::mt19937 random(7);
    for (std::size_t i = 0; i < 3; ++i) {
      raw[i].resize(k / 8 * ns[i]);
      for (auto& word : raw[i]) word = static_cast<std::uint32_t>(random());
      scales[i] = random_f16(k / 128 * ns[i], 0.01f, true, 11u + static_cast<unsigned>(i));
    }
    host_x = random_f16(max_m * k, 1.0f, false, 3);
    x = DeviceBuffer(context, host_x.size() * 2, stream);
    out = DeviceBuffer(context, max_m * shape.n() * 2, stream);
    upload(x.data(), host_x.data(), host_x.size() * 2);
  }
  // The first set by hand, or by prepack(); the others are copies of it at addresses of their own.
  QkvTensors first = tensors(0, 1);
  TensorView* const views[] = {&first.w_q_packed, &first.w_k_packed, &first.w_v_packed};
  TensorView* const scale_views[] = {&first.scales_q, &first.scales_k, &first.scales_v};
  std::array<DeviceBuffer, 3> staged;
  for (std::size_t i = 0; i < 3; ++i) {
    std::vector<std::uint32_t> words = raw[i];
    if (layout == WeightLayout::nk8) {
      for (std::uint64_t row = 0; row < k / 8; ++row)
        for (std::uint64_t c = 0; c < ns[i]; ++c) words[c * (k / 8) + row] = raw[i][row * ns[i] + c];
    }
    void* to = views[i]->data;
    if (layout == WeightLayout::prepacked) {
      staged[i] = DeviceBuffer(context, words.size() * 4, stream);
      to = staged[i].data();
    }
    upload(to, words.data(), words.size() * 4);
    upload(scale_views[i]->data, scales[i].data(), scales[i].size() * 2);
  }
  if (layout == WeightLayout::prepacked) {
    QkvTensors words;
    TensorView* const raw_views[] = {&words.w_q_packed, &words.w_k_packed, &words.w_v_packed};
    for (std::size_t i = 0; i < 3; ++i) {
      *raw_views[i] = TensorView::matrix(staged[i].data(), DType::u32, static_cast<std::int64_t>(k / 8),
                                         static_cast<std::int64_t>(ns[i]), context.info().ordinal);
    }
    const std::size_t bytes = packed_bytes(raw_problem);
    const DeviceBuffer packed(context, bytes, stream);
    const PackedWeights result = prepack(cache, context, raw_problem, words, packed.data(), bytes, stream);
    for (std::size_t i = 0; i < 3; ++i) {
      ok(driver.cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(views[i]->data),
                                  reinterpret_cast<CUdeviceptr>(result.data[i]), result.bytes[i], stream));
    }
    wait();
  }
  for (unsigned s = 1; s < sets; ++s) {
    const auto base = reinterpret_cast<CUdeviceptr>(weights.data());
    ok(driver.cuMemcpyDtoDAsync(base + s * set_bytes, base, set_bytes, stream));
  }
  wait();
  for (const bool promise : {false, true}) {
    plans[promise ? 1 : 0] = std::make_unique<QkvPlan>(
        cache, context, problem_of(shape, layout),
        PlanOptions{.binding = Binding::lazy, .weights_are_constant = promise, .tuning = tuning()});
  }
  std::vector<Specialization> specs;
  for (const Row& row : expected) {
    if (!(row.shape == shape) || row.layout != layout) continue;
    const Specialization& spec = plans[row.dependent_launch ? 1 : 0]->row(row.m);
    if (std::find(specs.begin(), specs.end(), spec) == specs.end()) specs.push_back(spec);
  }
  cache.get_all(context, specs);
}

QkvTensors GpuBench::Impl::tensors(unsigned set, std::uint64_t m) const {
  const int ordinal = context.info().ordinal;
  const auto rows = static_cast<std::int64_t>(m), k = static_cast<std::int64_t>(shape.k);
  QkvTensors t;
  t.x = TensorView::matrix(x.data(), DType::f16, rows, k, ordinal);
  TensorView* const w[] = {&t.w_q_packed, &t.w_k_packed, &t.w_v_packed};
  TensorView* const s[] = {&t.scales_q, &t.scales_k, &t.scales_v};
  TensorView* const o[] = {&t.q, &t.k, &t.v};
  char* at = static_cast<char*>(weights.data()) + set * set_bytes;
  char* output = static_cast<char*>(out.data());
  for (std::size_t i = 0; i < 3; ++i) {
    const auto n = static_cast<std::int64_t>(columns()[i]);
    *w[i] = layout == WeightLayout::prepacked
                ? TensorView::matrix(at, DType::u32, (k + 63) / 64, (n + 63) / 64 * 512, ordinal)
            : layout == WeightLayout::nk8 ? TensorView::matrix(at, DType::u32, n, k / 8, ordinal)
                                          : TensorView::matrix(at, DType::u32, k / 8, n, ordinal);
    at += weight_bytes[i];
    *s[i] = TensorView::matrix(at, DType::f16, k / 128, n, ordinal);
    at += scale_bytes[i];
    *o[i] = TensorView::matrix(output, DType::f16, rows, n, ordinal);
    output += m * columns()[i] * 2;
  }
  return t;
}

bool GpuBench::Impl::is_right(std::uint64_t m, Pipeline pipeline) const {
  const auto arithmetic = is_exact(pipeline) ? qkvref::Arithmetic::exact : qkvref::Arithmetic::rounded;
  // First and last rows of blocks of tokens among them.
  std::vector<std::uint64_t> rows{0, m / 2, m - 1};
  for (const std::uint64_t row : {63, 64, 127, 128, 255, 256}) {
    if (row < m) rows.push_back(row);
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  std::size_t offset = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    const std::uint64_t n = columns()[i];
    const qkvref::Matrix4 matrix{raw[i].data(), scales[i].data(), n, false};
    const std::uint64_t samples = (m > kFewTokens ? 256 : 64) / rows.size() + 1,
                        step = std::max<std::uint64_t>(n / samples, 1);
    std::vector<std::uint16_t> got(n);
    for (const std::uint64_t row : rows) {
      ok(driver.cuMemcpyDtoH(got.data(), reinterpret_cast<CUdeviceptr>(out.data()) + (offset + row * n) * 2, n * 2));
      const auto one = [&](std::uint64_t c) {
        return qkvref::accept(
            got[c], qkvref::project_element(host_x.data() + row * shape.k, matrix, shape.k, 128, c, arithmetic));
      };
      for (std::uint64_t c = row % step; c < n; c += step)
        if (!one(c)) return false;
      if (!one(n - 1)) return false;
    }
    offset += m * n;
  }
  return true;
}

/// The merged GEMM with each algorithm of the heuristic; none where there is no cuBLAS.
std::vector<GpuBench::Impl::Call> GpuBench::Impl::cublas_calls(std::uint64_t m) {
  if (!cublas->available()) return {};
  const std::size_t set = shape.k * shape.n() * 2;
  const auto all_copies = static_cast<unsigned>(std::max<std::size_t>(kSetBytes / set + 1, 2));
  if (f16_set_bytes != set) {
    f16_weights = DeviceBuffer(context, all_copies * set, stream);
    const auto values = random_f16(shape.k * shape.n(), 0.02f, false, 5);
    upload(f16_weights.data(), values.data(), set);
    for (unsigned i = 1; i < all_copies; ++i) {
      const auto base = reinterpret_cast<CUdeviceptr>(f16_weights.data());
      ok(driver.cuMemcpyDtoDAsync(base + i * set, base, set, stream));
    }
    if (workspace.data() == nullptr) workspace = DeviceBuffer(context, std::size_t{64} << 20, stream);
    wait();
    f16_set_bytes = set;
  }
  const unsigned copies = sets_for(m, all_copies);
  std::vector<Call> calls;
  for (auto& gemm : cublas->candidates(m, shape.n(), shape.k)) {
    calls.emplace_back([this, gemm, copies, set](unsigned i) {
      gemm(static_cast<char*>(f16_weights.data()) + i % copies * set, x.data(), out.data(), workspace.data(), stream);
    });
  }
  return calls;
}

std::optional<double> GpuBench::Impl::cublas_us(std::uint64_t m) {
  if (const auto it = cublas_known.find(m); it != cublas_known.end()) return it->second;
  double best = 0;
  for (const Call& call : cublas_calls(m)) {
    const double us = time(calls_for(static_cast<unsigned>(kSetBytes / f16_set_bytes + 1)), call).median;
    if (best == 0 || us < best) best = us;
  }
  if (best == 0) return std::nullopt;
  cublas_known[m] = best;
  return best;
}

/// Q, K and V in a launch each. A plan has three matrices, so each launch gets a third of its matrix's columns thrice:
/// the same bytes, and the same kernels as a library would pick that knows one matrix at a time. Raw words only: thirds
/// of prepacked ones are no whole blocks.
std::optional<double> GpuBench::Impl::three_launches_us(const Row& row, unsigned calls) {
  if (row.layout != WeightLayout::k8n) return std::nullopt;
  const auto k = static_cast<std::int64_t>(shape.k), rows = static_cast<std::int64_t>(row.m);
  const int ordinal = context.info().ordinal;
  std::vector<QkvPlan> parts;
  std::array<std::uint64_t, 3> thirds{};
  for (std::size_t i = 0; i < 3; ++i) {
    thirds[i] = columns()[i] / 24 * 8;
    parts.emplace_back(
        cache, context, problem_of({shape.k, thirds[i], thirds[i], thirds[i]}, row.layout),
        PlanOptions{.binding = Binding::lazy, .weights_are_constant = row.dependent_launch, .tuning = tuning()});
  }
  const auto call = [&](unsigned set) {
    const QkvTensors whole = tensors(set % sets, row.m);
    const TensorView* const w[] = {&whole.w_q_packed, &whole.w_k_packed, &whole.w_v_packed};
    const TensorView* const s[] = {&whole.scales_q, &whole.scales_k, &whole.scales_v};
    const TensorView* const o[] = {&whole.q, &whole.k, &whole.v};
    for (std::size_t i = 0; i < 3; ++i) {
      const auto n = static_cast<std::int64_t>(thirds[i]);
      const auto third = [&](const TensorView* from, DType dtype, std::int64_t height, std::int64_t index) {
        return TensorView::matrix(
            static_cast<char*>(from->data) + static_cast<std::size_t>(index * height * n) * element_bytes(dtype), dtype,
            height, n, ordinal);
      };
      QkvTensors t;
      t.x = whole.x;
      t.w_q_packed = third(w[i], DType::u32, k / 8, 0), t.w_k_packed = third(w[i], DType::u32, k / 8, 1);
      t.w_v_packed = third(w[i], DType::u32, k / 8, 2);
      t.scales_q = third(s[i], DType::f16, k / 128, 0), t.scales_k = third(s[i], DType::f16, k / 128, 1);
      t.scales_v = third(s[i], DType::f16, k / 128, 2);
      t.q = third(o[i], DType::f16, rows, 0), t.k = third(o[i], DType::f16, rows, 1);
      t.v = third(o[i], DType::f16, rows, 2);
      parts[i](t, stream);
    }
  };
  call(0);
  wait();
  return time(calls, call).median;
}

GpuBench::GpuBench(int ordinal, BenchOptions options) : impl_(std::make_unique<Impl>(ordinal, std::move(options))) {}
GpuBench::~GpuBench() = default;

void GpuBench::expect(const std::vector<Row>& rows) { impl_->expected = rows; }

Report GpuBench::describe() const {
  Report report;
  const DeviceInfo& info = impl_->context.info();
  report.device = info.name;
  report.driver = fmt::format("CUDA {}.{}", info.driver_version / 1000, info.driver_version % 1000 / 10);
  const auto nvrtc = open_nvrtc();
  report.nvrtc = fmt::format("{}.{}", nvrtc->major, nvrtc->minor);
  report.templates_digest = std::string(templates_digest());
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  report.date = fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                            utc.tm_hour, utc.tm_min, utc.tm_sec);
  report.protocol = kProtocol;
  if (impl_->tuning() != nullptr) report.protocol += "; tiles by a tuning table";
  report.read_tb_s = impl_->read_tb_s;
  if (impl_->clock_count > 0) report.clock_mhz = impl_->clock_sum / impl_->clock_count;
  return report;
}

/// Which kernel, and how it is called; verified.
GpuBench::Impl::Prepared GpuBench::Impl::prepare_row(Row& row) {
  const QkvPlan& plan = *plans[row.dependent_launch ? 1 : 0];
  const Target target = cache.target_for(context.info());
  std::shared_ptr<const Kernel> kernel;
  Specialization spec = plan.row(row.m);
  if (!options.tile.empty() || !options.pipeline.empty()) {
    for (const auto& candidate : candidate_specializations(plan.problem(), context.info(), target, true)) {
      if (!options.tile.empty() && tile_name(candidate.tile) != options.tile) continue;
      if (!options.pipeline.empty() && to_string(candidate.pipeline) != options.pipeline) continue;
      kernel = cache.get(context, candidate);
      spec = candidate;
      break;
    }
    if (kernel == nullptr) {
      throw InvalidProblem(fmt::format("--tile/--pipeline: no tile '{}' of pipeline '{}' serves {} words here",
                                       options.tile, options.pipeline, to_string(row.layout)));
    }
    row.launched_dependent = row.dependent_launch && waits_for_grids_ahead(spec);
  } else {
    const auto rows = select_rows(plan.problem(), context.info(), target, true, row.dependent_launch, tuning());
    const auto serves = std::find_if(rows.begin(), rows.end(), [&](const SelectedRow& r) { return row.m <= r.max_m; });
    row.launched_dependent = serves != rows.end() && serves->dependent_launch && waits_for_grids_ahead(spec);
  }
  const unsigned used_sets = sets_for(row.m, sets);
  Prepared prepared{&row, spec,
                    [this, &plan, kernel, used_sets, m = row.m, promise = row.dependent_launch](unsigned i) {
                      const QkvTensors operands = tensors(i % used_sets, m);
                      if (kernel != nullptr) {
                        launch_kernel(*kernel, context, operands, stream, promise);
                      } else {
                        plan(operands, stream);
                      }
                    }};
  row.pipeline = to_string(spec.pipeline);
  row.tile = tile_name(spec.tile);
  row.limit_us = bytes_of(row.shape, row.m) / read_tb_s / 1e6;
  ok(driver.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(out.data()), 0xff, row.m * row.shape.n() * 2, stream));
  prepared.call(0);
  wait();
  row.verified = is_right(row.m, spec.pipeline);
  return prepared;
}

void GpuBench::Impl::measure_few(const Prepared& prepared) {
  Row& row = *prepared.row;
  const unsigned calls = calls_for(sets);
  const Times times = time(calls, prepared.call);
  row.us = times.median, row.us_min = times.min, row.us_max = times.max;
  if (options.three_launches) row.three_launches_us = three_launches_us(row, calls);
  row.cublas_f16_us = cublas_us(row.m);
}

/// Rows with the same operands, all verified, and the same rest.
void GpuBench::Impl::measure_many(const std::vector<Prepared>& group) {
  const Row& any = *group.front().row;
  std::vector<Call> contestants;
  double least_us = 1e300;
  for (const Prepared& prepared : group) {
    contestants.push_back(prepared.call);
    least_us = std::min(least_us, single_us(prepared.call));
  }
  std::vector<Call> gemms = cublas_calls(any.m);
  if (!gemms.empty()) {
    const auto known = cublas_algorithms.find(any.m);
    if (known == cublas_algorithms.end()) {
      // In bursts too: the heuristic's first is not always the fastest.
      for (const Call& gemm : gemms) least_us = std::min(least_us, single_us(gemm));
      const std::vector<Times> times = bursts(gemms, std::max(burst_calls(least_us), 2u), 3);
      const auto best = std::min_element(times.begin(), times.end(),
                                         [](const Times& a, const Times& b) { return a.median < b.median; });
      cublas_algorithms[any.m] = static_cast<std::size_t>(best - times.begin());
    }
    contestants.push_back(gemms[cublas_algorithms[any.m]]);
    least_us = std::min(least_us, single_us(contestants.back()));
  }
  // Up to 256 tokens through all the sets, so that weights come from memory.
  const unsigned calls = std::max(burst_calls(least_us), any.m <= 256 ? sets : 2u);
  const std::vector<Times> times =
      any.interleaved ? interleaved(contestants, calls) : bursts(contestants, calls, options.repetitions);
  for (std::size_t i = 0; i < group.size(); ++i) {
    Row& row = *group[i].row;
    row.us = times[i].median, row.us_min = times[i].min, row.us_max = times[i].max;
    if (contestants.size() == group.size()) continue;
    row.cublas_f16_us = times.back().median;
    row.cublas_us_min = times.back().min, row.cublas_us_max = times.back().max;
  }
}

void GpuBench::measure(std::span<Row> group, std::uint64_t most_m) {
  Impl& b = *impl_;
  b.prepare(group.front().shape, group.front().layout, std::max(most_m, group.front().m));
  std::map<bool, std::vector<Impl::Prepared>> many;  // by whether they are interleaved
  for (Row& row : group) {
    const Impl::Prepared prepared = b.prepare_row(row);
    if (!row.verified) continue;
    if (row.m > kFewTokens) {
      many[row.interleaved].push_back(prepared);
    } else {
      b.measure_few(prepared);
    }
  }
  for (const auto& [interleaved, rows] : many) b.measure_many(rows);
}

}  // namespace qkvbench
