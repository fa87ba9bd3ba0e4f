// SPDX-License-Identifier: Apache-2.0
// cuBLASLt opened at run time, its few functions declared by hand (cuBLAS library reference, "Using the cublasLt API"):
// the f16 GEMM that a user would run instead, with the algorithms that its heuristic offers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "qkvjit/device_context.h"

namespace qkvbench {

class CublasLt {
 public:
  CublasLt();  ///< available() is false where the library is absent
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;  // owns the handle
  CublasLt& operator=(const CublasLt&) = delete;

  [[nodiscard]] bool available() const noexcept;

  /// gemm(w, x, out, workspace, stream): out [m, n] = x [m, k] * w [k, n], f16 in and out, f32 sums; 64 MiB of
  /// workspace.
  using Gemm = std::function<void(const void*, const void*, void*, void*, CUstream)>;
  /// One for each of the heuristic's first algorithms.
  std::vector<Gemm> candidates(std::uint64_t m, std::uint64_t n, std::uint64_t k) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkvbench
