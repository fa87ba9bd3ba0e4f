// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/select.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "qkvjit/error.h"
#include "select/tile_table.h"

namespace qkvjit {
namespace {

/// Whether every row of weights, scales and outputs is a multiple of 16 bytes. K % 128 == 0 sees to x and nk8.
bool rows_are_vectors(const QkvProblem& problem) {
  return problem.n_q % 8 == 0 && problem.n_k % 8 == 0 && problem.n_v % 8 == 0;
}

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
  return spec;
}

bool serves_layout(const TileRow& row, WeightLayout layout) { return !row.only.has_value() || *row.only == layout; }

void require_device(const DeviceInfo& info) {
  if (info.sm() >= 80) return;
  throw UnsupportedDevice(fmt::format("device {} ({}) has compute capability {}.{}; qkvjit needs 8.0 or newer (Ampere)",
                                      info.ordinal, info.name, info.sm_major, info.sm_minor));
}

}  // namespace

std::vector<SelectedRow> select_rows(const QkvProblem& problem, const DeviceInfo& info, Target target, bool aligned) {
  validate(problem);
  require_device(info);
  const bool vectors = aligned && rows_are_vectors(problem);
  std::vector<SelectedRow> rows;
  for (const TileRow& row : kTileRows) {
    if (row.aligned != vectors || row.max_m == 0 || !serves_layout(row, problem.layout)) continue;
    const Specialization spec = specialize(problem, target, vectors, row);
    if (smem_bytes(spec) > info.smem_per_block_bytes) continue;
    if (rows.empty() || rows.back().max_m != row.max_m) rows.push_back({row.max_m, spec});
  }
  if (rows.empty() || rows.back().max_m != kAnyM) {
    throw UnsupportedDevice(fmt::format("device {} ({}) allows a block {} bytes of shared memory; no tile fits",
                                        info.ordinal, info.name, info.smem_per_block_bytes));
  }
  return rows;
}

Specialization select_specialization(const QkvProblem& problem, const DeviceInfo& info, Target target, bool aligned,
                                     std::uint64_t m) {
  const std::vector<SelectedRow> rows = select_rows(problem, info, target, aligned);
  for (const SelectedRow& row : rows) {
    if (m <= row.max_m) return row.spec;
  }
  return rows.back().spec;
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
    if (!listed && smem_bytes(spec) <= info.smem_per_block_bytes) specs.push_back(spec);
  }
  return specs;
}

std::string tile_name(const TileConfig& tile) {
  return fmt::format("m{}n{}_w{}x{}x{}_s{}_b{}{}", tile.block_m, tile.block_n, tile.warps_m, tile.warps_n, tile.warps_k,
                     tile.stages, tile.min_blocks, tile.cluster_k > 1 ? fmt::format("_c{}", tile.cluster_k) : "");
}

TileConfig parse_tile(const std::string& name) {
  TileConfig tile;
  // The cluster is left out where it is one block; the comparison with the name finds whatever sscanf lets pass.
  if (std::sscanf(name.c_str(), "m%un%u_w%ux%ux%u_s%u_b%u_c%u", &tile.block_m, &tile.block_n, &tile.warps_m,
                  &tile.warps_n, &tile.warps_k, &tile.stages, &tile.min_blocks, &tile.cluster_k) < 7 ||
      tile_name(tile) != name) {
    throw InvalidProblem(fmt::format("tile: got '{}', needs a name such as '{}' (qkvjit-dump --list prints them)", name,
                                     tile_name(kTileRows[0].tile)));
  }
  return tile;
}

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
