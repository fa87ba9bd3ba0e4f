// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/select.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "qkvjit/error.h"
#include "qkvjit/tuning_table.h"
#include "select/tile_table.h"

namespace qkvjit {
namespace {

constexpr std::uint64_t kMaxGridX = 0x7fffffff;  // CUDA programming guide: maximum x-dimension of a grid

/// Whether every row of weights, scales and outputs is a multiple of 16 bytes. K % 128 == 0 sees to x and nk8.
bool rows_are_vectors(const QkvProblem& problem) {
  return problem.n_q % 8 == 0 && problem.n_k % 8 == 0 && problem.n_v % 8 == 0;
}

/// Whether it is for compute capability 9.0 alone.
bool needs_hopper(Pipeline pipeline) { return pipeline == Pipeline::wgmma || pipeline == Pipeline::prefill; }

Specialization specialize(const QkvProblem& problem, Target target, bool aligned, const TileRow& row) {
  Specialization spec;
  spec.pipeline = row.pipeline;
  spec.layout = problem.layout;
  spec.activation_dtype = problem.activation_dtype;
  spec.scale_dtype = problem.scale_dtype;
  spec.n_q = static_cast<unsigned>(problem.n_q);
  spec.n_k = static_cast<unsigned>(problem.n_k);
  spec.n_v = static_cast<unsigned>(problem.n_v);
  spec.k = static_cast<unsigned>(problem.k);
  spec.group_size = static_cast<unsigned>(problem.group_size);
  spec.aligned = aligned;
  spec.tile = row.tile;
  spec.target = target;
  if (needs_hopper(row.pipeline)) spec.target.suffix = 'a';
  return spec;
}

bool serves_layout(const TileRow& row, WeightLayout layout) {
  return (row.layouts >> static_cast<unsigned>(layout) & 1u) != 0;  // the bits are in the order of the enumerators
}

bool serves_launch(const TileRow& row, bool dependent_launch) {
  return row.launches != (dependent_launch ? Launches::ordinary : Launches::dependent);
}

/// Whether the GPU can run the tile: shared memory; clusters from compute capability 9.0 on; wgmma on 9.0 alone, and
/// with a slab at least for every block of a cluster.
bool runs_on(const TileRow& row, const Specialization& spec, const DeviceInfo& info) {
  if (row.only_on_hopper && spec.target.sm != 90) return false;
  if (smem_bytes(spec) > info.smem_per_block_bytes) return false;
  if (spec.tile.cluster_k > 1 && spec.target.sm < 90) return false;
  if (spec.pipeline == Pipeline::prefill) {
    return spec.target.sm == 90 && info.sm() == 90 && spec.k / kPackedK % (2 * spec.tile.cluster_k) == 0;
  }
  if (spec.pipeline != Pipeline::wgmma) return true;
  return spec.target.sm == 90 && info.sm() == 90 && spec.k / kSlabK >= spec.tile.cluster_k;
}

/// Sixteenths of the columns that the busiest multiprocessor computes over all of K, of which the time is made where
/// weights are read once; blocks beyond one wave cost 4 % more each, for their first weights come late. Rows for more
/// tokens are in order of preference.
std::uint64_t row_cost(const TileRow& row, const Specialization& spec, const DeviceInfo& info) {
  if (row.max_m == kAnyM) return 0;
  const std::uint64_t token_tiles = (row.max_m + spec.tile.block_m - 1) / spec.tile.block_m;
  const std::uint64_t blocks = token_tiles * column_tiles(spec) * spec.tile.cluster_k;
  // Clusters of more than two do not fill the GPU: 30 of four fit an H200's 132 multiprocessors.
  const auto all = static_cast<std::uint64_t>(info.multiprocessors);
  const std::uint64_t multiprocessors = spec.tile.cluster_k > 2 ? std::max<std::uint64_t>(all * 10 / 11, 1) : all;
  const std::uint64_t slots = multiprocessors * spec.tile.min_blocks;
  const std::uint64_t waves = (blocks + slots - 1) / slots;
  const std::uint64_t busiest =
      waves == 1 ? (blocks + multiprocessors - 1) / multiprocessors : waves * spec.tile.min_blocks;
  // With mma_sync products bound the time, so the tokens of a tile count as well.
  const std::uint64_t tokens = spec.pipeline == Pipeline::mma_sync ? spec.tile.block_m : 1;
  const std::uint64_t columns = busiest * spec.tile.block_n * tokens * 16 / spec.tile.cluster_k;
  return columns + columns * (waves - 1) / 25 + row.overhead * std::uint64_t{16} * 4096 / spec.k;
}

void require_device(const DeviceInfo& info) {
  if (info.sm() >= 80) return;
  throw UnsupportedDevice(fmt::format("device {} ({}) has compute capability {}.{}; qkvjit needs 8.0 or newer (Ampere)",
                                      info.ordinal, info.name, info.sm_major, info.sm_minor));
}

/// The rows of the tile table.
std::vector<SelectedRow> built_in_rows(const QkvProblem& problem, const DeviceInfo& info, Target target, bool aligned,
                                       bool dependent_launch) {
  validate(problem);
  require_device(info);
  const bool vectors = aligned && rows_are_vectors(problem);
  std::vector<SelectedRow> rows;
  std::uint64_t lowest_cost = 0;  // of the last row
  for (const TileRow& row : kTileRows) {
    if (row.aligned != vectors || row.max_m == 0) continue;
    if (!serves_layout(row, problem.layout) || !serves_launch(row, dependent_launch)) continue;
    const Specialization spec = specialize(problem, target, vectors, row);
    if (!runs_on(row, spec, info)) continue;
    const SelectedRow selected{row.max_m, spec, dependent_launch && row.launches != Launches::always_ordinary};
    const std::uint64_t cost = row_cost(row, spec, info);
    if (rows.empty() || rows.back().max_m != row.max_m) {
      rows.push_back(selected);
    } else if (cost < lowest_cost) {
      rows.back() = selected;
    } else {
      continue;
    }
    lowest_cost = cost;
  }
  if (rows.empty() || rows.back().max_m != kAnyM) {
    throw UnsupportedDevice(fmt::format("device {} ({}) allows a block {} bytes of shared memory; no tile fits",
                                        info.ordinal, info.name, info.smem_per_block_bytes));
  }
  return rows;
}

/// Appends, or extends the last row where it launches the same kernel in the same way.
void append_row(std::vector<SelectedRow>& rows, const SelectedRow& row) {
  if (!rows.empty() && rows.back().spec == row.spec && rows.back().dependent_launch == row.dependent_launch) {
    rows.back().max_m = row.max_m;
  } else {
    rows.push_back(row);
  }
}

/// The part of `from` (ascending) that serves M in (above, up_to].
void append_range(std::vector<SelectedRow>& rows, const std::vector<SelectedRow>& from, std::uint64_t above,
                  std::uint64_t up_to) {
  for (const SelectedRow& row : from) {
    if (row.max_m <= above) continue;
    append_row(rows, {std::min(row.max_m, up_to), row.spec, row.dependent_launch});
    if (row.max_m >= up_to) return;
  }
}

}  // namespace

std::vector<SelectedRow> select_rows(const QkvProblem& problem, const DeviceInfo& info, Target target, bool aligned,
                                     bool dependent_launch, const TuningTable* tuning) {
  std::vector<SelectedRow> built_in = built_in_rows(problem, info, target, aligned, dependent_launch);
  if (tuning == nullptr || !(tuning->hardware() == hardware_of(info, target))) return built_in;
  const bool vectors = aligned && rows_are_vectors(problem);
  const std::vector<TunedRow> tuned = tuning->rows_for(problem, vectors, dependent_launch);
  if (tuned.empty()) return built_in;

  // Only what would be a candidate here is taken from a table: it may be of other kernels, or made by hand.
  const std::vector<Specialization> candidates = candidate_specializations(problem, info, target, aligned);
  std::vector<SelectedRow> rows;
  std::uint64_t below = 0;  // M up to here have their row
  for (const TunedRow& row : tuned) {
    const auto spec = std::find_if(candidates.begin(), candidates.end(), [&](const Specialization& candidate) {
      return candidate.pipeline == row.pipeline && candidate.tile == row.tile;
    });
    if (spec != candidates.end()) {
      append_row(rows, {row.max_m, *spec, row.dependent_launch && waits_for_grids_ahead(*spec)});
    } else {
      append_range(rows, built_in, below, row.max_m);
    }
    below = row.max_m;
  }
  if (below != kAnyM) append_range(rows, built_in, below, kAnyM);
  return rows;
}

Specialization select_specialization(const QkvProblem& problem, const DeviceInfo& info, Target target, bool aligned,
                                     std::uint64_t m, bool dependent_launch, const TuningTable* tuning) {
  const std::vector<SelectedRow> rows = select_rows(problem, info, target, aligned, dependent_launch, tuning);
  for (const SelectedRow& row : rows) {
    if (m <= row.max_m) return row.spec;
  }
  return rows.back().spec;
}

std::vector<Specialization> needed_specializations(const QkvProblem& problem, const DeviceInfo& info, Target target,
                                                   std::uint64_t max_m, std::optional<bool> weights_are_constant,
                                                   const TuningTable* tuning) {
  std::vector<Specialization> specs;
  const auto add = [&](bool aligned, bool constant, const TuningTable* table) {
    for (const SelectedRow& row : select_rows(problem, info, target, aligned, constant, table)) {
      if (std::find(specs.begin(), specs.end(), row.spec) == specs.end()) specs.push_back(row.spec);
      if (row.max_m >= max_m) return;
    }
  };
  for (const bool constant : {false, true}) {
    if (weights_are_constant.value_or(constant) != constant) continue;
    for (const bool aligned : {true, false}) {
      add(aligned, constant, nullptr);
      if (tuning != nullptr) add(aligned, constant, tuning);
    }
  }
  return specs;
}

std::vector<Specialization> candidate_specializations(const QkvProblem& problem, const DeviceInfo& info, Target target,
                                                      bool aligned) {
  validate(problem);
  require_device(info);
  const bool vectors = aligned && rows_are_vectors(problem);
  std::vector<Specialization> specs;
  for (const TileRow& row : kTileRows) {
    if (row.aligned != vectors || !serves_layout(row, problem.layout)) continue;
    const Specialization spec = specialize(problem, target, vectors, row);
    // A tile that serves two ranges of M stands in the table twice.
    const bool listed = std::find(specs.begin(), specs.end(), spec) != specs.end();
    if (!listed && runs_on(row, spec, info)) specs.push_back(spec);
  }
  return specs;
}

std::vector<SelectedRow> candidate_specializations(const QkvProblem& problem, const DeviceInfo& info, Target target,
                                                   bool aligned, std::uint64_t max_m, bool weights_are_constant) {
  std::vector<SelectedRow> candidates;
  for (const Specialization& spec : candidate_specializations(problem, info, target, aligned)) {
    const std::uint64_t blocks_a_row = std::uint64_t{column_tiles(spec)} * spec.tile.cluster_k;
    const std::uint64_t row_tiles = max_m / spec.tile.block_m + (max_m % spec.tile.block_m != 0 ? 1 : 0);
    if (row_tiles > kMaxGridX / blocks_a_row) continue;
    if (weights_are_constant && waits_for_grids_ahead(spec)) candidates.push_back({max_m, spec, true});
    candidates.push_back({max_m, spec, false});
  }
  return candidates;
}

std::string tile_name(const TileConfig& tile) {
  std::string name = fmt::format("m{}n{}_w{}x{}x{}_s{}_b{}", tile.block_m, tile.block_n, tile.warps_m, tile.warps_n,
                                 tile.warps_k, tile.stages, tile.min_blocks);
  if (tile.block_k != TileConfig{}.block_k) name += fmt::format("_k{}", tile.block_k);
  if (tile.copy_warps != TileConfig{}.copy_warps) name += fmt::format("_p{}", tile.copy_warps);
  if (tile.cluster_k != TileConfig{}.cluster_k) name += fmt::format("_c{}", tile.cluster_k);
  if (tile.cluster_n != TileConfig{}.cluster_n) name += fmt::format("_n{}", tile.cluster_n);
  return name;
}

TileConfig parse_tile(const std::string& name) {
  TileConfig tile;
  int used = 0;
  const int fields = std::sscanf(name.c_str(), "m%un%u_w%ux%ux%u_s%u_b%u%n", &tile.block_m, &tile.block_n,
                                 &tile.warps_m, &tile.warps_n, &tile.warps_k, &tile.stages, &tile.min_blocks, &used);
  if (fields == 7) {
    const char* rest = name.c_str() + used;
    if (std::sscanf(rest, "_k%u%n", &tile.block_k, &used) == 1) rest += used;
    if (std::sscanf(rest, "_p%u%n", &tile.copy_warps, &used) == 1) rest += used;
    if (std::sscanf(rest, "_c%u%n", &tile.cluster_k, &used) == 1) rest += used;
    std::sscanf(rest, "_n%u", &tile.cluster_n);
  }
  // Printing it again finds whatever sscanf lets pass.
  if (fields != 7 || tile_name(tile) != name) {
    throw InvalidProblem(fmt::format("tile: got '{}', needs a name such as '{}' (qkvjit-dump --list prints them)", name,
                                     tile_name(kTileRows[0].tile)));
  }
  return tile;
}

bool is_exact(Pipeline pipeline) noexcept { return pipeline == Pipeline::gemv || pipeline == Pipeline::decode; }

const char* to_string(Pipeline pipeline) noexcept {
  switch (pipeline) {
    case Pipeline::simple:
      return "simple";
    case Pipeline::gemv:
      return "gemv";
    case Pipeline::decode:
      return "decode";
    case Pipeline::mma_sync:
      return "mma_sync";
    case Pipeline::wgmma:
      return "wgmma";
    case Pipeline::prefill:
      return "prefill";
    case Pipeline::prepack:
      return "prepack";
    case Pipeline::unpack:
      return "unpack";
  }
  return "unknown";
}

const char* to_string(WeightLayout layout) noexcept {
  switch (layout) {
    case WeightLayout::k8n:
      return "k8n";
    case WeightLayout::nk8:
      return "nk8";
    case WeightLayout::prepacked:
      return "prepacked";
  }
  return "unknown";
}

}  // namespace qkvjit
