// SPDX-License-Identifier: Apache-2.0
// Which kernel serves which token count on which GPU. Pure functions over plain facts: they run, and are
// tested, for any GPU on any machine.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qkvjit/device_context.h"
#include "qkvjit/qkv_problem.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

class TuningTable;  // qkvjit/tuning_table.h

/// A row of the selection: serves token counts up to and including `max_m`.
struct SelectedRow {
  std::uint64_t max_m = 0;
  Specialization spec;
  bool dependent_launch = false;  ///< whether it is launched while the kernel ahead still runs
};

/// The rows for `problem` on the GPU `info`, ascending in max_m; the last serves every larger M.
/// `aligned` says whether all base pointers are 16-byte aligned; it has no effect where a row of some tensor
/// is not a multiple of 16 bytes. `target` must be one the compiler knows and the GPU can run.
/// `dependent_launch` is PlanOptions::weights_are_constant: tiles for dependent launches, where they are faster.
/// `tuning` (may be null) goes first: where it is of this hardware and has rows for this problem, M takes the row with
/// the smallest max_m that is not below it, whatever the built-in rows would say. Beyond the last, and where the tile
/// is none that can run here, the built-in rows serve. Neighbours that launch the same kernel become one row.
/// Throws InvalidProblem (see validate) or UnsupportedDevice.
std::vector<SelectedRow> select_rows(const QkvProblem& problem, const DeviceInfo& info, Target target, bool aligned,
                                     bool dependent_launch = false, const TuningTable* tuning = nullptr);

/// The one row of select_rows that serves `m`.
Specialization select_specialization(const QkvProblem& problem, const DeviceInfo& info, Target target, bool aligned,
                                     std::uint64_t m, bool dependent_launch = false,
                                     const TuningTable* tuning = nullptr);

/// Every kernel that plans of `problem` and qkv_project_int4 can need for up to `max_m` tokens, each once: aligned or
/// not, with the promise of PlanOptions::weights_are_constant and without it (or as given), and where there is a
/// `tuning` both its rows and the built-in ones, which qkv_project_int4 keeps to.
std::vector<Specialization> needed_specializations(const QkvProblem& problem, const DeviceInfo& info, Target target,
                                                   std::uint64_t max_m = ~std::uint64_t{0},
                                                   std::optional<bool> weights_are_constant = {},
                                                   const TuningTable* tuning = nullptr);

/// Every tile of every pipeline that fits the GPU, whether selection picks it or not, in a fixed order.
std::vector<Specialization> candidate_specializations(const QkvProblem& problem, const DeviceInfo& info, Target target,
                                                      bool aligned);

/// What can serve up to `max_m` tokens of `problem` on that GPU, selected or not: each tile as an ordinary launch and,
/// where `weights_are_constant` promises what PlanOptions says and the kernel can be launched so, before that as a
/// dependent one. In a fixed order: that of candidate_specializations() above. Every row has the given max_m.
std::vector<SelectedRow> candidate_specializations(const QkvProblem& problem, const DeviceInfo& info, Target target,
                                                   bool aligned, std::uint64_t max_m, bool weights_are_constant);

/// Whether a cubin for `target` runs on a GPU of compute capability `sm`: its own, or a later minor of the same major;
/// an architecture-specific one, and any of or for an embedded GPU, only on its own.
bool cubin_runs_on(Target target, unsigned sm);

/// Where the code for a GPU of compute capability `sm` comes from, given the targets NVRTC knows (ascending).
struct TargetChoice {
  Target target;
  bool needs_driver_jit = false;  ///< no cubin for `target` runs there: the driver finishes its PTX
};
TargetChoice choose_target(unsigned sm, std::span<const unsigned> nvrtc_targets);

/// "m128n256_w1x8x1_s3_b1" (block, warps, stages, blocks a multiprocessor): stable, unique among tiles, accepted by
/// parse_tile.
std::string tile_name(const TileConfig& tile);
/// Throws InvalidProblem for text that is no tile name.
TileConfig parse_tile(const std::string& name);

/// Whether the pipeline's arithmetic is "exact" (integers exact, the scale applied in f32), else "rounded" (w =
/// rn(q*s)).
bool is_exact(Pipeline pipeline) noexcept;

const char* to_string(Pipeline pipeline) noexcept;
const char* to_string(WeightLayout layout) noexcept;
/// "sm_90", "sm_90a".
std::string to_string(Target target);
/// Throws InvalidProblem for text that is not sm_NN or sm_NNa.
Target parse_target(const std::string& text);

}  // namespace qkvjit
