// SPDX-License-Identifier: Apache-2.0
// A Specialization as text: the NVRTC name expression that picks its kernel, and the one list of its fields that
// expression, hash and printed form are made from. Pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include "qkvjit/select.h"
#include "qkvjit/specialization.h"
#include "qkvjit/tensor.h"

namespace qkvjit {

/// Calls visit(name, value) for every field, nested structs flattened in order of declaration. A new field that is
/// missing here does not compile: the structured bindings count them.
template <typename Spec, typename Visit>
void for_each_field(const Spec& spec, Visit&& visit) {
  const auto& [pipeline, layout, activation_dtype, scale_dtype, n_q, n_k, n_v, k, group_size, aligned, tile, target] =
      spec;
  const auto& [block_m, block_n, warps_m, warps_n, warps_k, stages, min_blocks, block_k, copy_warps, cluster_k,
               cluster_n] = tile;
  const auto& [sm, suffix] = target;
  visit("pipeline", pipeline);
  visit("layout", layout);
  visit("activation_dtype", activation_dtype);
  visit("scale_dtype", scale_dtype);
  visit("n_q", n_q);
  visit("n_k", n_k);
  visit("n_v", n_v);
  visit("k", k);
  visit("group_size", group_size);
  visit("aligned", aligned);
  visit("tile.block_m", block_m);
  visit("tile.block_n", block_n);
  visit("tile.warps_m", warps_m);
  visit("tile.warps_n", warps_n);
  visit("tile.warps_k", warps_k);
  visit("tile.stages", stages);
  visit("tile.min_blocks", min_blocks);
  visit("tile.block_k", block_k);
  visit("tile.copy_warps", copy_warps);
  visit("tile.cluster_k", cluster_k);
  visit("tile.cluster_n", cluster_n);
  visit("target.sm", sm);
  visit("target.suffix", suffix);
}

/// The value of a field as describe() prints it.
template <typename T>
std::string field_text(T value) {
  if constexpr (std::is_enum_v<T>) {
    return to_string(value);
  } else if constexpr (std::is_same_v<T, char>) {
    return value == '\0' ? std::string() : std::string(1, value);
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else {
    return std::to_string(value);
  }
}

/// The type spelled out, designated initialisers:
/// "qkvjit::qkv_decode<qkvjit::Specialization{.pipeline = qkvjit::Pipeline::decode, …}>".
std::string name_expression(const Specialization& spec);

/// "pipeline=decode layout=k8n … target.sm=90 target.suffix=": complete and unambiguous, for messages and `info`.
std::string describe(const Specialization& spec);

/// "qkv_decode m16n64_w1x1x8_s4_b2 sm_90": short, for logs, progress and timelines.
std::string kernel_label(const Specialization& spec);

/// The template file that holds the pipeline's kernel: "qkv_decode.cu".
std::string template_file(Pipeline pipeline);

struct SpecializationHash {
  std::size_t operator()(const Specialization& spec) const noexcept;
};

}  // namespace qkvjit
