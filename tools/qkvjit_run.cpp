// SPDX-License-Identifier: Apache-2.0
// qkvjit-run: a layer's INT4 query, key and value and its activations in, Q, K and V out, on the GPU, verified against
// the double-precision reference. With no GPU the reference computes the outputs, and the kernel is compiled for a
// named architecture. Exit codes: 0 done, 1 verification failed, 2 bad usage or input, 3 something is missing or
// failed.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iostream>
#include <limits>
#include <optional>
#include <random>

#include "cuda/device_state.h"
#include "qkvjit/qkvjit.h"
#include "qkvjit/safetensors.h"
#include "reference/qkv_reference.h"

namespace {

using namespace qkvjit;

constexpr const char* kExamples =
    R"(The file holds x (F16 [M, K]) and for each of q, k, v: q.qweight (I32, 8 signed 4-bit weights a word) and q.scales
(F16 [K/128, N]); where it also holds q.expected_f32 (F32 [M, N]) the outputs are compared with that.

Examples:
  qkvjit-run tests/data/minilm_layer0.safetensors                   one real layer: compute, verify, time
  qkvjit-run layer.safetensors -o qkv.safetensors                   keep Q, K and V (F16)
  qkvjit-run layer.safetensors --pipeline simple                    with the plain kernel
  qkvjit-run model.safetensors --layer-prefix model.layers.0.self_attn --seed-x 64
                                                                    a checkpoint's layer, random activations
  qkvjit-run layer.safetensors --arch sm_86                         with no GPU: compile for that architecture)";

constexpr std::array kMatrices{"q", "k", "v"};
constexpr int kLaunchesPerBatch = 20;
/// Products that the reference checks at most: some ten seconds of two cores. Beyond it rows are sampled.
constexpr double kVerifyBudget = 2e10;
constexpr std::size_t kBlockRows = 64;  // of the reference, between two lines of progress

struct Arguments {
  std::string input, output, arch, layout = "k8n", pipeline = "auto", tile, prefix;
  int device = 0;
  int repeat = 15;
  std::uint64_t seed_x = 0;
  bool no_verify = false;
};

/// A line on stderr that is overwritten; only where a person watches.
class Progress {
 public:
  ~Progress() { show({}); }
  void show(const std::string& text) const {
    if (terminal_) std::cerr << "\r\x1b[2K" << text << std::flush;
  }

 private:
  bool terminal_ = isatty(STDERR_FILENO) != 0;
};

struct Matrix {
  std::size_t n = 0;
  std::vector<std::uint32_t> words;
  std::vector<std::uint16_t> scales;
  std::vector<float> expected;        // [M, N], or empty
  std::vector<std::uint16_t> output;  // f16 [M, N]
};

struct Layer {
  std::size_t m = 0, k = 0;
  std::vector<std::uint16_t> x;
  std::array<Matrix, 3> matrices;
  WeightLayout layout = WeightLayout::k8n;

  [[nodiscard]] QkvProblem problem() const {
    QkvProblem problem;
    problem.n_q = matrices[0].n;
    problem.n_k = matrices[1].n;
    problem.n_v = matrices[2].n;
    problem.k = k;
    problem.layout = layout;
    return problem;
  }
};

// --- Input --------------------------------------------------------------------------------------------------------

void require(const SafetensorsFile& file, const StoredTensor& tensor, std::initializer_list<const char*> dtypes,
             std::optional<std::vector<std::uint64_t>> shape, const std::string& needs) {
  const bool good_dtype = std::ranges::any_of(dtypes, [&](const char* dtype) { return tensor.dtype == dtype; });
  if (good_dtype && tensor.shape.size() == 2 && (!shape.has_value() || tensor.shape == *shape)) return;
  throw InvalidProblem(fmt::format("'{}': tensor \"{}\": got {} {}, needs {}", file.path(), tensor.name, tensor.dtype,
                                   tensor.shape_text(), needs));
}

