// SPDX-License-Identifier: Apache-2.0
// The device side of qkvjit-bench: operands, the check before any timing, the timing, and what the times are compared
// with. One GPU, one thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bench_report.h"
#include "qkvjit/qkvjit.h"
#include "qkvjit/tuning_table.h"

namespace qkvbench {

struct BenchOptions {
  std::string pipeline, tile;                   ///< empty: what selection picks
  std::optional<qkvjit::TuningTable> tuning{};  ///< what selection looks at first
  bool three_launches = false;                  ///< also the same columns in three launches
  unsigned repetitions = 7;                     ///< timed graphs of each row; the median counts
};

/// How rows are timed, in a few sentences for the report.
extern const char* const kProtocol;

class GpuBench {
 public:
  /// Throws LibraryUnavailable where there is no GPU.
  GpuBench(int ordinal, BenchOptions options);
  ~GpuBench();

  /// Device, driver, NVRTC, templates, read bandwidth and clock; without rows.
  [[nodiscard]] Report describe() const;
  /// Names rows that measure() will be called for: those of one shape and layout then compile side by side.
  void expect(const std::vector<Row>& rows);
  /// Verifies each row of `group`, which have the same operands, and times those that are right: few tokens one by one,
  /// many against each other and cuBLAS in shuffled order. `most_m`: the largest M that this shape will be asked for.
  void measure(std::span<Row> group, std::uint64_t most_m);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkvbench
