// SPDX-License-Identifier: Apache-2.0
// What the GPU suites share: one context and cache for the process, random problems on the host, their copy on the
// device with guard regions and NaN-filled outputs, and the comparison with the independent reference. Every
// comparison is recorded; the run ends with a table, and with a JSON file where QKVJIT_TEST_REPORT names one.
// Test cases run on one thread; the fixture is for that thread unless said otherwise.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cuda/device_state.h"
#include "cuda/driver.h"
#include "qkvjit/qkvjit.h"

namespace qkvtest {

using qkvjit::Specialization;
using qkvjit::WeightLayout;

inline constexpr std::array kLayouts{WeightLayout::k8n, WeightLayout::nk8, WeightLayout::prepacked};
/// Those of the strict call.
inline constexpr std::array kRawLayouts{WeightLayout::k8n, WeightLayout::nk8};
inline const std::array<std::string, 3> kMatrixNames{"q", "k",
                                                     "v"};  // strings: doctest prints a const char* as an address
/// What outputs hold before a launch: an f16 NaN that no conversion produces (those give 0x7fff).
inline constexpr std::uint16_t kPoison = 0xffff;

/// Device 0, its driver and one cache; made at the first use. QKVJIT_TEST_LOAD=ptx loads kernels from their PTX.
struct Gpu {
  Gpu();
  ~Gpu();
  Gpu(const Gpu&) = delete;  // one a process
  Gpu& operator=(const Gpu&) = delete;

  qkvjit::DeviceContext context;
  const qkvjit::DriverTable& driver;
  qkvjit::KernelCache cache;
  CUstream stream = nullptr;

  void check(CUresult code, const char* call) const { qkvjit::check(driver, code, call); }
  void synchronize(CUstream which) const;
  [[nodiscard]] std::size_t free_bytes() const;
  /// Every tile of every pipeline that this GPU can run, compiled for it and loaded; or every `share`-th of them, from
  /// `first` on.
  std::vector<std::shared_ptr<const qkvjit::Kernel>> candidates(const qkvjit::QkvProblem& problem, bool aligned,
                                                                std::size_t share = 1, std::size_t first = 0);
};
Gpu& gpu();

/// False, said and counted, where the case `name` needs more device memory than is free.
bool has_memory_for(const std::string& name, std::size_t bytes);
void skip(const std::string& name, const std::string& reason);

/// Inputs on the host. Each matrix has its own random scales, so that a swap of Q, K and V shows.
struct HostCase {
  std::uint64_t m = 0;
  std::array<std::uint64_t, 3> n{};
  std::uint64_t k = 0;
  WeightLayout layout = WeightLayout::k8n;
  std::vector<std::uint16_t> x;                      ///< [M, K]
  std::array<std::vector<std::uint32_t>, 3> words;   ///< in `layout`'s order; k8n where that is prepacked
  std::array<std::vector<std::uint16_t>, 3> scales;  ///< [K/128, N]

  /// All nibbles, normal x with a few outliers, scales of both signs.
  static HostCase random(std::uint64_t m, std::array<std::uint64_t, 3> n, std::uint64_t k, WeightLayout layout,
                         std::uint64_t seed);
  /// Zero x and weights, scales of 1; for cases written by hand.
  static HostCase zeros(std::uint64_t m, std::array<std::uint64_t, 3> n, std::uint64_t k, WeightLayout layout);

  /// Sets one 4-bit weight.
  void set(int matrix, std::uint64_t row_k, std::uint64_t column, int value);
  [[nodiscard]] int weight(int matrix, std::uint64_t row_k, std::uint64_t column) const;
  /// What the device gets: `words`, or their packed blocks.
  [[nodiscard]] std::vector<std::uint32_t> device_words(int matrix) const;
  [[nodiscard]] qkvjit::QkvProblem problem() const;
  [[nodiscard]] std::string name() const;
};

/// By the reference's conversions. Throughout a value fits f16 or is meant to be rounded once.
std::uint16_t f16(double value);
double value_of(std::uint16_t f16_bits);

/// Device memory with guard regions on both sides; `offset_bytes` moves the base off its alignment.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  explicit GuardedBuffer(std::size_t bytes, std::size_t offset_bytes = 0);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept;

  [[nodiscard]] void* data() const { return reinterpret_cast<void*>(base_ + offset_); }
  [[nodiscard]] CUdeviceptr address() const { return base_ + offset_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  void fill(unsigned char value);
  void upload(const void* source);
  void download(void* destination) const;
  /// Which byte of the guards changed: "" or a description.
  [[nodiscard]] std::string guard_damage() const;

 private:
  CUdeviceptr base_ = 0;
  std::size_t offset_ = 0;
  std::size_t bytes_ = 0;
};

using Outputs = std::array<std::vector<std::uint16_t>, 3>;

/// A HostCase on the device. `offset_elements`, in the order of QkvTensors, misaligns the bases.
class DeviceCase {
 public:
  explicit DeviceCase(const HostCase& host, const std::array<std::size_t, 10>& offset_elements = {});

  /// With the first `m` rows of x and of the outputs.
  [[nodiscard]] qkvjit::QkvTensors tensors(std::uint64_t m) const;
  [[nodiscard]] qkvjit::QkvTensors tensors() const { return tensors(host_->m); }
  void poison();
  /// Waits for `stream`, checks all guards, that rows from `m` on are untouched and no element before was left out.
  Outputs outputs(CUstream stream, std::uint64_t m);
  /// CHECKs that no input changed.
  void check_inputs() const;
  /// Which must outlive this.
  [[nodiscard]] const HostCase& host() const { return *host_; }
  [[nodiscard]] GuardedBuffer& x() { return x_; }
  [[nodiscard]] GuardedBuffer& words(int matrix) { return words_[static_cast<std::size_t>(matrix)]; }
  [[nodiscard]] GuardedBuffer& scales(int matrix) { return scales_[static_cast<std::size_t>(matrix)]; }
  [[nodiscard]] GuardedBuffer& output(int matrix) { return outputs_[static_cast<std::size_t>(matrix)]; }

 private:
  const HostCase* host_;
  GuardedBuffer x_;
  std::array<GuardedBuffer, 3> words_, scales_, outputs_;
};

/// The reference's results for chosen rows of a case, both arithmetics, made at first use and on all cores.
class Expected {
 public:
  /// `rows`, ascending, are those computed and compared; none: all. `host` must outlive this.
  explicit Expected(const HostCase& host, std::vector<std::uint64_t> rows = {});
  ~Expected();

  /// CHECKs the first `m` rows of `got` against the arithmetic of `spec`'s pipeline and records the errors.
  /// `statistics`: random data, whose rms error is held to that of rounding alone where K <= 512.
  void check(const Outputs& got, std::uint64_t m, const Specialization& spec, bool statistics = true);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// "decode nk8 m8n32_w1x1x8_s2_b3 aligned, N = 96/96/96, K = 384"
std::string describe(const Specialization& spec);

/// A CUDA context beside the primary one, made current for this thread as long as it lives.
class SecondContext {
 public:
  SecondContext();  // throws where the driver cannot make one
  ~SecondContext();
  SecondContext(const SecondContext&) = delete;  // owns the context
  SecondContext& operator=(const SecondContext&) = delete;
  [[nodiscard]] CUcontext handle() const { return context_; }

 private:
  CUcontext context_ = nullptr;
};

}  // namespace qkvtest