/// What this operation cannot express is refused rather than read as something else.
void refuse_zero_points(const SafetensorsFile& file, const std::string& base) {
  for (const char* suffix : {".qzeros", ".g_idx"}) {
    if (file.find(base + suffix) == nullptr) continue;
    throw InvalidProblem(fmt::format(
        "'{}': tensor \"{}{}\" says that the weights have zero points or an order of their own (GPTQ, AWQ); this "
        "operation takes signed 4-bit weights in order, so convert them first (see examples/minilm)",
        file.path(), base, suffix));
  }
}

Matrix read_matrix(const SafetensorsFile& file, const std::string& base, WeightLayout layout, std::size_t& k) {
  const StoredTensor& words = file.at(base + ".qweight");
  refuse_zero_points(file, base);
  const bool k8n = layout == WeightLayout::k8n;
  require(file, words, {"I32", "U32"}, std::nullopt, k8n ? "I32 [K/8, N]" : "I32 [N, K/8]");
  Matrix matrix;
  const std::size_t rows = words.shape[k8n ? 0 : 1];
  matrix.n = words.shape[k8n ? 1 : 0];
  if (k == 0) k = rows * 8;
  if (k != rows * 8) {
    throw InvalidProblem(fmt::format(
        "'{}': tensor \"{}\": got {}, which is K = {} in the layout {}, needs K = {} as x or the matrix before it has; "
        "for the other order of the words give --layout {}",
        file.path(), words.name, words.shape_text(), rows * 8, to_string(layout), k, k8n ? "nk8" : "k8n"));
  }
  const StoredTensor& scales = file.at(base + ".scales");
  require(file, scales, {"F16"}, std::vector<std::uint64_t>{k / 128, matrix.n},
          fmt::format("F16 [K/128, N] = [{}, {}], one scale for 128 k", k / 128, matrix.n));
  matrix.words = words.copy<std::uint32_t>();
  matrix.scales = scales.copy<std::uint16_t>();
  return matrix;
}

Layer read_layer(const Arguments& args) {
  const SafetensorsFile file(args.input);
  Layer layer;
  layer.layout = args.layout == "nk8" ? WeightLayout::nk8 : WeightLayout::k8n;
  if (args.seed_x == 0) {
    const StoredTensor* x = file.find("x");
    if (x == nullptr) {
      throw InvalidProblem(
          fmt::format("'{}' has no tensor \"x\" (F16 [M, K]); for random activations give --seed-x M", args.input));
    }
    require(file, *x, {"F16"}, std::nullopt, "F16 [M, K]");
    if (x->shape[1] == 0) throw InvalidProblem(fmt::format("'{}': tensor \"x\": K is 0", args.input));
    layer.m = x->shape[0];
    layer.k = x->shape[1];
    layer.x = x->copy<std::uint16_t>();
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string dot = args.prefix.empty() || args.prefix.ends_with('.') ? "" : ".";
    const std::string base = args.prefix.empty() ? kMatrices[i] : args.prefix + dot + kMatrices[i] + "_proj";
    layer.matrices[i] = read_matrix(file, base, layer.layout, layer.k);
    const StoredTensor* expected = file.find(base + ".expected_f32");
    if (expected == nullptr || args.seed_x != 0) continue;
    require(file, *expected, {"F32"}, std::vector<std::uint64_t>{layer.m, layer.matrices[i].n}, "F32 [M, N]");
    layer.matrices[i].expected = expected->copy<float>();
  }
  validate(layer.problem());
  if (args.seed_x != 0) {
    layer.m = args.seed_x;
    std::mt19937_64 random(layer.m);
    std::normal_distribution<float> normal;
    layer.x.resize(layer.m * layer.k);
    for (std::uint16_t& value : layer.x) value = float_to_f16(normal(random));
  }
  for (Matrix& matrix : layer.matrices) matrix.output.resize(layer.m * matrix.n);
  return layer;
}

// --- The kernel ---------------------------------------------------------------------------------------------------

