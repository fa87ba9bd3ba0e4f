// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/quantize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "qkvjit/error.h"

namespace qkvjit {
namespace {

constexpr int kLargest = 7;  // the scale maps the largest magnitude of a group to it

void require_size(const char* name, std::size_t got, std::size_t needed, std::size_t rows, std::size_t columns) {
  if (got == needed) return;
  throw InvalidProblem(fmt::format("{}: got {} elements, needs {} for [{}, {}]", name, got, needed, rows, columns));
}

void require_octets(const char* operation, std::size_t k) {
  if (k % 8 == 0) return;
  throw InvalidProblem(fmt::format(
      "{}: k: got {}, needs a multiple of 8, for a word holds 8; pad the weights with zeros", operation, k));
}

/// Index of the word that holds (8*row … 8*row+7, column).
std::size_t word_index(std::size_t row, std::size_t column, std::size_t rows, std::size_t n, WeightLayout layout) {
  return layout == WeightLayout::k8n ? row * n + column : column * rows + row;
}

}  // namespace

QuantizedMatrix quantize(std::span<const float> w, std::size_t k, std::size_t n, std::size_t group_size) {
  if (group_size == 0 || k % group_size != 0) {
    throw InvalidProblem(fmt::format("quantize: k: got {}, needs a multiple of the group size {}", k, group_size));
  }
  require_size("quantize: w", w.size(), k * n, k, n);
  QuantizedMatrix out;
  out.k = k;
  out.n = n;
  out.group_size = group_size;
  out.q.resize(k * n);
  out.scales.resize(k / group_size * n);
  for (std::size_t group = 0; group < k / group_size; ++group) {
    for (std::size_t column = 0; column < n; ++column) {
      float largest = 0;
      for (std::size_t row = group * group_size; row < (group + 1) * group_size; ++row) {
        const float value = w[row * n + column];
        if (!std::isfinite(value)) {
          throw InvalidProblem(
              fmt::format("quantize: w: got {} at [{}, {}], needs finite weights", value, row, column));
        }
        largest = std::max(largest, std::fabs(value));
      }
      const std::uint16_t scale_bits = float_to_f16(largest / kLargest);
      const float scale = f16_to_float(scale_bits);
      if (!std::isfinite(scale)) {
        throw InvalidProblem(
            fmt::format("quantize: w: group {} of column {} has a weight of magnitude {}, needs at most 7 * 65504, for "
                        "its scale is an f16",
                        group, column, largest));
      }
      out.scales[group * n + column] = scale_bits;
      for (std::size_t row = group * group_size; row < (group + 1) * group_size; ++row) {
        const float q = scale == 0 ? 0 : std::nearbyint(w[row * n + column] / scale);
        out.q[row * n + column] = static_cast<std::int8_t>(std::clamp(q, -8.f, 7.f));
      }
    }
  }
  return out;
}

std::vector<std::uint32_t> pack(std::span<const std::int8_t> q, std::size_t k, std::size_t n, WeightLayout layout) {
  require_octets("pack", k);
  require_size("pack: q", q.size(), k * n, k, n);
  std::vector<std::uint32_t> words(k / 8 * n);
  for (std::size_t row = 0; row < k; ++row) {
    for (std::size_t column = 0; column < n; ++column) {
      const int value = q[row * n + column];
      if (value < -8 || value > 7) {
        throw InvalidProblem(fmt::format("pack: q: got {} at [{}, {}], needs -8 … 7", value, row, column));
      }
      words[word_index(row / 8, column, k / 8, n, layout)] |= (static_cast<std::uint32_t>(value) & 15)
                                                              << (4 * (row % 8));
    }
  }
  return words;
}

std::vector<std::int8_t> unpack(std::span<const std::uint32_t> words, std::size_t k, std::size_t n,
                                WeightLayout layout) {
  require_octets("unpack", k);
  require_size("unpack: words", words.size(), k / 8 * n, layout == WeightLayout::k8n ? k / 8 : n,
               layout == WeightLayout::k8n ? n : k / 8);
  std::vector<std::int8_t> q(k * n);
  for (std::size_t row = 0; row < k; ++row) {
    for (std::size_t column = 0; column < n; ++column) {
      const std::uint32_t word = words[word_index(row / 8, column, k / 8, n, layout)];
      const int nibble = static_cast<int>(word >> (4 * (row % 8)) & 15);
      q[row * n + column] = static_cast<std::int8_t>(nibble < 8 ? nibble : nibble - 16);
    }
  }
  return q;
}

}  // namespace qkvjit
