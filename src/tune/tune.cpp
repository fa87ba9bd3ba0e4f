// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/tune.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "compile/kernel_templates.h"
#include "cuda/device_state.h"
#include "qkvjit/error.h"
#include "qkvjit/prepack.h"
#include "qkvjit/qkv_plan.h"
#include "qkvjit/qkvjit.h"

namespace qkvjit {
namespace {

constexpr std::uint64_t kFewTokens = 64;       // up to here a launch is limited by memory, beyond by power
constexpr double kBatchUs = 2000;              // what a timed replay should take, more or less
constexpr unsigned kMostCalls = 256;           // launches in a graph
constexpr double kNoMatch = 3, kSlackUs = 20;  // alone: slower than that is dropped; the slack is what launching costs
constexpr double kBehind = 1.25;               // after the first replay: slower than that is dropped
constexpr double kTie = 1.01;

std::size_t round_to_256(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

std::array<std::uint64_t, 3> columns_of(const QkvProblem& p) { return {p.n_q, p.n_k, p.n_v}; }

/// The operands of one problem in one piece of memory: x, the outputs, then sets of weights and scales.
struct Layout {
  QkvProblem problem;
  std::uint64_t max_m = 0;
  std::array<std::size_t, 3> weight_bytes{}, scale_bytes{}, output_bytes{};
  std::size_t x_bytes = 0, set_bytes = 0, total_bytes = 0;
  unsigned sets = 0;

  Layout(const QkvProblem& wanted, const DeviceInfo& info, std::uint64_t most_tokens)
      : problem(wanted), max_m(most_tokens) {
    validate(problem);
    const auto ns = columns_of(problem);
    const std::size_t element = element_bytes(problem.activation_dtype);
    x_bytes = round_to_256(max_m * problem.k * element);
    total_bytes = x_bytes;
    for (std::size_t i = 0; i < 3; ++i) {
      const bool packed = problem.layout == WeightLayout::prepacked;
      weight_bytes[i] =
          round_to_256(packed ? (problem.k + kPackedK - 1) / kPackedK * ((ns[i] + kPackedN - 1) / kPackedN) * 2048
                              : problem.k / 2 * ns[i]);
      scale_bytes[i] = round_to_256(problem.k / problem.group_size * ns[i] * element_bytes(problem.scale_dtype));
      output_bytes[i] = round_to_256(max_m * ns[i] * element);
      set_bytes += weight_bytes[i] + scale_bytes[i];
      total_bytes += output_bytes[i];
    }
    sets = static_cast<unsigned>(std::clamp<std::size_t>(4 * info.l2_bytes / set_bytes + 1, 2, kMostCalls));
    total_bytes += sets * set_bytes;
  }

  [[nodiscard]] QkvTensors tensors(char* base, int ordinal, unsigned set, std::uint64_t m) const {
    const auto rows = static_cast<std::int64_t>(m), k = static_cast<std::int64_t>(problem.k);
    QkvTensors t;
    t.x = TensorView::matrix(base, problem.activation_dtype, rows, k, ordinal);
    TensorView* const w[] = {&t.w_q_packed, &t.w_k_packed, &t.w_v_packed};
    TensorView* const s[] = {&t.scales_q, &t.scales_k, &t.scales_v};
    TensorView* const o[] = {&t.q, &t.k, &t.v};
    char* output = base + x_bytes;
    char* at = output + output_bytes[0] + output_bytes[1] + output_bytes[2] + set * set_bytes;
    for (std::size_t i = 0; i < 3; ++i) {
      const auto n = static_cast<std::int64_t>(columns_of(problem)[i]);
      switch (problem.layout) {
        case WeightLayout::k8n:
          *w[i] = TensorView::matrix(at, DType::u32, k / 8, n, ordinal);
          break;
        case WeightLayout::nk8:
          *w[i] = TensorView::matrix(at, DType::u32, n, k / 8, ordinal);
          break;
        case WeightLayout::prepacked:
          *w[i] = TensorView::matrix(at, DType::u32, (k + kPackedK - 1) / kPackedK,
                                     (n + kPackedN - 1) / kPackedN * kPackedBlockWords, ordinal);
          break;
      }
      at += weight_bytes[i];
      *s[i] =
          TensorView::matrix(at, problem.scale_dtype, k / static_cast<std::int64_t>(problem.group_size), n, ordinal);
      at += scale_bytes[i];
      *o[i] = TensorView::matrix(output, problem.activation_dtype, rows, n, ordinal);
      output += output_bytes[i];
    }
    return t;
  }
};

/// Tokens to tune for: ascending, none twice.
std::vector<std::uint64_t> sweep_of(const TuneOptions& options) {
  std::vector<std::uint64_t> ms = options.ms.empty() ? default_tuning_sweep() : options.ms;
  std::sort(ms.begin(), ms.end());
  ms.erase(std::unique(ms.begin(), ms.end()), ms.end());
  constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 24;
  if (ms.front() == 0 || ms.back() > kMostTokens) {
    throw InvalidProblem(
        fmt::format("tune: ms: got {}, needs token counts from 1 to {}", ms.front() == 0 ? 0 : ms.back(), kMostTokens));
  }
  return ms;
}

/// A stream and two events of our own; what a graph needs around it.
class Timer {
 public:
  explicit Timer(const DriverTable& driver) : driver_(driver) {
    try {
      check(driver_, driver_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      check(driver_, driver_.cuEventCreate(&begin_, CU_EVENT_DEFAULT), "cuEventCreate");
      check(driver_, driver_.cuEventCreate(&end_, CU_EVENT_DEFAULT), "cuEventCreate");
    } catch (...) {
      release();
      throw;
    }
  }
  ~Timer() { release(); }
  Timer(const Timer&) = delete;  // owns a stream and events
  Timer& operator=(const Timer&) = delete;

  [[nodiscard]] CUstream stream() const noexcept { return stream_; }
  void wait() const { check(driver_, driver_.cuStreamSynchronize(stream_), "cuStreamSynchronize"); }

  /// Microseconds that the GPU takes for what `work` queues.
  template <typename Work>
  double time_us(const Work& work) const {
    check(driver_, driver_.cuEventRecord(begin_, stream_), "cuEventRecord");
    work();
    check(driver_, driver_.cuEventRecord(end_, stream_), "cuEventRecord");
    check(driver_, driver_.cuEventSynchronize(end_), "cuEventSynchronize");
    float ms = 0;
    check(driver_, driver_.cuEventElapsedTime(&ms, begin_, end_), "cuEventElapsedTime");
    return double{ms} * 1000;
  }

 private:
  void release() noexcept {
    if (begin_ != nullptr) driver_.cuEventDestroy(begin_);
    if (end_ != nullptr) driver_.cuEventDestroy(end_);
    if (stream_ != nullptr) driver_.cuStreamDestroy(stream_);
  }

  const DriverTable& driver_;
  CUstream stream_ = nullptr;
  CUevent begin_ = nullptr, end_ = nullptr;
};

/// A captured sequence of launches, ready to replay.
class Graph {
 public:
  template <typename Work>
  Graph(const DriverTable& driver, CUstream stream, const Work& work) : driver_(&driver) {
    CUgraph graph = nullptr;
    check(driver, driver.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
    try {
      work();
    } catch (...) {
      driver.cuStreamEndCapture(stream, &graph);
      if (graph != nullptr) driver.cuGraphDestroy(graph);
      throw;
    }
    check(driver, driver.cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
    const CUresult code = driver.cuGraphInstantiate(&exec_, graph, 0);
    driver.cuGraphDestroy(graph);
    check(driver, code, "cuGraphInstantiate");
  }
  ~Graph() {
    if (exec_ != nullptr) driver_->cuGraphExecDestroy(exec_);
  }
  Graph(Graph&& other) noexcept : driver_(other.driver_), exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(exec_, other.exec_);
    return *this;
  }

  void launch(CUstream stream) const { check(*driver_, driver_->cuGraphLaunch(exec_, stream), "cuGraphLaunch"); }

 private:
  const DriverTable* driver_;
  CUgraphExec exec_ = nullptr;
};

/// One candidate while it is in the race.
struct Runner {
  SelectedRow candidate;
  std::shared_ptr<const Kernel> kernel;
  double alone_us = 0;
  std::vector<Graph> graph;  ///< one, or none
  unsigned calls = 0;
  std::vector<double> batches{};
};

class Tuner {
 public:
  Tuner(KernelCache& cache, const DeviceContext& context, const Layout& layout, const TuneOptions& options)
      : cache_(cache),
        context_(context),
        layout_(layout),
        options_(options),
        driver_(*context.state()->driver),
        timer_(driver_) {
    if (options.memory == nullptr) {
      buffer_ = DeviceBuffer(context, layout.total_bytes, timer_.stream());
      base_ = static_cast<char*>(buffer_.data());
    } else {
      base_ = static_cast<char*>(options.memory);
    }
    fill();
  }
  ~Tuner() {
    // The buffer is freed on the timer's stream, which must have passed and still be there.
    driver_.cuStreamSynchronize(timer_.stream());
  }
  Tuner(const Tuner&) = delete;  // owns the stream of its buffer
  Tuner& operator=(const Tuner&) = delete;

  std::vector<TunedTimes> race(std::uint64_t m, bool weights_are_constant);

 private:
  void fill() const;
  void launch(const Runner& runner, unsigned call, std::uint64_t m) const {
    launch_kernel(*runner.kernel, context_, layout_.tensors(base_, context_.info().ordinal, call % layout_.sets, m),
                  timer_.stream(), runner.candidate.dependent_launch);
  }
  void rest() const {
    if (options_.rest_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(options_.rest_ms));
  }
  double replay_us(const Runner& runner, bool burst) const;

  KernelCache& cache_;
  const DeviceContext& context_;
  const Layout& layout_;
  const TuneOptions& options_;
  const DriverTable& driver_;
  Timer timer_;
  DeviceBuffer buffer_;
  char* base_ = nullptr;
};

/// Random operands, never zeros: power and so clocks depend on the bits. All sets are copies of the first.
void Tuner::fill() const {
  std::mt19937 random(20261201);
  constexpr std::size_t kPool = std::size_t{1} << 20;
  std::vector<std::uint32_t> words(kPool);
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random());
  // Pairs of 16-bit numbers, f16 or bf16 alike, of either sign and a few powers of two around 2^-6 (bf16: 2^-1).
  std::vector<std::uint32_t> numbers(kPool);
  const bool wide = layout_.problem.activation_dtype == DType::bf16;
  for (std::uint32_t& pair : numbers) {
    const auto bits = static_cast<std::uint32_t>(random());
    pair = wide ? (bits & 0x80ff80ffu) | 0x3f003f00u : (bits & 0x8fff8fffu) | 0x20002000u;
  }
  const auto upload = [&](char* to, const std::vector<std::uint32_t>& from, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += kPool * 4) {
      check(driver_,
            driver_.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to + at), from.data(),
                                      std::min(bytes - at, kPool * 4), timer_.stream()),
            "cuMemcpyHtoDAsync");
    }
  };
  const QkvTensors first = layout_.tensors(base_, context_.info().ordinal, 0, layout_.max_m);
  upload(base_, numbers, layout_.x_bytes);
  const TensorView* const w[] = {&first.w_q_packed, &first.w_k_packed, &first.w_v_packed};
  const TensorView* const s[] = {&first.scales_q, &first.scales_k, &first.scales_v};
  for (std::size_t i = 0; i < 3; ++i) {
    upload(static_cast<char*>(w[i]->data), words, layout_.weight_bytes[i]);
    upload(static_cast<char*>(s[i]->data), numbers, layout_.scale_bytes[i]);
  }
  const auto from = reinterpret_cast<CUdeviceptr>(first.w_q_packed.data);
  for (unsigned set = 1; set < layout_.sets; ++set) {
    check(driver_, driver_.cuMemcpyDtoDAsync(from + set * layout_.set_bytes, from, layout_.set_bytes, timer_.stream()),
          "cuMemcpyDtoDAsync");
  }
  timer_.wait();
}

double Tuner::replay_us(const Runner& runner, bool burst) const {
  if (burst) {
    rest();
    runner.graph.front().launch(timer_.stream());
    timer_.wait();
    rest();
  }
  return timer_.time_us([&] { runner.graph.front().launch(timer_.stream()); }) / runner.calls;
}

std::vector<TunedTimes> Tuner::race(std::uint64_t m, bool weights_are_constant) {
  const DeviceInfo& info = context_.info();
  const auto candidates =
      candidate_specializations(layout_.problem, info, cache_.target_for(info), true, m, weights_are_constant);
  std::vector<Specialization> specs;
  specs.reserve(candidates.size());
  for (const SelectedRow& candidate : candidates) specs.push_back(candidate.spec);
  auto kernels = cache_.get_all(context_, specs);
  std::vector<Runner> runners;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    runners.push_back({.candidate = candidates[i], .kernel = std::move(kernels[i]), .graph = {}});
  }