Specialization choose(const Arguments& args, const QkvProblem& problem, const DeviceInfo& info, Target target,
                      std::uint64_t m) {
  if (args.tile.empty() && args.pipeline == "auto") return select_specialization(problem, info, target, true, m);
  const std::optional<TileConfig> tile = args.tile.empty() ? std::nullopt : std::optional(parse_tile(args.tile));
  for (const Specialization& spec : candidate_specializations(problem, info, target, true)) {
    if (tile.has_value() && !(spec.tile == *tile)) continue;
    if (args.pipeline != "auto" && args.pipeline != to_string(spec.pipeline)) continue;
    return spec;
  }
  throw InvalidProblem(fmt::format(
      "--tile/--pipeline: got tile '{}', pipeline '{}', and no tile of {} is both; qkvjit-dump --list prints those "
      "there are",
      args.tile, args.pipeline, to_string(target)));
}

qkvref::Arithmetic arithmetic_of(Pipeline pipeline) {
  return is_exact(pipeline) ? qkvref::Arithmetic::exact : qkvref::Arithmetic::rounded;
}

void print_kernel(const CompiledKernel& kernel) {
  fmt::print("kernel     {} {} for {}: {} registers, {} bytes spilled; compiled by NVRTC {} in {:.0f} ms\n",
             to_string(kernel.spec.pipeline), tile_name(kernel.spec.tile), to_string(kernel.spec.target),
             kernel.registers, kernel.spill_bytes, kernel.nvrtc_version, kernel.compile_ms);
}

// --- The GPU ------------------------------------------------------------------------------------------------------

/// Everything on the legacy default stream; the context must be current.
class Gpu {
 public:
  explicit Gpu(const DeviceContext& context) : context_(context), driver_(*context.state()->driver) {
    for (CUevent& event : events_) check(driver_, driver_.cuEventCreate(&event, CU_EVENT_DEFAULT), "cuEventCreate");
  }
  ~Gpu() {
    for (CUevent event : events_) {
      if (event != nullptr) driver_.cuEventDestroy(event);
    }
  }
  Gpu(const Gpu&) = delete;  // owns the events
  Gpu& operator=(const Gpu&) = delete;

  template <typename T>
  TensorView upload(const std::vector<T>& values, DType dtype, std::size_t rows, std::size_t columns) {
    const TensorView view = allocate(dtype, rows, columns);
    if (!values.empty()) {
      check(driver_, driver_.cuMemcpyHtoD(address(view), values.data(), values.size() * sizeof(T)), "cuMemcpyHtoD");
    }
    return view;
  }
  /// An output of NaN patterns, so that an element that is not written shows.
  TensorView output(std::size_t rows, std::size_t columns) {
    const TensorView view = allocate(DType::f16, rows, columns);
    if (rows > 0) check(driver_, driver_.cuMemsetD8(address(view), 0xff, rows * columns * 2), "cuMemsetD8");
    return view;
  }
  void download(const TensorView& view, std::vector<std::uint16_t>& values) {
    if (values.empty()) return;
    check(driver_, driver_.cuMemcpyDtoH(values.data(), address(view), values.size() * 2), "cuMemcpyDtoH");
  }
  void synchronise() { check(driver_, driver_.cuStreamSynchronize(nullptr), "cuStreamSynchronize (the kernel)"); }

  /// Microseconds of one of `launches` back-to-back launches.
  double time(int launches, const std::function<void()>& launch) {
    check(driver_, driver_.cuEventRecord(events_[0], nullptr), "cuEventRecord");
    for (int i = 0; i < launches; ++i) launch();
    check(driver_, driver_.cuEventRecord(events_[1], nullptr), "cuEventRecord");
    check(driver_, driver_.cuEventSynchronize(events_[1]), "cuEventSynchronize");
    float milliseconds = 0;
    check(driver_, driver_.cuEventElapsedTime(&milliseconds, events_[0], events_[1]), "cuEventElapsedTime");
    return 1000.0 * static_cast<double>(milliseconds) / launches;
  }

