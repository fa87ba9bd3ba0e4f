// SPDX-License-Identifier: Apache-2.0
// The numeric reference: plain loops in double precision over the raw words and scales, written from the contract
// alone. Includes the standard library only and shares no code with the product, so that a mistake there cannot hide
// here. Pure functions, safe from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace qkvref {

/// How a pipeline forms its weights from an integer q and its group's scale s.
enum class Arithmetic {
  rounded,  ///< w = q*s rounded to f16, ties to even; overflow gives inf
  exact,    ///< w = q*s
};

/// One packed matrix: eight two's complement nibbles a word, the lowest k in the lowest nibble.
struct Matrix4 {
  const std::uint32_t* words;   ///< [K/8, N], or [N, K/8] where nk8
  const std::uint16_t* scales;  ///< f16 [K/group, N]
  std::size_t n;
  bool nk8;
};

/// One output: the sum, S = sqrt(sum of (x*w)^2), and how far from the sum a right answer may be:
///   (2^-11 + K * 2^-26) * |want| + 2^-11 * S + 2^-25
struct Element {
  double want = 0;
  double s_abs = 0;
  double tolerance = 0;
  bool any_non_finite = false;  ///< `exact` with inf among the inputs: every non-finite result is right
};

/// IEEE binary16.
double f16_to_double(std::uint16_t bits);
/// Round to nearest, ties to even; overflow gives inf.
std::uint16_t double_to_f16(double value);

/// The integer at (k, column).
int weight(const Matrix4& w, std::size_t k_extent, std::size_t k, std::size_t column);

/// x_row [K] times column `column`.
Element project_element(const std::uint16_t* x_row, const Matrix4& w, std::size_t k_extent, std::size_t group,
                        std::size_t column, Arithmetic arithmetic);

/// x [m, K] times w, all columns, row-major [m, N]; on `threads` threads (0: as many as the machine has).
std::vector<Element> project(const std::uint16_t* x, std::size_t m, const Matrix4& w, std::size_t k_extent,
                             std::size_t group, Arithmetic arithmetic, unsigned threads = 0);

/// Whether the f16 `got` is a right answer. Within the tolerance of the overflow edge (65520) both the largest finite
/// value and inf are.
bool accept(std::uint16_t got, const Element& element);

/// Errors over many elements; non-finite ones and those next to the overflow edge are counted apart.
struct ErrorStatistics {
  std::size_t count = 0;
  std::size_t rejected = 0;  ///< accept() said no
  double worst_ratio = 0;    ///< largest |got - want| / tolerance
  double error_squares = 0;
  double rounding_squares = 0;  ///< of the error that rounding `want` alone makes
  double want_squares = 0;
  double got_squares = 0;
  double products = 0;  ///< sum of got*want
  double error_sum = 0;

  void add(std::uint16_t got, const Element& element);
  /// rms error over that of rounding alone; 1 is perfect.
  [[nodiscard]] double rms_ratio() const;
  /// ||got - want|| / ||want||
  [[nodiscard]] double relative_error() const;
  [[nodiscard]] double cosine() const;
  [[nodiscard]] double mean_signed_error() const;
};

}  // namespace qkvref
