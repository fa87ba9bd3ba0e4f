// SPDX-License-Identifier: Apache-2.0
// The exceptions of qkvjit. Every one derives from Error, and its what() is complete: the operation,
// the tensor or call at fault, what it got, what it needs and how to mend it.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace qkvjit {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A problem or tensor that the operation refuses (shape, dtype, layout, pointer, overlap …).
class InvalidProblem : public Error {
 public:
  using Error::Error;
};

/// A tensor that lives on another device than the context's. The text has both ordinals.
class DeviceMismatch : public Error {
 public:
  using Error::Error;
};

/// The device is below compute capability 8.0, or its ordinal does not exist.
class UnsupportedDevice : public Error {
 public:
  using Error::Error;
};

/// The CUDA driver or NVRTC is not installed, too old, or of a major version that does not fit.
class LibraryUnavailable : public Error {
 public:
  using Error::Error;
};

/// NVRTC refused a kernel. what() holds the options, the NVRTC version and the whole log.
class CompileError : public Error {
 public:
  using Error::Error;
};

/// A CUDA driver call failed.
class DriverError : public Error {
 public:
  DriverError(const std::string& text, int code) : Error(text), code_(code) {}
  /// The CUresult as an integer.
  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

/// A launch into a capturing stream would first have to compile or load a kernel. The capture stays
/// valid; call QkvPlan::prepare() (or bind eagerly) before capturing.
class CaptureWouldLoad : public Error {
 public:
  using Error::Error;
};

/// KernelCache::freeze() forbade compiling, and a kernel was missing. The text has its specialisation.
class CacheFrozen : public Error {
 public:
  using Error::Error;
};

/// KernelCache::prepare() could not make every kernel; the others are ready. The text has each kernel that failed.
class PrepareFailed : public Error {
 public:
  PrepareFailed(const std::string& text, std::vector<std::exception_ptr> causes)
      : Error(text), causes_(std::move(causes)) {}
  /// What each of them threw.
  [[nodiscard]] const std::vector<std::exception_ptr>& causes() const noexcept { return causes_; }

 private:
  std::vector<std::exception_ptr> causes_;
};

/// The process was forked from one that had initialised CUDA, and CUDA does not survive that.
class ForkedProcess : public Error {
 public:
  using Error::Error;
};

}  // namespace qkvjit