  if (runners.empty()) {
    throw InvalidProblem(fmt::format("tune: ms: got {}, for which every tile needs more blocks than a grid has", m));
  }

  // Alone, once cold and once timed: tiles for few tokens take many times as long here, and no graph of theirs is made.
  for (Runner& runner : runners) {
    launch(runner, 0, m);
    runner.alone_us = timer_.time_us([&] { launch(runner, 1, m); });
  }
  const auto drop = [&](double limit, auto&& time_of) {
    std::erase_if(runners, [&](const Runner& runner) { return time_of(runner) > limit; });
  };
  const auto least = [&](auto&& time_of) {
    double best = time_of(runners.front());
    for (const Runner& runner : runners) best = std::min(best, time_of(runner));
    return best;
  };
  const auto alone = [](const Runner& runner) { return runner.alone_us; };
  drop(least(alone) * kNoMatch + kSlackUs, alone);

  // As many launches for all. With few tokens each goes through all sets; with many, x and outputs alone fill the
  // cache.
  const bool burst = m > kFewTokens;
  const double wanted = kBatchUs / std::max(least(alone), 1.0);
  const auto calls = static_cast<unsigned>(std::clamp<double>(wanted, burst ? 2 : layout_.sets, kMostCalls));
  for (Runner& runner : runners) {
    runner.calls = calls;
    runner.graph.emplace_back(driver_, timer_.stream(), [&] {
      for (unsigned call = 0; call < calls; ++call) launch(runner, call, m);
    });
    runner.graph.front().launch(timer_.stream());
    timer_.wait();
    runner.batches.push_back(replay_us(runner, burst));
  }
  const auto first = [](const Runner& runner) { return runner.batches.front(); };
  drop(least(first) * kBehind, first);

