// SPDX-License-Identifier: Apache-2.0
#include "compile/name_expression.h"

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

namespace qkvjit {
namespace {

template <typename T>
std::string value_code(T value) {
  if constexpr (std::is_same_v<T, Pipeline>) {
    return fmt::format("qkvjit::Pipeline::{}", to_string(value));
  } else if constexpr (std::is_same_v<T, WeightLayout>) {
    return fmt::format("qkvjit::WeightLayout::{}", to_string(value));
  } else if constexpr (std::is_same_v<T, DType>) {
    return fmt::format("qkvjit::DType::{}", to_string(value));
  } else if constexpr (std::is_same_v<T, char>) {
    return fmt::format("static_cast<char>({})", static_cast<int>(value));
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else {
    return fmt::format("{}u", value);
  }
}

}  // namespace

std::string name_expression(const Specialization& spec) {
  // Fields of a nested struct follow each other, so a change of prefix opens or closes its braces.
  std::string text = fmt::format("qkvjit::qkv_{}<qkvjit::Specialization{{", to_string(spec.pipeline));
  std::string_view open_struct;
  bool first = true;
  for_each_field(spec, [&](std::string_view name, auto value) {
    const std::size_t dot = name.find('.');
    const std::string_view prefix = dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
    const std::string_view member = dot == std::string_view::npos ? name : name.substr(dot + 1);
    if (prefix != open_struct && !open_struct.empty()) text += "}";
    if (!first) text += ", ";
    if (prefix != open_struct && !prefix.empty()) {
      text += fmt::format(".{} = qkvjit::{}{{", prefix, prefix == "tile" ? "TileConfig" : "Target");
    }
    open_struct = prefix;
    text += fmt::format(".{} = {}", member, value_code(value));
    first = false;
  });
  return text + "}}>";
}

std::string describe(const Specialization& spec) {
  std::string text;
  for_each_field(spec, [&](std::string_view name, auto value) {
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, field_text(value));
  });
  return text;
}

std::string kernel_label(const Specialization& spec) {
  return fmt::format("qkv_{} {} {}", to_string(spec.pipeline), tile_name(spec.tile), to_string(spec.target));
}

std::string template_file(Pipeline pipeline) { return fmt::format("qkv_{}.cu", to_string(pipeline)); }

std::size_t SpecializationHash::operator()(const Specialization& spec) const noexcept {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for_each_field(spec, [&](std::string_view, auto value) {
    // FNV-1a over whole values, finished by a multiply-shift: fields are small, keys are few.
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x100000001b3u;
    hash ^= hash >> 29;
  });
  return static_cast<std::size_t>(hash);
}

}  // namespace qkvjit