 private:
  static CUdeviceptr address(const TensorView& view) { return reinterpret_cast<CUdeviceptr>(view.data); }
  TensorView allocate(DType dtype, std::size_t rows, std::size_t columns) {
    buffers_.emplace_back(context_, rows * columns * element_bytes(dtype), nullptr);
    synchronise();  // the copies are not stream-ordered
    return TensorView::matrix(buffers_.back().data(), dtype, static_cast<std::int64_t>(rows),
                              static_cast<std::int64_t>(columns), context_.info().ordinal);
  }

  DeviceContext context_;
  const DriverTable& driver_;
  std::vector<DeviceBuffer> buffers_;
  std::array<CUevent, 2> events_{};
};

QkvTensors upload(Gpu& gpu, const Layer& layer) {
  QkvTensors tensors;
  tensors.x = gpu.upload(layer.x, DType::f16, layer.m, layer.k);
  const std::array words{&tensors.w_q_packed, &tensors.w_k_packed, &tensors.w_v_packed};
  const std::array scales{&tensors.scales_q, &tensors.scales_k, &tensors.scales_v};
  const std::array outputs{&tensors.q, &tensors.k, &tensors.v};
  for (std::size_t i = 0; i < 3; ++i) {
    const Matrix& matrix = layer.matrices[i];
    const bool k8n = layer.layout == WeightLayout::k8n;
    *words[i] = gpu.upload(matrix.words, DType::u32, k8n ? layer.k / 8 : matrix.n, k8n ? matrix.n : layer.k / 8);
    *scales[i] = gpu.upload(matrix.scales, DType::f16, layer.k / 128, matrix.n);
    *outputs[i] = gpu.output(layer.m, matrix.n);
  }
  return tensors;
}

/// Fills the layer's outputs; returns the kernel's specialisation.
Specialization run_on_gpu(const Arguments& args, const DeviceContext& context, Layer& layer, const Progress& progress) {
  const DeviceInfo& info = context.info();
  fmt::print("device     {}: {}, sm_{}\n", info.ordinal, info.name, info.sm());
  KernelCache cache;
  const Target target = args.arch.empty() ? cache.target_for(info) : parse_target(args.arch);
  if (target.sm > info.sm() || (target.suffix != '\0' && target.sm != info.sm())) {
    throw InvalidProblem(fmt::format("--arch: got {}, whose code does not run on {} (sm_{}); leave it out",
                                     to_string(target), info.name, info.sm()));
  }
  const ContextScope scope(*context.state());
  Gpu gpu(context);
  progress.show("copying to the GPU ...");
  const QkvTensors tensors = upload(gpu, layer);
  progress.show("compiling ...");
  const bool chosen = args.pipeline != "auto" || !args.tile.empty() || !args.arch.empty();
  // The plan also binds the row for operands that are not aligned; a chosen kernel is launched on its own.
  std::optional<QkvPlan> plan;
  if (!chosen) plan.emplace(cache, context, layer.problem(), PlanOptions{.binding = Binding::lazy});
  const Specialization spec = chosen ? choose(args, layer.problem(), info, target, layer.m) : plan->row(layer.m);
  const std::shared_ptr<const Kernel> kernel = cache.get(context, spec);
  const auto launch = [&] {
    if (plan.has_value()) {
      (*plan)(tensors, nullptr);
    } else {
      launch_kernel(*kernel, context, tensors, nullptr);
    }
  };
  progress.show({});
  print_kernel(kernel->compiled());

  launch();
  gpu.synchronise();
  const std::array outputs{&tensors.q, &tensors.k, &tensors.v};
  for (std::size_t i = 0; i < 3; ++i) gpu.download(*outputs[i], layer.matrices[i].output);
  if (layer.m == 0 || args.repeat == 0) return spec;
  std::vector<double> times;
  for (int i = 0; i < args.repeat; ++i) {
    progress.show(fmt::format("timing {} of {} ...", i + 1, args.repeat));
    times.push_back(gpu.time(kLaunchesPerBatch, launch));
  }
  progress.show({});
  std::ranges::sort(times);
  fmt::print("time       {:.2f} us a launch, the median of {} batches of {} back to back ({:.2f} to {:.2f} us)\n",
             times[times.size() / 2], times.size(), kLaunchesPerBatch, times.front(), times.back());
  return spec;
}

