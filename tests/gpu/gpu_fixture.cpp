// SPDX-License-Identifier: Apache-2.0
#include "gpu/gpu_fixture.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <thread>
#include <type_traits>
#include <utility>

#include "compile/kernel_templates.h"
#include "qkvjit/select.h"
#include "reference/qkv_reference.h"
#include "support/packed_reference.h"

namespace qkvtest {

using qkvjit::ContextScope;
using qkvjit::DType;
using qkvjit::Pipeline;
using qkvjit::TensorView;

// The record of the run.

namespace {

/// Errors of one pipeline and layout over the whole run. Sums of squares are relative to each comparison's scale.
struct Accuracy {
  double max_ratio = 0;      ///< |got - want| / bound
  double max_rms_ratio = 0;  ///< of one comparison of random data with K <= 512: rms / rms of rounding alone
  double sum = 0;            ///< of (got - want) / bound
  double sum_of_squares = 0;
  std::uint64_t elements = 0;
  std::uint64_t comparisons = 0;
};

struct SuiteCounts {
  int passed = 0;
  int failed = 0;
  std::vector<std::string> failed_names;
  std::vector<std::string> skipped;  ///< "name: reason"
};

struct Record {
  std::map<std::string, SuiteCounts> suites;
  std::map<std::pair<Pipeline, WeightLayout>, Accuracy> accuracy;
  std::string suite;
  std::string test_case;
};

Record& record() {
  static Record instance;
  return instance;
}

bool load_from_ptx() {
  const char* value = std::getenv("QKVJIT_TEST_LOAD");
  return value != nullptr && std::strcmp(value, "ptx") == 0;
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      json += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      json += c;
    }
  }
  return json + "\"";
}

std::string quoted_list(const std::vector<std::string>& texts) {
  std::string json = "[";
  for (const std::string& text : texts) json += (json.size() > 1 ? ", " : "") + quoted(text);
  return json + "]";
}

double mean_error(const Accuracy& a) { return a.elements == 0 ? 0 : a.sum / static_cast<double>(a.elements); }
double rms_error(const Accuracy& a) {
  return a.elements == 0 ? 0 : std::sqrt(a.sum_of_squares / static_cast<double>(a.elements));
}

void print_record() {
  if (!record().accuracy.empty()) {
    std::printf("%-10s %-5s %12s %14s %10s %12s %12s %16s\n", "pipeline", "layout", "comparisons", "elements",
                "max/bound", "rms/bound", "mean/bound", "rms/rounding");
    for (const auto& [key, a] : record().accuracy) {
      std::printf("%-10s %-5s %12llu %14llu %10.4f %12.5f %+12.2e %16.4f\n", to_string(key.first),
                  to_string(key.second), static_cast<unsigned long long>(a.comparisons),
                  static_cast<unsigned long long>(a.elements), a.max_ratio, rms_error(a), mean_error(a),
                  a.max_rms_ratio);
    }
  }
  for (const auto& [name, counts] : record().suites) {
    std::printf("suite %s: %d passed, %d failed, %zu skipped\n", name.c_str(), counts.passed, counts.failed,
                counts.skipped.size());
    for (const std::string& skipped : counts.skipped) std::printf("  skipped %s\n", skipped.c_str());
  }
}

void write_report(const char* path) {
  std::string json = "{\n";
  const qkvjit::DeviceInfo& info = gpu().context.info();
  json += fmt::format("  \"templates_digest\": {},\n", quoted(std::string(qkvjit::templates_digest())));
  json += fmt::format("  \"version\": {},\n  \"gpu\": {},\n  \"sm\": {},\n  \"driver_version\": {},\n",
                      quoted(qkvjit::version()), quoted(info.name), info.sm(), info.driver_version);
  json += fmt::format("  \"target\": {},\n  \"load\": {},\n", quoted(qkvjit::to_string(gpu().cache.target_for(info))),
                      quoted(load_from_ptx() ? "ptx" : "cubin"));
  json += "  \"second_gpu\": \"a second context on the same GPU; the host suites model two GPUs\",\n  \"suites\": [";
  const char* separator = "\n";
  for (const auto& [name, counts] : record().suites) {
    json += fmt::format(
        "{}    {{\"suite\": {}, \"passed\": {}, \"failed\": {}, \"skipped\": {}, \"failed_names\": {}, "
        "\"skipped_names\": {}}}",
        separator, quoted(name), counts.passed, counts.failed, counts.skipped.size(), quoted_list(counts.failed_names),
        quoted_list(counts.skipped));
    separator = ",\n";
  }
  json += "\n  ],\n  \"accuracy\": [";
  separator = "\n";
  for (const auto& [key, a] : record().accuracy) {
    json += fmt::format(
        "{}    {{\"pipeline\": {}, \"layout\": {}, \"comparisons\": {}, \"elements\": {}, \"max_over_bound\": {:.6f}, "
        "\"rms_over_bound\": {:.6f}, \"mean_over_bound\": {:.3e}, \"rms_over_rounding\": {:.6f}}}",
        separator, quoted(to_string(key.first)), quoted(to_string(key.second)), a.comparisons, a.elements, a.max_ratio,
        rms_error(a), mean_error(a), a.max_rms_ratio);
    separator = ",\n";
  }
  json += "\n  ]\n}\n";
  std::ofstream file(path, std::ios::binary);
  file << json;
  file.close();
  std::printf("%s %s\n", file ? "wrote" : "*** COULD NOT WRITE", path);
}

