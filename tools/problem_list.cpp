// SPDX-License-Identifier: Apache-2.0
#include "problem_list.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <unordered_set>

#include "bench_rows.h"
#include "compile/name_expression.h"
#include "qkvjit/error.h"
#include "support/file.h"

namespace qkvjit::tools {
namespace {

using Json = nlohmann::json;

/// One item of the list, with its place for messages.
struct Item {
  const std::string& list;
  std::size_t index;
  const Json& json;

  [[noreturn]] void refuse(const std::string& field, const std::string& reason) const {
    throw InvalidProblem(fmt::format("{}: problems[{}]{}{}: {}", list, index, field.empty() ? "" : ".", field, reason));
  }
};

std::string shown(const Json& value) {
  constexpr std::size_t kLongest = 80;
  const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > kLongest ? text.substr(0, kLongest) + "..." : text;
}

/// The field's positive integer, `otherwise` where it is absent; 0 for `otherwise` means it must be there.
std::uint64_t positive(const Item& item, const char* field, std::uint64_t otherwise = 0) {
  const auto found = item.json.find(field);
  if (found == item.json.end()) {
    if (otherwise == 0) item.refuse(field, "is missing; needs a positive integer (or give \"model\")");
    return otherwise;
  }
  if (!found->is_number_unsigned() || found->get<std::uint64_t>() == 0) {
    item.refuse(field, fmt::format("got {}, needs a positive integer", shown(*found)));
  }
  return found->get<std::uint64_t>();
}

/// The value among `choices` that a text names by to_string().
template <typename T, std::size_t kCount>
T choice(const Item& item, const char* field, const Json& value, const std::array<T, kCount>& choices) {
  std::vector<std::string> names;
  for (const T candidate : choices) {
    names.emplace_back(to_string(candidate));
    if (value.is_string() && value.get_ref<const std::string&>() == names.back()) return candidate;
  }
  item.refuse(field, fmt::format("got {}, needs one of {}", shown(value), fmt::join(names, ", ")));
}

constexpr std::array kDtypes{DType::f16, DType::bf16, DType::f32};
constexpr std::array kLayouts{WeightLayout::k8n, WeightLayout::nk8, WeightLayout::prepacked};

DType dtype(const Item& item, const char* field) {
  const auto found = item.json.find(field);
  return found == item.json.end() ? DType::f16 : choice(item, field, *found, kDtypes);
}

std::vector<WeightLayout> layouts(const Item& item) {
  const auto found = item.json.find("layout");
  if (found == item.json.end()) return {WeightLayout::k8n};
  if (!found->is_array()) return {choice(item, "layout", *found, kLayouts)};
  if (found->empty()) item.refuse("layout", "got an empty list, needs at least one layout");
  std::vector<WeightLayout> all;
  for (const Json& value : *found) all.push_back(choice(item, "layout", value, kLayouts));
  return all;
}

qkvbench::Shape shape(const Item& item) {
  const auto model = item.json.find("model");
  if (model == item.json.end()) {
    if (item.json.contains("tp")) item.refuse("tp", "goes with \"model\" only; divide n_q, n_k and n_v yourself");
    return {positive(item, "k"), positive(item, "n_q"), positive(item, "n_k"), positive(item, "n_v")};
  }
  for (const char* field : {"n_q", "n_k", "n_v", "k"}) {
    if (item.json.contains(field)) item.refuse(field, "given beside \"model\", which has its own; leave one out");
  }
  if (!model->is_string()) item.refuse("model", fmt::format("got {}, needs a model's name", shown(*model)));
  const std::uint64_t ranks = positive(item, "tp", 1);
  if (ranks > 1024) item.refuse("tp", fmt::format("got {}, needs at most 1024", ranks));
  try {
    return qkvbench::model_shape(model->get<std::string>(), static_cast<unsigned>(ranks));
  } catch (const InvalidProblem& error) {
    item.refuse("", error.what());
  }
}

void add_problems(const Item& item, std::vector<QkvProblem>& problems) {
  if (!item.json.is_object()) item.refuse("", fmt::format("got {}, needs an object", shown(item.json)));
  constexpr std::array kFields{"n_q",         "n_k",   "n_v", "k", "group_size", "layout", "activation_dtype",
                               "scale_dtype", "model", "tp"};
  for (const auto& [field, value] : item.json.items()) {
    if (std::ranges::find(kFields, field) == kFields.end()) {
      item.refuse(shown(field), fmt::format("is no field of a problem; needs {}", fmt::join(kFields, ", ")));
    }
  }
  const qkvbench::Shape extents = shape(item);
  QkvProblem problem;
  problem.n_q = extents.n_q;
  problem.n_k = extents.n_k;
  problem.n_v = extents.n_v;
  problem.k = extents.k;
  problem.group_size = positive(item, "group_size", problem.group_size);
  problem.activation_dtype = dtype(item, "activation_dtype");
  problem.scale_dtype = dtype(item, "scale_dtype");
  for (const WeightLayout layout : layouts(item)) {
    problem.layout = layout;
    try {
      validate(problem);
    } catch (const InvalidProblem& error) {
      item.refuse("", error.what());
    }
    problems.push_back(problem);
  }
}

}  // namespace

std::vector<QkvProblem> parse_problem_list(const std::string& name, const std::string& text) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception& error) {
    throw InvalidProblem(fmt::format("{}: is not valid JSON: {}", name, error.what()));
  }
  const Json* list = &json;
  if (json.is_object() && json.size() == 1 && json.contains("problems")) list = &json["problems"];
  if (!list->is_array() || list->empty()) {
    throw InvalidProblem(fmt::format(
        "{}: got {}, needs a list of problems such as [{{\"n_q\": 4096, \"n_k\": 1024, \"n_v\": 1024, \"k\": 4096}}] "
        "or {{\"problems\": [...]}}",
        name, shown(*list)));
  }
  std::vector<QkvProblem> problems;
  for (std::size_t i = 0; i < list->size(); ++i) add_problems({name, i, (*list)[i]}, problems);
  return problems;
}

std::vector<QkvProblem> read_problem_list(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file) throw InvalidProblem(fmt::format("{}: cannot be read: {}", path, error_text(errno)));
  return parse_problem_list(path, text.str());
}

std::vector<Specialization> specializations_for(const std::vector<QkvProblem>& problems,
                                                const std::vector<Target>& targets, int multiprocessors) {
  std::vector<Specialization> specs;
  std::unordered_set<Specialization, SpecializationHash> seen;
  for (const Target target : targets) {
    DeviceInfo info = typical_device(target.sm);
    if (multiprocessors != 0) info.multiprocessors = multiprocessors;
    for (const QkvProblem& problem : problems) {
      for (const Specialization& spec : needed_specializations(problem, info, target)) {
        if (seen.insert(spec).second) specs.push_back(spec);
      }
    }
  }
  return specs;
}

std::vector<Specialization> read_specializations(const std::string& path, const std::vector<std::string>& targets,
                                                 int multiprocessors) {
  std::vector<Target> parsed;
  for (const std::string& target : targets) parsed.push_back(parse_target(target));
  return specializations_for(read_problem_list(path), parsed, multiprocessors);
}

}  // namespace qkvjit::tools
