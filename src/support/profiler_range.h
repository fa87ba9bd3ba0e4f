// SPDX-License-Identifier: Apache-2.0
// A named range on the timeline of an attached profiler (NVTX, domain "qkvjit"). NVTX is headers alone: a profiler
// names its library in NVTX_INJECTION64_PATH, and without one a range is a test of a pointer. A build that finds no
// NVTX headers, or defines QKVJIT_WITHOUT_NVTX, has no ranges.
#pragma once

#include <string>

namespace qkvjit {

/// From construction to destruction, on one thread. `make_name` is called only where a profiler listens.
class ProfilerRange {
 public:
  template <typename MakeName>
  explicit ProfilerRange(const MakeName& make_name) {
    if (listens()) begin(make_name());
  }
  ~ProfilerRange() {
    if (begun_) end();
  }
  ProfilerRange(const ProfilerRange&) = delete;  // bound to its block and thread
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  static bool listens() noexcept;
  void begin(const std::string& name);
  static void end() noexcept;
  bool begun_ = false;
};

}  // namespace qkvjit