/// Counts test cases by suite, and ends the run with what was measured.
class RecordListener : public doctest::IReporter {
 public:
  explicit RecordListener(const doctest::ContextOptions& /*options*/) {}
  void report_query(const doctest::QueryData& /*data*/) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& /*stats*/) override {
    if (record().suites.empty()) return;
    print_record();
    const char* path = std::getenv("QKVJIT_TEST_REPORT");
    if (path == nullptr || *path == '\0') return;
    try {
      write_report(path);
    } catch (const std::exception& error) {
      std::printf("*** COULD NOT WRITE %s: %s\n", path, error.what());
    }
  }
  void test_case_start(const doctest::TestCaseData& data) override {
    record().suite = data.m_test_suite;
    record().test_case = data.m_name;
  }
  void test_case_reenter(const doctest::TestCaseData& /*data*/) override {}
  void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
    SuiteCounts& counts = record().suites[record().suite];
    (stats.testCaseSuccess ? counts.passed : counts.failed) += 1;
    if (!stats.testCaseSuccess) counts.failed_names.push_back(record().test_case);
    std::printf("%s %s: %s (%.1f s)\n", stats.testCaseSuccess ? "passed" : "FAILED", record().suite.c_str(),
                record().test_case.c_str(), stats.seconds);
    std::fflush(stdout);
  }
  void test_case_exception(const doctest::TestCaseException& /*exception*/) override {}
  void subcase_start(const doctest::SubcaseSignature& /*signature*/) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData& /*data*/) override {}
  void log_message(const doctest::MessageData& /*data*/) override {}
  void test_case_skipped(const doctest::TestCaseData& /*data*/) override {}
};
REGISTER_LISTENER("record", 1, RecordListener);

}  // namespace

void skip(const std::string& name, const std::string& reason) {
  std::printf("SKIPPED %s: %s\n", name.c_str(), reason.c_str());
  record().suites[record().suite].skipped.push_back(name + ": " + reason);
}

bool has_memory_for(const std::string& name, std::size_t bytes) {
  const std::size_t needed = bytes + bytes / 16 + (std::size_t{256} << 20);
  const std::size_t free = gpu().free_bytes();
  if (free >= needed) return true;
  skip(name, fmt::format("needs {} MiB of device memory, {} MiB are free", needed >> 20, free >> 20));
  return false;
}

// The GPU.

Gpu::Gpu()
    : context(0),
      driver(*context.state()->driver),
      cache({.load = load_from_ptx() ? qkvjit::LoadFrom::ptx : qkvjit::LoadFrom::cubin}) {
  const ContextScope scope(*context.state());
  // Ordered with the legacy default stream, on which buffers are filled.
  check(driver.cuStreamCreate(&stream, CU_STREAM_DEFAULT), "cuStreamCreate");
}

Gpu::~Gpu() {
  const ContextScope scope(*context.state(), std::nothrow);
  if (scope.entered()) driver.cuStreamDestroy(stream);
}

Gpu& gpu() {
  static Gpu instance;
  return instance;
}

void Gpu::synchronize(CUstream which) const {
  const ContextScope scope(*context.state());
  check(driver.cuStreamSynchronize(which), "cuStreamSynchronize");
}

std::size_t Gpu::free_bytes() const {
  const ContextScope scope(*context.state());
  std::size_t free = 0;
  std::size_t total = 0;
  check(driver.cuMemGetInfo(&free, &total), "cuMemGetInfo");
  return free;
}

