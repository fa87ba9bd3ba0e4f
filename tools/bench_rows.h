// SPDX-License-Identifier: Apache-2.0
// What qkvjit-bench times: shapes, presets by model, the sets, and which rows a file has already. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qkvjit/specialization.h"

namespace qkvbench {

using qkvjit::WeightLayout;

/// Columns of Q, K and V for K inputs.
struct Shape {
  std::uint64_t k = 0, n_q = 0, n_k = 0, n_v = 0;

  [[nodiscard]] std::uint64_t n() const { return n_q + n_k + n_v; }
  bool operator==(const Shape&) const = default;
};

/// One row of the bench, and what was measured. Times in microseconds a call; 0 where not measured.
struct Row {
  Shape shape;
  std::uint64_t m = 0;
  WeightLayout layout = WeightLayout::prepacked;
  bool dependent_launch = false;  ///< the promise of constant weights was given
  bool interleaved = false;       ///< timed without rest, in turn with cuBLAS; with more than kFewTokens tokens alone

  std::string pipeline, tile;
  bool launched_dependent = false;  ///< whether the row chosen is launched so
  double us = 0, us_min = 0, us_max = 0;
  double limit_us = 0;                  ///< bytes over the measured read bandwidth
  std::optional<double> cublas_f16_us;  ///< the merged GEMM in f16
  double cublas_us_min = 0, cublas_us_max = 0;
  std::optional<double> three_launches_us;  ///< the same columns in three launches, one after the other
  bool verified = false;

  /// Whether both ask for the same measurement.
  [[nodiscard]] bool same_request(const Row& other) const {
    return same_operands(other) && dependent_launch == other.dependent_launch && interleaved == other.interleaved;
  }
  /// Whether both are timed with the same operands, and so against each other where there are many tokens.
  [[nodiscard]] bool same_operands(const Row& other) const {
    return shape == other.shape && m == other.m && layout == other.layout;
  }
};

/// Up to here a call is limited by memory and timed over weights that no cache holds; beyond by power, and timed in
/// bursts.
inline constexpr std::uint64_t kFewTokens = 64;

/// 2 * M * K * N operations in the row's time, in units of 1e12 a second; 0 where not timed.
double tflops_of(const Row& row);
/// cuBLAS's time over ours, above 1 where we are faster; nothing where one was not timed.
std::optional<double> ratio_of(const Row& row);

/// Launches of a burst's graph: 2 to 5 ms of a call that takes `us`, at least 2 and at most 192 of them.
unsigned burst_calls(double us);
/// How many of `sets` weight sets, which exceed the cache many times, are gone through at `m` tokens: all of them up to
/// 256, where weights must come from memory; then 8, for x and outputs alone are larger than what is left of the cache.
unsigned sets_for(std::uint64_t m, unsigned sets);

/// Bytes that a call must move: weights, scales (f16, groups of 128), x and outputs.
double bytes_of(const Shape& shape, std::uint64_t m);

/// "4096:4096,1024,1024" (K:Nq,Nk,Nv). Throws InvalidProblem.
Shape parse_shape(const std::string& text);
std::string shape_text(const Shape& shape);

struct Model {
  std::string name;
  std::uint64_t hidden, heads, kv_heads, head_size;
};
const std::vector<Model>& models();
/// The shape of one rank of `tensor_parallel`: whole heads; KV heads are replicated where there are fewer than ranks.
/// Throws InvalidProblem for an unknown name or heads that do not divide.
Shape model_shape(const std::string& name, unsigned tensor_parallel);

std::vector<Shape> core_shapes();
std::vector<Shape> full_shapes();
std::vector<Shape> prefill_shapes();
std::vector<std::uint64_t> core_ms();
std::vector<std::uint64_t> full_ms();
std::vector<std::uint64_t> prefill_ms();
/// From 65 up, odd ones among them.
std::vector<std::uint64_t> prefill_sweep_ms();

/// All combinations, shape by shape, so that operands are made once a shape and layout.
std::vector<Row> plan_rows(const std::vector<Shape>& shapes, const std::vector<std::uint64_t>& ms,
                           const std::vector<WeightLayout>& layouts, const std::vector<bool>& dependent);

/// How many rows from the first on have the same operands.
std::size_t group_length(std::span<const Row> rows);
/// The largest M of the rows of `shape`.
std::uint64_t most_tokens(std::span<const Row> rows, const Shape& shape);

/// `wanted` without those that `done` has verified and timed.
std::vector<Row> remaining(const std::vector<Row>& wanted, const std::vector<Row>& done);

}  // namespace qkvbench
