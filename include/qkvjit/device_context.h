// SPDX-License-Identifier: Apache-2.0
// DeviceInfo: plain facts about a GPU, made up freely in tests. DeviceContext: shares the device's primary
// context (so memory is shared with the CUDA runtime, PyTorch and others), enforces the ordinal and SM 8.0.
// A DeviceContext may be used from any thread; every entry point restores the caller's current context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "qkvjit/qkv_problem.h"

// Handles of the CUDA driver API, declared so that no CUDA header is needed to use this library.
typedef struct CUctx_st* CUcontext;    // NOLINT(modernize-use-using)
typedef struct CUstream_st* CUstream;  // NOLINT(modernize-use-using)
typedef struct CUfunc_st* CUfunction;  // NOLINT(modernize-use-using)

namespace qkvjit {

struct DeviceInfo {
  int ordinal = 0;
  std::string name;
  int sm_major = 0;
  int sm_minor = 0;
  int multiprocessors = 0;
  std::size_t smem_per_block_bytes = 0;  ///< opt-in limit of one block
  std::size_t smem_per_multiprocessor_bytes = 0;
  int registers_per_multiprocessor = 65536;
  std::size_t l2_bytes = 0;
  std::size_t total_memory_bytes = 0;
  int clock_khz = 0;
  int driver_version = 0;  ///< as cuDriverGetVersion: 1000*major + 10*minor

  [[nodiscard]] unsigned sm() const { return static_cast<unsigned>(sm_major * 10 + sm_minor); }
};

/// Typical facts of a GPU of that compute capability (80, 86, …), for selection with no GPU at hand.
/// Throws UnsupportedDevice below 80 or for an unknown one.
DeviceInfo typical_device(unsigned sm);

struct DriverTable;  // src/cuda/driver.h; tests inject their own
struct DeviceState;  // src/cuda/device_context.cpp

class DeviceContext {
 public:
  /// Retains the primary context of CUDA device `ordinal`.
  /// Throws LibraryUnavailable (no driver), UnsupportedDevice (no such ordinal, or below SM 8.0), DriverError.
  explicit DeviceContext(int ordinal);
  DeviceContext(int ordinal, std::shared_ptr<const DriverTable> driver);

  [[nodiscard]] const DeviceInfo& info() const noexcept;
  [[nodiscard]] CUcontext handle() const noexcept;

  /// What the driver says about `pointer`. Throws DriverError.
  [[nodiscard]] PointerFacts pointer_facts(const void* pointer) const;
  /// True where the driver can tell that `stream` belongs to another context.
  [[nodiscard]] bool is_foreign_stream(CUstream stream) const;
  [[nodiscard]] bool is_capturing(CUstream stream) const;

  [[nodiscard]] const std::shared_ptr<DeviceState>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<DeviceState> state_;
};

}  // namespace qkvjit