// --- The reference ------------------------------------------------------------------------------------------------

/// Calls visit(row, elements of that row) for each of `rows`.
template <typename Visit>
void for_each_reference_row(const Layer& layer, std::size_t index, qkvref::Arithmetic arithmetic,
                            const std::vector<std::size_t>& rows, const Progress& progress, const Visit& visit) {
  const Matrix& matrix = layer.matrices[index];
  const qkvref::Matrix4 weights{matrix.words.data(), matrix.scales.data(), matrix.n, layer.layout == WeightLayout::nk8};
  for (std::size_t first = 0; first < rows.size(); first += kBlockRows) {
    progress.show(fmt::format("reference: {}, row {} of {} ...", kMatrices[index], first, rows.size()));
    const std::size_t count = std::min(kBlockRows, rows.size() - first);
    std::vector<std::uint16_t> x(count * layer.k);
    for (std::size_t i = 0; i < count; ++i) {
      std::copy_n(layer.x.begin() + static_cast<std::ptrdiff_t>(rows[first + i] * layer.k), layer.k,
                  x.begin() + static_cast<std::ptrdiff_t>(i * layer.k));
    }
    const auto elements = qkvref::project(x.data(), count, weights, layer.k, 128, arithmetic);
    for (std::size_t i = 0; i < count; ++i) visit(rows[first + i], elements.data() + i * matrix.n);
  }
  progress.show({});
}

/// All rows, or as many as the budget allows, evenly spread, the first and the last among them.
std::vector<std::size_t> sampled_rows(const Layer& layer, double budget) {
  const double row_cost = static_cast<double>(layer.k) *
                          static_cast<double>(layer.problem().n_q + layer.problem().n_k + layer.problem().n_v);
  const auto count = std::min(layer.m, static_cast<std::size_t>(std::max(16.0, std::min(1e9, budget / row_cost))));
  std::vector<std::size_t> rows;
  for (std::size_t i = 0; i < count; ++i) rows.push_back(count == 1 ? 0 : i * (layer.m - 1) / (count - 1));
  return rows;
}

struct Verdict {
  bool good = true;
  std::array<std::optional<qkvref::ErrorStatistics>, 3> statistics;
  std::size_t rows = 0;
};

Verdict verify(const Layer& layer, qkvref::Arithmetic arithmetic, const Progress& progress) {
  Verdict verdict;
  const std::vector<std::size_t> rows = sampled_rows(layer, kVerifyBudget);
  verdict.rows = rows.size();
  for (std::size_t i = 0; i < 3; ++i) {
    const Matrix& matrix = layer.matrices[i];
    qkvref::ErrorStatistics statistics;
    for_each_reference_row(layer, i, arithmetic, rows, progress, [&](std::size_t row, const qkvref::Element* want) {
      for (std::size_t column = 0; column < matrix.n; ++column) {
        const std::uint16_t got = matrix.output[row * matrix.n + column];
        if (!qkvref::accept(got, want[column]) && statistics.rejected == 0) {
          std::cerr << fmt::format("qkvjit-run: {}[{}, {}]: got {}, needs {} within {:.3g}\n", kMatrices[i], row,
                                   column, qkvref::f16_to_double(got), want[column].want, want[column].tolerance);
        }
        statistics.add(got, want[column]);
      }
    });
    verdict.good = verdict.good && statistics.rejected == 0;
    verdict.statistics[i] = statistics;
  }
  return verdict;
}

void compute_on_cpu(Layer& layer, qkvref::Arithmetic arithmetic, const Progress& progress) {
  const std::vector<std::size_t> rows = sampled_rows(layer, std::numeric_limits<double>::infinity());
  for (std::size_t i = 0; i < 3; ++i) {
    Matrix& matrix = layer.matrices[i];
    for_each_reference_row(layer, i, arithmetic, rows, progress, [&](std::size_t row, const qkvref::Element* want) {
      for (std::size_t column = 0; column < matrix.n; ++column) {
        matrix.output[row * matrix.n + column] = qkvref::double_to_f16(want[column].want);
      }
    });
  }
}