std::vector<std::shared_ptr<const qkvjit::Kernel>> Gpu::candidates(const qkvjit::QkvProblem& problem, bool aligned,
                                                                   std::size_t share, std::size_t first) {
  const qkvjit::DeviceInfo& info = context.info();
  std::vector<qkvjit::Specialization> specs;
  const auto all = candidate_specializations(problem, info, cache.target_for(info), aligned);
  for (std::size_t i = first; i < all.size(); i += share) specs.push_back(all[i]);
  auto kernels = cache.get_all(context, specs);
  for (const auto& kernel : kernels) {
    if (load_from_ptx() && !kernel->loaded_from_ptx()) FAIL("QKVJIT_TEST_LOAD=ptx, but a kernel came from its cubin");
  }
  return kernels;
}

template <typename Function>
CUresult create_context(Function function, CUcontext* context, CUdevice device) {
  if (function == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  // cuda.h of 13.0 names the form with parameters cuCtxCreate, earlier ones the plain form.
  if constexpr (std::is_invocable_v<Function, CUcontext*, unsigned, CUdevice>) {
    return function(context, 0, device);
  } else {
    return function(context, nullptr, 0, device);
  }
}

SecondContext::SecondContext() {
  gpu().check(create_context(gpu().driver.cuCtxCreate, &context_, gpu().context.state()->device), "cuCtxCreate");
}

SecondContext::~SecondContext() { gpu().driver.cuCtxDestroy(context_); }

// Cases on the host.

// The reference's own conversions: the product's might be what is wrong.
std::uint16_t f16(double value) { return qkvref::double_to_f16(value); }
double value_of(std::uint16_t bits) { return qkvref::f16_to_double(bits); }

int HostCase::weight(int matrix, std::uint64_t row_k, std::uint64_t column) const {
  const auto i = static_cast<std::size_t>(matrix);
  return qkvref::weight({words[i].data(), scales[i].data(), n[i], layout == WeightLayout::nk8}, k, row_k, column);
}

HostCase HostCase::zeros(std::uint64_t m, std::array<std::uint64_t, 3> n, std::uint64_t k, WeightLayout layout) {
  HostCase host;
  host.m = m;
  host.n = n;
  host.k = k;
  host.layout = layout;
  host.x.resize(m * k);
  for (std::size_t i = 0; i < 3; ++i) {
    host.words[i].resize(k / 8 * n[i]);
    host.scales[i].assign(k / 128 * n[i], f16(1));
  }
  return host;
}

HostCase HostCase::random(std::uint64_t m, std::array<std::uint64_t, 3> n, std::uint64_t k, WeightLayout layout,
                          std::uint64_t seed) {
  HostCase host = zeros(m, n, k, layout);
  std::mt19937_64 random(seed);
  // Normal enough, and quick: the sum of four uniform 16-bit numbers.
  for (auto& x : host.x) {
    const std::uint64_t bits = random();
    double value = -131070;
    for (int i = 0; i < 4; ++i) value += static_cast<double>(bits >> (16 * i) & 0xffff);
    value /= 37837;
    if (bits % 1021 == 0) value *= 50;  // an outlier channel
    x = f16(value);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    for (auto& word : host.words[i]) word = static_cast<std::uint32_t>(random() >> 32);
    for (auto& scale : host.scales[i]) {
      const std::uint64_t bits = random();
      const double value = 0.002 + 0.03 * static_cast<double>(i + 1) * static_cast<double>(bits % 4096) / 4096;
      scale = f16(bits >> 60 == 0 ? -value : value);
    }
  }
  return host;
}

void HostCase::set(int matrix, std::uint64_t row_k, std::uint64_t column, int value) {
  const auto i = static_cast<std::size_t>(matrix);
  const std::uint64_t at = layout == WeightLayout::nk8 ? column * (k / 8) + row_k / 8 : row_k / 8 * n[i] + column;
  const unsigned shift = static_cast<unsigned>(row_k % 8 * 4);
  words[i][at] = (words[i][at] & ~(0xfu << shift)) | (static_cast<std::uint32_t>(value) & 0xfu) << shift;
}

std::vector<std::uint32_t> HostCase::device_words(int matrix) const {
  const auto i = static_cast<std::size_t>(matrix);
  if (layout != WeightLayout::prepacked) return words[i];
  return packed_reference(k, n[i], [&](std::uint64_t row, std::uint64_t column) {
    return words[i][row / 8 * n[i] + column] >> (row % 8 * 4) & 15u;
  });
}

qkvjit::QkvProblem HostCase::problem() const {
  return {.n_q = n[0], .n_k = n[1], .n_v = n[2], .k = k, .layout = layout};
}

std::string HostCase::name() const {
  return fmt::format("M = {}, N = {}/{}/{}, K = {}, {}", m, n[0], n[1], n[2], k, to_string(layout));
}

std::string describe(const Specialization& spec) {
  return fmt::format("{} {} {} {}, N = {}/{}/{}, K = {}, {}", to_string(spec.pipeline), to_string(spec.layout),
                     tile_name(spec.tile), spec.aligned ? "aligned" : "unaligned", spec.n_q, spec.n_k, spec.n_v, spec.k,
                     to_string(spec.target));
}

// On the device.

namespace {

constexpr std::size_t kGuardBytes = 4096;
constexpr unsigned char kGuardValue = 0xa5;

std::size_t tail_guard_bytes(std::size_t offset) { return kGuardBytes - offset; }

}  // namespace

GuardedBuffer::GuardedBuffer(std::size_t bytes, std::size_t offset_bytes) : offset_(offset_bytes), bytes_(bytes) {
  const ContextScope scope(*gpu().context.state());
  const std::size_t whole = bytes + 2 * kGuardBytes;
  CUdeviceptr memory = 0;
  gpu().check(gpu().driver.cuMemAlloc(&memory, whole), "cuMemAlloc");
  base_ = memory + kGuardBytes;
  gpu().check(gpu().driver.cuMemsetD8(memory, kGuardValue, whole), "cuMemsetD8");
}

GuardedBuffer::~GuardedBuffer() {
  if (base_ == 0) return;
  const ContextScope scope(*gpu().context.state(), std::nothrow);
  if (scope.entered()) gpu().driver.cuMemFree(base_ - kGuardBytes);
}

GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept
    : base_(std::exchange(other.base_, 0)), offset_(other.offset_), bytes_(other.bytes_) {}

GuardedBuffer& GuardedBuffer::operator=(GuardedBuffer&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(offset_, other.offset_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void GuardedBuffer::fill(unsigned char value) {
  if (bytes_ == 0) return;
  const ContextScope scope(*gpu().context.state());
  gpu().check(gpu().driver.cuMemsetD8(address(), value, bytes_), "cuMemsetD8");
  // Streams that do not wait for the legacy stream read this.
  gpu().check(gpu().driver.cuCtxSynchronize(), "cuCtxSynchronize");
}

void GuardedBuffer::upload(const void* source) {
  if (bytes_ == 0) return;
  const ContextScope scope(*gpu().context.state());
  gpu().check(gpu().driver.cuMemcpyHtoD(address(), source, bytes_), "cuMemcpyHtoD");
  gpu().check(gpu().driver.cuCtxSynchronize(), "cuCtxSynchronize");
}

void GuardedBuffer::download(void* destination) const {
  if (bytes_ == 0) return;
  const ContextScope scope(*gpu().context.state());
  gpu().check(gpu().driver.cuMemcpyDtoH(destination, address(), bytes_), "cuMemcpyDtoH");
}

std::string GuardedBuffer::guard_damage() const {
  const ContextScope scope(*gpu().context.state());
  std::vector<unsigned char> guard(kGuardBytes + offset_);
  const auto damage = [&](const char* side, CUdeviceptr from, std::size_t bytes) -> std::string {
    gpu().check(gpu().driver.cuMemcpyDtoH(guard.data(), from, bytes), "cuMemcpyDtoH");
    const auto end = guard.begin() + static_cast<std::ptrdiff_t>(bytes);
    const auto wrong = std::find_if(guard.begin(), end, [](unsigned char value) { return value != kGuardValue; });
    if (wrong == end) return {};
    const auto at = wrong - guard.begin();
    const bool before = side[0] == 'b';
    return fmt::format("{} bytes {} the buffer's {}, 0x{:02x} was written",
                       before ? static_cast<std::ptrdiff_t>(bytes) - at : at, side, before ? "start" : "end", *wrong);
  };
  const std::string before = damage("before", base_ - kGuardBytes, kGuardBytes + offset_);
  return before.empty() ? damage("behind", address() + bytes_, tail_guard_bytes(offset_)) : before;
}

DeviceCase::DeviceCase(const HostCase& host, const std::array<std::size_t, 10>& offset_elements)
    : host_(&host), x_(host.x.size() * 2, offset_elements[0] * 2) {
  x_.upload(host.x.data());
  for (std::size_t i = 0; i < 3; ++i) {
    const std::vector<std::uint32_t> words = host.device_words(static_cast<int>(i));
    // Packed blocks are aligned, or refused.
    words_[i] =
        GuardedBuffer(words.size() * 4, host.layout == WeightLayout::prepacked ? 0 : offset_elements[1 + i] * 4);
    words_[i].upload(words.data());
    scales_[i] = GuardedBuffer(host.scales[i].size() * 2, offset_elements[4 + i] * 2);
    scales_[i].upload(host.scales[i].data());
    outputs_[i] = GuardedBuffer(host.m * host.n[i] * 2, offset_elements[7 + i] * 2);
  }
}

qkvjit::QkvTensors DeviceCase::tensors(std::uint64_t m) const {
  const int ordinal = gpu().context.info().ordinal;
  const auto rows = static_cast<std::int64_t>(m);
  const auto k = static_cast<std::int64_t>(host_->k);
  std::array<TensorView, 3> w, s, o;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto n = static_cast<std::int64_t>(host_->n[i]);
    const bool nk8 = host_->layout == WeightLayout::nk8;
    w[i] = host_->layout == WeightLayout::prepacked
               ? TensorView::matrix(words_[i].data(), DType::u32, (k + 63) / 64, (n + 63) / 64 * 512, ordinal)
               : TensorView::matrix(words_[i].data(), DType::u32, nk8 ? n : k / 8, nk8 ? k / 8 : n, ordinal);
    s[i] = TensorView::matrix(scales_[i].data(), DType::f16, k / 128, n, ordinal);
    o[i] = TensorView::matrix(outputs_[i].data(), DType::f16, rows, n, ordinal);
  }
  return {.x = TensorView::matrix(x_.data(), DType::f16, rows, k, ordinal),
          .w_q_packed = w[0],
          .w_k_packed = w[1],
          .w_v_packed = w[2],
          .scales_q = s[0],
          .scales_k = s[1],
          .scales_v = s[2],
          .q = o[0],
          .k = o[1],
          .v = o[2]};
}

void DeviceCase::poison() {
  for (GuardedBuffer& output : outputs_) output.fill(kPoison & 0xff);
}

Outputs DeviceCase::outputs(CUstream stream, std::uint64_t m) {
  gpu().synchronize(stream);
  Outputs result;
  for (std::size_t i = 0; i < 3; ++i) {
    std::vector<std::uint16_t>& got = result[i];
    got.resize(host_->m * host_->n[i]);
    outputs_[i].download(got.data());
    const std::string damage = outputs_[i].guard_damage();
    CHECK_MESSAGE(damage.empty(), "output " << kMatrixNames[i] << ": " << damage);
    const auto end = got.begin() + static_cast<std::ptrdiff_t>(m * host_->n[i]);
    const auto missing = std::find(got.begin(), end, kPoison);
    if (missing != end) {
      const auto at = static_cast<std::uint64_t>(missing - got.begin());
      FAIL_CHECK("output " << kMatrixNames[i] << "[" << at / host_->n[i] << ", " << at % host_->n[i]
                           << "] was not written; " << std::count(got.begin(), end, kPoison) << " of "
                           << m * host_->n[i] << " elements were not");
    }
    const auto written = std::find_if(end, got.end(), [](std::uint16_t bits) { return bits != kPoison; });
    if (written != got.end()) {
      const auto at = static_cast<std::uint64_t>(written - got.begin());
      FAIL_CHECK("output " << kMatrixNames[i] << "[" << at / host_->n[i] << ", " << at % host_->n[i]
                           << "] was written, but the launch had only " << m << " rows");
    }
    got.erase(end, got.end());
  }
  return result;
}

void DeviceCase::check_inputs() const {
  const auto check = [](const GuardedBuffer& buffer, const void* want, const std::string& name) {
    std::vector<char> got(buffer.bytes());
    buffer.download(got.data());
    CHECK_MESSAGE(std::memcmp(got.data(), want, got.size()) == 0, "input " << name << " was written to");
    const std::string damage = buffer.guard_damage();
    CHECK_MESSAGE(damage.empty(), "input " << name << ": " << damage);
  };
  check(x_, host_->x.data(), "x");
  for (std::size_t i = 0; i < 3; ++i) {
    check(words_[i], host_->device_words(static_cast<int>(i)).data(), std::string("w_") + kMatrixNames[i] + "_packed");
    check(scales_[i], host_->scales[i].data(), std::string("scales_") + kMatrixNames[i]);
  }
}

// Comparison with the reference.

struct Expected::Impl {
  const HostCase* host;
  std::vector<std::uint64_t> rows;
  struct Want {
    qkvref::Element element;
    double rounding = 0;  ///< the error of rounding the sum alone
  };
  /// By arithmetic, then matrix: [rows, N]. Empty until needed.
  std::array<std::array<std::vector<Want>, 3>, 2> elements;

  const std::array<std::vector<Want>, 3>& of(qkvref::Arithmetic arithmetic) {
    auto& result = elements[arithmetic == qkvref::Arithmetic::exact ? 1 : 0];
    if (!result[0].empty()) return result;
    for (std::size_t i = 0; i < 3; ++i) compute(i, arithmetic, result[i]);
    return result;
  }

  void compute(std::size_t matrix, qkvref::Arithmetic arithmetic, std::vector<Want>& result) const {
    const std::uint64_t n = host->n[matrix];
    result.resize(rows.size() * n);
    const qkvref::Matrix4 w{host->words[matrix].data(), host->scales[matrix].data(), n,
                            host->layout == WeightLayout::nk8};
    std::atomic<std::uint64_t> next = 0;
    const auto work = [&] {
      for (std::uint64_t column = next++; column < n; column = next++) {
        for (std::size_t r = 0; r < rows.size(); ++r) {
          const qkvref::Element element =
              qkvref::project_element(host->x.data() + rows[r] * host->k, w, host->k, 128, column, arithmetic);
          result[r * n + column] = {element, value_of(f16(element.want)) - element.want};
        }
      }
    };
    std::vector<std::thread> threads;
    for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
  }
};

Expected::Expected(const HostCase& host, std::vector<std::uint64_t> rows)
    : impl_(std::make_unique<Impl>(Impl{&host, std::move(rows), {}})) {
  if (impl_->rows.empty()) {
    for (std::uint64_t row = 0; row < host.m; ++row) impl_->rows.push_back(row);
  }
}

Expected::~Expected() = default;

void Expected::check(const Outputs& got, std::uint64_t m, const Specialization& spec, bool statistics) {
  const HostCase& host = *impl_->host;
  const bool exact = is_exact(spec.pipeline);
  const auto& want = impl_->of(exact ? qkvref::Arithmetic::exact : qkvref::Arithmetic::rounded);
  Accuracy& total = record().accuracy[{spec.pipeline, spec.layout}];
  ++total.comparisons;
  double squares = 0;
  double rounding_squares = 0;
  std::uint64_t compared = 0;
  for (std::size_t matrix = 0; matrix < 3; ++matrix) {
    const std::uint64_t n = host.n[matrix];
    REQUIRE(got[matrix].size() == m * n);
    std::uint64_t wrong = 0;
    std::string first;
    for (std::size_t r = 0; r < impl_->rows.size() && impl_->rows[r] < m; ++r) {
      for (std::uint64_t column = 0; column < n; ++column) {
        const auto& [element, rounding] = want[matrix][r * n + column];
        const std::uint16_t bits = got[matrix][impl_->rows[r] * n + column];
        if (!qkvref::accept(bits, element) && wrong++ == 0) {
          first = fmt::format("{}[{}, {}] is {} (0x{:04x}), needs {} +- {}", kMatrixNames[matrix], impl_->rows[r],
                              column, value_of(bits), bits, element.want, element.tolerance);
        }
        const double value = value_of(bits);
        if (!std::isfinite(element.want) || !std::isfinite(value) || std::abs(element.want) > 65000) continue;
        const double error = value - element.want;
        squares += error * error;
        rounding_squares += rounding * rounding;
        const double relative = error / element.tolerance;
        total.max_ratio = std::max(total.max_ratio, std::abs(relative));
        total.sum += relative;
        total.sum_of_squares += relative * relative;
        ++compared;
      }
    }
    if (wrong > 0) {
      FAIL_CHECK(describe(spec) << ", M = " << m << ": " << first << "; " << wrong << " elements of "
                                << kMatrixNames[matrix] << " are out of bounds");
    }
  }
  total.elements += compared;
  // Fewer elements than this say little about a rms.
  if (!statistics || host.k > 512 || compared < 2000) return;
  const double ratio = std::sqrt(squares / rounding_squares);
  total.max_rms_ratio = std::max(total.max_rms_ratio, ratio);
  CHECK_MESSAGE(ratio <= 1.2, describe(spec) << ", M = " << m << ": the rms error is " << ratio
                                             << " times that of rounding alone, over " << compared << " elements");
}

}  // namespace qkvtest
