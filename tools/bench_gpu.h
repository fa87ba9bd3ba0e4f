// SPDX-License-Identifier: Apache-2.0
// The device side of qkvjit-bench: operands, the check before any timing, the timing, and what the times are compared
// with. One GPU, one thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench_report.h"
#include "qkvjit/qkvjit.h"

namespace qkvbench {

struct TileChoice {
  std::string pipeline, tile;  ///< empty: what selection picks
};

/// How rows are timed, in a sentence for the report.
extern const char* const kProtocol;

class GpuBench {
 public:
  /// Throws LibraryUnavailable where there is no GPU.
  explicit GpuBench(int ordinal);
  ~GpuBench();

  /// Device, driver, NVRTC, templates, read bandwidth and clock; without rows.
  [[nodiscard]] Report describe() const;
  /// Names rows that measure() will be called for: those of one shape and layout then compile side by side.
  void expect(const std::vector<Row>& rows);
  /// Verifies `row` and, where it is right, times it. `three_launches`: also the same columns in three launches.
  void measure(Row& row, const TileChoice& choice, bool three_launches);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkvbench
