// SPDX-License-Identifier: Apache-2.0
// TuningTable: which tile was measured to be the fastest on one kind of GPU, problem by problem and M by M. A plain
// value that tune() makes (qkvjit/tune.h), a JSON file keeps, and select_rows() and PlanOptions::tuning look at. Pure
// but for load() and save(); copies are independent, so any thread may use its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "qkvjit/device_context.h"
#include "qkvjit/qkv_problem.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// Version of the file; a change of what a field means changes it.
inline constexpr unsigned kTuningTableVersion = 1;

/// What decides which tile is fastest, and so what a table is good for. Clocks are left out: they change from day to
/// day, and the order of the tiles hardly with them.
struct TunedHardware {
  Target target;  ///< without suffix, as KernelCache::target_for() gives it
  int multiprocessors = 0;
  std::size_t smem_per_block_bytes = 0;
  std::size_t smem_per_multiprocessor_bytes = 0;
  std::size_t l2_bytes = 0;

  bool operator==(const TunedHardware&) const = default;
};
TunedHardware hardware_of(const DeviceInfo& info, Target target);

/// The fastest tile at `max_m` tokens; it serves the tokens from the row before up to `max_m`.
struct TunedRow {
  QkvProblem problem;
  bool aligned = true;                ///< the operands' alignment, as in Specialization
  bool weights_are_constant = false;  ///< PlanOptions's promise
  std::uint64_t max_m = 0;            ///< the token count that was measured
  Pipeline pipeline = Pipeline::simple;
  TileConfig tile;
  bool dependent_launch = false;  ///< how it is launched; never without the promise
  double median_us = 0, min_us = 0, max_us = 0;

  bool operator==(const TunedRow&) const = default;
  /// Whether both are for the same launches; a table has one row for each.
  [[nodiscard]] bool same_key(const TunedRow& other) const;
};

class TuningTable {
 public:
  TuningTable() = default;
  /// `templates_digest`: of the kernels that are measured, 64 hex digits.
  TuningTable(const TunedHardware& hardware, std::string templates_digest);

  [[nodiscard]] const TunedHardware& hardware() const noexcept { return hardware_; }
  [[nodiscard]] const std::string& templates_digest() const noexcept { return templates_digest_; }
  /// In the order of problems, alignment, promise and ascending max_m.
  [[nodiscard]] const std::vector<TunedRow>& rows() const noexcept { return rows_; }

  /// The rows for one problem, ascending in max_m.
  [[nodiscard]] std::vector<TunedRow> rows_for(const QkvProblem& problem, bool aligned,
                                               bool weights_are_constant) const;

  /// Adds `row`, or replaces the one of the same key. Throws InvalidProblem where no table may hold it: a problem that
  /// validate() refuses, max_m of 0, times that are not ordered, a dependent launch without the promise.
  void set(const TunedRow& row);

  /// Adds the rows of `other`, which replace ours of the same key. Throws InvalidProblem where it is of other hardware
  /// or of other kernels.
  void merge(const TuningTable& other);

  [[nodiscard]] std::string to_json() const;
  /// Throws Error, naming the field, for anything that to_json() of this version does not write: unknown, missing,
  /// repeated or ill-typed fields, another version, tiles and pipelines that have no name here.
  static TuningTable from_json(const std::string& text);

  /// Writes the file beside `path` and renames it, so that a reader sees the old table or the new one. Throws Error.
  void save(const std::string& path) const;
  /// Throws Error, with the path: no such file, over 64 MiB, or what from_json() throws.
  static TuningTable load(const std::string& path);

  bool operator==(const TuningTable&) const = default;

 private:
  TunedHardware hardware_;
  std::string templates_digest_ = std::string(64, '0');
  std::vector<TunedRow> rows_;
};

}  // namespace qkvjit
