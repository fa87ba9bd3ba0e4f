// SPDX-License-Identifier: Apache-2.0
#include "bench_rows.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>

#include "qkvjit/error.h"

namespace qkvbench {

using qkvjit::InvalidProblem;

double bytes_of(const Shape& s, std::uint64_t m) {
  const auto k = static_cast<double>(s.k), n = static_cast<double>(s.n()), tokens = static_cast<double>(m);
  return k * n / 2 + k / 128 * n * 2 + 2 * tokens * (k + n);
}

Shape parse_shape(const std::string& text) {
  unsigned long long k = 0, q = 0, kk = 0, v = 0;
  int used = 0;
  if (std::sscanf(text.c_str(), "%llu:%llu,%llu,%llu%n", &k, &q, &kk, &v, &used) != 4 || text.c_str()[used] != '\0' ||
      k == 0 || q == 0 || kk == 0 || v == 0) {
    throw InvalidProblem(fmt::format("--shape: got '{}', needs K:NQ,NK,NV such as 4096:4096,1024,1024", text));
  }
  return {k, q, kk, v};
}

std::string shape_text(const Shape& s) { return fmt::format("{}:{},{},{}", s.k, s.n_q, s.n_k, s.n_v); }

const std::vector<Model>& models() {
  static const std::vector<Model> kModels{
      {"llama-2-7b", 4096, 32, 32, 128},  {"llama-2-13b", 5120, 40, 40, 128}, {"llama-2-70b", 8192, 64, 8, 128},
      {"llama-3-8b", 4096, 32, 8, 128},   {"llama-3-70b", 8192, 64, 8, 128},  {"mistral-7b", 4096, 32, 8, 128},
      {"qwen2.5-7b", 3584, 28, 4, 128},   {"qwen2.5-14b", 5120, 40, 8, 128},  {"qwen2.5-32b", 5120, 40, 8, 128},
      {"qwen2.5-72b", 8192, 64, 8, 128},  {"qwen3-8b", 4096, 32, 8, 128},     {"qwen3-32b", 5120, 64, 8, 128},
      {"mixtral-8x7b", 4096, 32, 8, 128},
  };
  return kModels;
}

Shape model_shape(const std::string& name, unsigned tensor_parallel) {
  const auto model = std::find_if(models().begin(), models().end(), [&](const Model& m) { return m.name == name; });
  if (model == models().end()) {
    std::vector<std::string> names;
    for (const Model& m : models()) names.push_back(m.name);
    throw InvalidProblem(fmt::format("--model: got '{}', needs one of {}", name, fmt::join(names, ", ")));
  }
  if (tensor_parallel == 0 || model->heads % tensor_parallel != 0) {
    throw InvalidProblem(
        fmt::format("--tp: got {}, needs a divisor of {}'s {} heads", tensor_parallel, name, model->heads));
  }
  if (model->kv_heads > tensor_parallel && model->kv_heads % tensor_parallel != 0) {
    throw InvalidProblem(fmt::format("--tp: got {}, needs a divisor or a multiple of {}'s {} key and value heads",
                                     tensor_parallel, name, model->kv_heads));
  }
  const std::uint64_t kv = std::max<std::uint64_t>(model->kv_heads / tensor_parallel, 1) * model->head_size;
  return {model->hidden, model->heads / tensor_parallel * model->head_size, kv, kv};
}

std::vector<Shape> core_shapes() {
  return {{4096, 4096, 4096, 4096}, {8192, 8192, 8192, 8192}, {4096, 4096, 1024, 1024}, {8192, 8192, 1024, 1024}};
}

std::vector<Shape> full_shapes() {
  std::vector<Shape> shapes = core_shapes();
  for (const Shape& shape : {Shape{5120, 5120, 5120, 5120},
                             {3584, 3584, 512, 512},
                             {5120, 8192, 1024, 1024},
                             {8192, 4096, 512, 512},
                             {8192, 2048, 256, 256},
                             {8192, 1024, 128, 128}}) {
    shapes.push_back(shape);
  }
  return shapes;
}

std::vector<Shape> prefill_shapes() {
  std::vector<Shape> shapes = core_shapes();
  shapes.push_back({3584, 3584, 512, 512});
  return shapes;
}

std::vector<std::uint64_t> core_ms() { return {1, 8, 16, 32, 64}; }

std::vector<std::uint64_t> full_ms() {
  return {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192};
}

std::vector<std::uint64_t> prefill_ms() { return {128, 256, 512, 1024, 2048, 4096, 8192}; }

std::vector<std::uint64_t> prefill_sweep_ms() {
  return {65, 77, 96, 128, 130, 192, 256, 333, 384, 512, 777, 1024, 1500, 2048, 4096, 8192};
}

double tflops_of(const Row& row) {
  if (row.us <= 0) return 0;
  return 2 * static_cast<double>(row.m) * static_cast<double>(row.shape.k) * static_cast<double>(row.shape.n()) /
         row.us / 1e6;
}

std::optional<double> ratio_of(const Row& row) {
  if (!row.cublas_f16_us || row.us <= 0) return std::nullopt;
  return *row.cublas_f16_us / row.us;
}

unsigned burst_calls(double us) {
  constexpr double kBurstUs = 3500;
  return static_cast<unsigned>(std::clamp(kBurstUs / std::max(us, 1.0), 2.0, 192.0));
}

unsigned sets_for(std::uint64_t m, unsigned sets) { return m <= 256 ? sets : std::clamp(sets, 1u, 8u); }

std::size_t group_length(std::span<const Row> rows) {
  std::size_t length = 0;
  while (length < rows.size() && rows[length].same_operands(rows[0])) ++length;
  return length;
}

std::uint64_t most_tokens(std::span<const Row> rows, const Shape& shape) {
  std::uint64_t most = 0;
  for (const Row& row : rows) {
    if (row.shape == shape) most = std::max(most, row.m);
  }
  return most;
}

std::vector<Row> plan_rows(const std::vector<Shape>& shapes, const std::vector<std::uint64_t>& ms,
                           const std::vector<WeightLayout>& layouts, const std::vector<bool>& dependent) {
  std::vector<Row> rows;
  for (const Shape& shape : shapes) {
    for (const WeightLayout layout : layouts) {
      for (const std::uint64_t m : ms) {
        for (const bool launch : dependent) {
          Row row;
          row.shape = shape;
          row.m = m;
          row.layout = layout;
          row.dependent_launch = launch;
          rows.push_back(row);
        }
      }
    }
  }
  return rows;
}

std::vector<Row> remaining(const std::vector<Row>& wanted, const std::vector<Row>& done) {
  std::vector<Row> rows;
  for (const Row& row : wanted) {
    const bool have = std::any_of(done.begin(), done.end(), [&](const Row& other) {
      return other.verified && other.us > 0 && row.same_request(other);
    });
    if (!have) rows.push_back(row);
  }
  return rows;
}

}  // namespace qkvbench