  for (Runner& runner : runners) runner.batches.clear();
  std::mt19937 random(static_cast<unsigned>(m));
  std::vector<std::size_t> order(runners.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (unsigned batch = 0; batch < std::max(options_.batches, 1u); ++batch) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      if (!burst) runners[i].graph.front().launch(timer_.stream());  // the one before has left the cache to itself
      runners[i].batches.push_back(replay_us(runners[i], burst));
    }
  }
  std::vector<TunedTimes> times;
  for (Runner& runner : runners) {
    std::sort(runner.batches.begin(), runner.batches.end());
    times.push_back(
        {runner.candidate, runner.batches[runner.batches.size() / 2], runner.batches.front(), runner.batches.back()});
  }
  return times;
}

void check_lent_memory(const Layout& layout, const TuneOptions& options) {
  if (options.memory == nullptr) return;
  if (reinterpret_cast<std::uintptr_t>(options.memory) % 16 != 0) {
    throw InvalidProblem("tune: memory: got an address that is no multiple of 16, needs one (cuMemAlloc gives it)");
  }
  if (options.memory_bytes < layout.total_bytes) {
    throw InvalidProblem(
        fmt::format("tune: memory: got {} bytes, needs {} (tune_memory_bytes()); lend more, or tune "
                    "for fewer tokens",
                    options.memory_bytes, layout.total_bytes));
  }
}

}  // namespace

