// SPDX-License-Identifier: Apache-2.0
#include "reference/qkv_reference.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

namespace qkvref {
namespace {

double decode_f16(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  double magnitude;
  if (exponent == 31) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, -24);
  } else {
    magnitude = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

const std::vector<double>& f16_table() {
  static const std::vector<double> table = [] {
    std::vector<double> values(65536);
    for (std::size_t bits = 0; bits < values.size(); ++bits)
      values[bits] = decode_f16(static_cast<std::uint16_t>(bits));
    return values;
  }();
  return table;
}

constexpr double kLargestF16 = 65504;
constexpr double kOverflowEdge = 65520;  // halfway to the next power of two's step; ties go to inf

/// One column's weights, and what its scales hold.
struct Column {
  std::vector<double> weights;
  bool has_nan = false;
  bool has_infinity = false;
};

Column dequantise_column(const Matrix4& w, std::size_t k_extent, std::size_t group, std::size_t column,
                         Arithmetic arithmetic) {
  Column result;
  result.weights.resize(k_extent);
  for (std::size_t k0 = 0; k0 < k_extent; k0 += group) {
    const double scale = f16_to_double(w.scales[k0 / group * w.n + column]);
    result.has_nan |= std::isnan(scale);
    result.has_infinity |= std::isinf(scale);
    std::array<double, 16> weights{};  // of the integers -8 … 7
    for (int q = -8; q < 8; ++q) {
      const double product = q * scale;
      weights[static_cast<std::size_t>(q + 8)] =
          arithmetic == Arithmetic::rounded ? f16_to_double(double_to_f16(product)) : product;
    }
    for (std::size_t k = k0; k < std::min(k0 + group, k_extent); ++k) {
      result.weights[k] = weights[static_cast<std::size_t>(weight(w, k_extent, k, column) + 8)];
    }
  }
  return result;
}

Element multiply(const std::uint16_t* x_row, const Column& column, Arithmetic arithmetic) {
  const std::vector<double>& table = f16_table();
  double sum = 0, squares = 0;
  bool has_nan = column.has_nan, has_infinity = column.has_infinity;
  const std::size_t k_extent = column.weights.size();
  for (std::size_t k = 0; k < k_extent; ++k) {
    const double product = table[x_row[k]] * column.weights[k];
    sum += product;
    squares += product * product;
    has_infinity |= (x_row[k] & 0x7fff) == 0x7c00;
    has_nan |= (x_row[k] & 0x7fff) > 0x7c00;
  }
  Element element;
  element.want = sum;
  if (arithmetic == Arithmetic::exact && (has_nan || has_infinity)) {
    element.want = std::numeric_limits<double>::quiet_NaN();
    element.any_non_finite = !has_nan;
  }
  element.s_abs = std::sqrt(squares);
  element.tolerance = (std::ldexp(1.0, -11) + static_cast<double>(k_extent) * std::ldexp(1.0, -26)) * std::fabs(sum) +
                      std::ldexp(element.s_abs, -11) + std::ldexp(1.0, -25);
  return element;
}

}  // namespace

double f16_to_double(std::uint16_t bits) { return f16_table()[bits]; }

std::uint16_t double_to_f16(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const double magnitude = std::fabs(value);
  if (magnitude >= kOverflowEdge) return sign | 0x7c00;
  // The spacing of f16 numbers around the magnitude: 2^-24 up to 2^-14, then 2^(e-10).
  const int exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
  const double steps = std::nearbyint(std::ldexp(magnitude, 10 - exponent));  // ties to even, the default mode
  // steps is 0 … 1023 below 2^-14 and 1024 … 2048 above; as bits the carry into the exponent comes by itself.
  const int bits = (exponent + 14) * 1024 + static_cast<int>(steps);
  return sign | static_cast<std::uint16_t>(bits);
}

int weight(const Matrix4& w, std::size_t k_extent, std::size_t k, std::size_t column) {
  const std::size_t row = k / 8;
  const std::uint32_t word = w.nk8 ? w.words[column * (k_extent / 8) + row] : w.words[row * w.n + column];
  const int nibble = static_cast<int>(word >> (4 * (k % 8)) & 15);
  return nibble < 8 ? nibble : nibble - 16;
}

Element project_element(const std::uint16_t* x_row, const Matrix4& w, std::size_t k_extent, std::size_t group,
                        std::size_t column, Arithmetic arithmetic) {
  return multiply(x_row, dequantise_column(w, k_extent, group, column, arithmetic), arithmetic);
}

std::vector<Element> project(const std::uint16_t* x, std::size_t m, const Matrix4& w, std::size_t k_extent,
                             std::size_t group, Arithmetic arithmetic, unsigned threads) {
  std::vector<Element> elements(m * w.n);
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t column = next++; column < w.n; column = next++) {
      const Column weights = dequantise_column(w, k_extent, group, column, arithmetic);
      for (std::size_t row = 0; row < m; ++row) {
        elements[row * w.n + column] = multiply(x + row * k_extent, weights, arithmetic);
      }
    }
  };
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::jthread> workers;
  for (unsigned i = 1; i < threads; ++i) workers.emplace_back(work);
  work();
  workers.clear();
  return elements;
}

bool accept(std::uint16_t got, const Element& element) {
  const double value = f16_to_double(got);
  if (element.any_non_finite) return !std::isfinite(value);
  if (std::isnan(element.want)) return std::isnan(value);
  if (std::isinf(element.want)) return value == element.want;
  if (std::isnan(value)) return false;
  const bool same_sign = std::signbit(value) == std::signbit(element.want);
  const double magnitude = std::fabs(element.want);
  if (std::isinf(value)) return same_sign && magnitude + element.tolerance >= kOverflowEdge;
  if (std::fabs(value) == kLargestF16 && same_sign && magnitude >= kLargestF16) {
    return magnitude - element.tolerance < kOverflowEdge;
  }
  return std::fabs(value - element.want) <= element.tolerance;
}

void ErrorStatistics::add(std::uint16_t got, const Element& element) {
  ++count;
  if (!accept(got, element)) ++rejected;
  const double value = f16_to_double(got);
  const double rounded = f16_to_double(double_to_f16(element.want));
  if (!std::isfinite(value) || !std::isfinite(rounded)) return;
  const double error = value - element.want;
  worst_ratio = std::max(worst_ratio, std::fabs(error) / element.tolerance);
  error_squares += error * error;
  rounding_squares += (rounded - element.want) * (rounded - element.want);
  want_squares += element.want * element.want;
  got_squares += value * value;
  products += value * element.want;
  error_sum += error;
}

double ErrorStatistics::rms_ratio() const {
  return rounding_squares == 0 ? (error_squares == 0 ? 1 : std::numeric_limits<double>::infinity())
                               : std::sqrt(error_squares / rounding_squares);
}
double ErrorStatistics::relative_error() const {
  return want_squares == 0 ? 0 : std::sqrt(error_squares / want_squares);
}
double ErrorStatistics::cosine() const {
  return want_squares == 0 || got_squares == 0 ? 1 : products / std::sqrt(want_squares * got_squares);
}
double ErrorStatistics::mean_signed_error() const { return count == 0 ? 0 : error_sum / static_cast<double>(count); }

}  // namespace qkvref