// --- Output -------------------------------------------------------------------------------------------------------

/// "0.1102   0.99400", or dashes where the file has nothing to compare with.
std::string against_f32(const Matrix& matrix) {
  if (matrix.expected.empty()) return fmt::format("{:>10}  {:>9}", "-", "-");
  double error = 0, want_squares = 0, got_squares = 0, products = 0;
  for (std::size_t i = 0; i < matrix.expected.size(); ++i) {
    const double got = qkvref::f16_to_double(matrix.output[i]), want = static_cast<double>(matrix.expected[i]);
    error += (got - want) * (got - want);
    want_squares += want * want;
    got_squares += got * got;
    products += got * want;
  }
  return fmt::format("{:>10.4f}  {:>9.5f}", std::sqrt(error / want_squares),
                     products / std::sqrt(want_squares * got_squares));
}

void print_accuracy(const Layer& layer, const Verdict* verdict) {
  const bool any_f32 =
      std::ranges::any_of(layer.matrices, [](const Matrix& matrix) { return !matrix.expected.empty(); });
  if (verdict == nullptr && !any_f32) return;
  const auto line = [&](std::string_view name, const std::string& reference, const std::string& f32) {
    fmt::print("{:<8}{}{}\n", name, verdict != nullptr ? reference : "", any_f32 ? f32 : "");
  };
  fmt::print("\n");
  line("", fmt::format("  {:-^62}", " against the reference "), fmt::format("   {:-^21}", " INT4 against f32 "));
  line("output",
       fmt::format("  {:>14}  {:>8}  {:>9}  {:>9}  {:>14}", "rows checked", "wrong", "max/bound", "rms ratio",
                   "mean error"),
       fmt::format("   {:>10}  {:>9}", "rel. error", "cosine"));
  for (std::size_t i = 0; i < 3; ++i) {
    std::string reference;
    if (verdict != nullptr) {
      const qkvref::ErrorStatistics& s = *verdict->statistics[i];
      reference = fmt::format("  {:>14}  {:>8}  {:>9.4f}  {:>9.4f}  {:>+14.2e}",
                              fmt::format("{} of {}", verdict->rows, layer.m), s.rejected, s.worst_ratio, s.rms_ratio(),
                              s.mean_signed_error());
    }
    line(kMatrices[i], reference, "   " + against_f32(layer.matrices[i]));
  }
  fmt::print("\n");
}

void write_output(const Arguments& args, const Layer& layer, const std::string& computed_by) {
  if (args.output.empty()) return;
  std::vector<StoredTensor> tensors;
  for (std::size_t i = 0; i < 3; ++i) {
    const Matrix& matrix = layer.matrices[i];
    tensors.push_back({kMatrices[i], "F16", {layer.m, matrix.n}, std::as_bytes(std::span(matrix.output))});
  }
  write_safetensors(args.output, tensors,
                    {{"made_by", fmt::format("qkvjit-run {}", version())}, {"computed_by", computed_by}});
  fmt::print("output     {}: q, k, v\n", args.output);
}

int run_without_gpu(const Arguments& args, Layer& layer, const std::string& reason, const Progress& progress) {
  fmt::print("device     no GPU was used, and the numbers below are the CPU reference's: {}\n", reason);
  const Target target = parse_target(args.arch.empty() ? "sm_90" : args.arch);
  const Specialization spec = choose(args, layer.problem(), typical_device(target.sm), target, layer.m);
  compute_on_cpu(layer, arithmetic_of(spec.pipeline), progress);
  write_output(args, layer, "the CPU reference");
  print_accuracy(layer, nullptr);
  progress.show("compiling ...");
  KernelCache cache;
  const auto kernel = cache.compile(spec);
  progress.show({});
  print_kernel(*kernel);
  return 0;
}