const std::vector<std::uint64_t>& default_tuning_sweep() {
  static const std::vector<std::uint64_t> kSweep{1,   2,   4,   8,   16,  24,   32,   48,   64,   96,  128,
                                                 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192};
  return kSweep;
}

std::size_t tune_memory_bytes(const QkvProblem& problem, const DeviceInfo& info, const TuneOptions& options) {
  return Layout(problem, info, sweep_of(options).back()).total_bytes;
}

std::size_t tuning_winner(std::span<const TunedTimes> times) {
  const auto best = std::min_element(
      times.begin(), times.end(), [](const TunedTimes& a, const TunedTimes& b) { return a.median_us < b.median_us; });
  const auto as_good = [&](const TunedTimes& other) {
    return other.median_us <= best->median_us * kTie ||
           (other.min_us <= best->median_us && other.median_us <= best->max_us);
  };
  return static_cast<std::size_t>(std::find_if(times.begin(), times.end(), as_good) - times.begin());
}

TuningTable tune(KernelCache& cache, const DeviceContext& context, const QkvProblem& problem,
                 const TuneOptions& options) {
  const std::vector<std::uint64_t> ms = sweep_of(options);
  const Layout layout(problem, context.info(), ms.back());
  check_lent_memory(layout, options);
  TuningTable table(hardware_of(context.info(), cache.target_for(context.info())), std::string(templates_digest()));
  const ContextScope scope(*context.state());
  Tuner tuner(cache, context, layout, options);
  for (const std::uint64_t m : ms) {
    for (const bool promise : {false, true}) {
      if (options.weights_are_constant.value_or(promise) != promise) continue;
      const std::vector<TunedTimes> times = tuner.race(m, promise);
      const std::size_t winner = tuning_winner(times);
      const TunedTimes& best = times[winner];
      table.set({.problem = problem,
                 .aligned = best.candidate.spec.aligned,
                 .weights_are_constant = promise,
                 .max_m = m,
                 .pipeline = best.candidate.spec.pipeline,
                 .tile = best.candidate.spec.tile,
                 .dependent_launch = best.candidate.dependent_launch,
                 .median_us = best.median_us,
                 .min_us = best.min_us,
                 .max_us = best.max_us});
      if (options.progress && !options.progress({m, promise, times, winner})) return table;
    }
  }
  return table;
}

}  // namespace qkvjit
