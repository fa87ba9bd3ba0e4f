// SPDX-License-Identifier: Apache-2.0
// What qkvjit-bench prints and writes: a table line a row, JSON and back, CSV, and an SVG plot. Files are written
// beside their name and renamed, so that a stopped run leaves the one before.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench_rows.h"

namespace qkvbench {

struct Report {
  std::string device, driver, nvrtc, commit, templates_digest, date, protocol;
  std::optional<double> clock_mhz;  ///< of the multiprocessors, while the rows ran
  double read_tb_s = 0;             ///< a streaming read of memory, measured in the same process
  std::vector<Row> rows;
};

std::string table_header();
std::string table_line(const Row& row, double read_tb_s);

std::string to_json(const Report& report);
/// Throws Error where `text` is no report.
Report from_json(const std::string& text);
std::string to_csv(const Report& report);
/// A panel a shape for few tokens, M against microseconds, both logarithmic, and one for many, M against TFLOP/s: our
/// layouts (dependent launch where measured), cuBLAS f16 and, for few tokens, the limit.
std::string to_svg(const Report& report);

/// Throws Error, and leaves what was there.
void write_file(const std::string& path, const std::string& text);
std::string read_file(const std::string& path);

}  // namespace qkvbench