/// What can be known to be wrong before long work is begun.
void check_arguments(const Arguments& args) {
  if (!args.tile.empty()) parse_tile(args.tile);
  if (!args.arch.empty()) {
    try {
      typical_device(parse_target(args.arch).sm);
    } catch (const Error& error) {
      throw InvalidProblem(fmt::format("--arch: {}", error.what()));
    }
  }
  const std::filesystem::path folder = std::filesystem::path(args.output).parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder)) {
    throw InvalidProblem(fmt::format("-o: the folder '{}' does not exist; make it first", folder.string()));
  }
}

int run(const Arguments& args) {
  check_arguments(args);
  const Progress progress;
  progress.show("reading ...");
  Layer layer = read_layer(args);
  progress.show({});
  fmt::print("input      {}: x [{}, {}], N = {} + {} + {}, {}\n", args.input, layer.m, layer.k, layer.matrices[0].n,
             layer.matrices[1].n, layer.matrices[2].n, to_string(layer.layout));
  std::optional<DeviceContext> context;
  try {
    context.emplace(args.device);
  } catch (const LibraryUnavailable& error) {
    return run_without_gpu(args, layer, error.what(), progress);
  }
  const Specialization spec = run_on_gpu(args, *context, layer, progress);
  write_output(args, layer, context->info().name);
  if (args.no_verify) {
    print_accuracy(layer, nullptr);
    fmt::print("not verified\n");
    return 0;
  }
  const Verdict verdict = verify(layer, arithmetic_of(spec.pipeline), progress);
  print_accuracy(layer, &verdict);
  fmt::print("{}\n", verdict.good
                         ? "verified: every checked element is within the bound of the double-precision reference"
                         : "VERIFICATION FAILED: see the table and the elements named on stderr");
  return verdict.good ? 0 : 1;
}

int parse_and_run(int argc, char** argv) {
  Arguments args;
  CLI::App app(
      "Projects activations through a layer's INT4 query, key and value, in one launch, and verifies the result.",
      "qkvjit-run");
  app.footer(kExamples);
  app.set_version_flag("--version", fmt::format("qkvjit-run {}", version()));
  app.add_option("input", args.input, "safetensors file")->required();
  app.add_option("-o,--output", args.output, "safetensors file to write: q, k, v");
  app.add_option("--layer-prefix", args.prefix, "read PREFIX.q_proj.qweight and so on instead of q.qweight");
  app.add_option("--layout", args.layout, "order of the weight words: k8n [K/8, N] or nk8 [N, K/8]")
      ->check(CLI::IsMember({"k8n", "nk8"}))
      ->capture_default_str();
  app.add_option("--seed-x", args.seed_x, "M rows of random x instead of the file's")->check(CLI::Range(1u, 1u << 24));
  app.add_option("--device", args.device, "CUDA device ordinal")->check(CLI::Range(0, 1023))->capture_default_str();
  app.add_option("--arch", args.arch,
                 "architecture to compile for, such as sm_86 (default: the GPU's; with none sm_90)");
  app.add_option("--pipeline", args.pipeline, "kernel family")
      ->check(CLI::IsMember({"auto", "simple", "gemv", "decode", "mma_sync"}))
      ->capture_default_str();
  app.add_option("--tile", args.tile, "a tile by its name (qkvjit-dump --list prints them)");
  app.add_option("--repeat", args.repeat, "batches of launches to time; 0 times nothing")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  app.add_flag("--no-verify", args.no_verify, "do not compare with the reference");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return run(args);
}

}  // namespace

int main(int argc, char** argv) {
  const auto fail = [](const std::exception& error, int code) {
    std::cout.flush();
    std::cerr << "qkvjit-run: " << error.what() << '\n';
    return code;
  };
  try {
    return parse_and_run(argc, argv);
  } catch (const qkvjit::InvalidProblem& error) {
    return fail(error, 2);
  } catch (const std::exception& error) {  // a missing library, a device that cannot do it, a failed call, no memory
    return fail(error, 3);
  }
}
