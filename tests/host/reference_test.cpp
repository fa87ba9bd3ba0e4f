// SPDX-License-Identifier: Apache-2.0
// The reference against numbers worked out by hand.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>

#include "reference/qkv_reference.h"

using namespace qkvref;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Small {
  std::vector<std::uint16_t> x = std::vector<std::uint16_t>(128);
  std::vector<std::uint32_t> words = std::vector<std::uint32_t>(16);
  std::vector<std::uint16_t> scales{double_to_f16(1)};
  [[nodiscard]] Element result(Arithmetic arithmetic) const {
    return project_element(x.data(), {words.data(), scales.data(), 1, false}, 128, 128, 0, arithmetic);
  }
};

}  // namespace

TEST_SUITE("reference") {
  TEST_CASE("f16: known patterns and ties") {
    CHECK(f16_to_double(0x3c00) == 1);
    CHECK(f16_to_double(0xc000) == -2);
    CHECK(f16_to_double(0x0001) == std::ldexp(1.0, -24));
    CHECK(f16_to_double(0x03ff) == std::ldexp(1023.0, -24));
    CHECK(f16_to_double(0x7bff) == 65504);
    CHECK(f16_to_double(0x7c00) == kInfinity);
    CHECK(std::isnan(f16_to_double(0x7c01)));
    CHECK(double_to_f16(2049) == double_to_f16(2048));  // ties to even
    CHECK(double_to_f16(2051) == double_to_f16(2052));
    CHECK(f16_to_double(double_to_f16(65519.999)) == 65504);
    CHECK(f16_to_double(double_to_f16(65520)) == kInfinity);
    CHECK(double_to_f16(std::ldexp(1.0, -25)) == 0);  // a tie between 0 and the smallest
    CHECK(double_to_f16(std::ldexp(1.5, -25)) == 1);
    CHECK(double_to_f16(-0.0) == 0x8000);
    for (unsigned bits = 0; bits < 0x7c00; ++bits)
      REQUIRE(double_to_f16(f16_to_double(static_cast<std::uint16_t>(bits))) == bits);
  }

  TEST_CASE("the lowest k sits in the lowest nibble, and nibbles are two's complement") {
    Small c;
    c.words[0] = 0x00000008;  // k = 0: -8
    c.words[1] = 0x70000000;  // k = 15: 7
    c.x[0] = double_to_f16(128);
    c.x[15] = double_to_f16(0.5);
    const Element element = c.result(Arithmetic::exact);
    CHECK(element.want == -1024 + 3.5);
    CHECK(element.s_abs == doctest::Approx(std::sqrt(1024.0 * 1024 + 3.5 * 3.5)));
    CHECK(element.tolerance == doctest::Approx((std::ldexp(1.0, -11) + 128 * std::ldexp(1.0, -26)) * 1020.5 +
                                               element.s_abs / 2048 + std::ldexp(1.0, -25)));
  }

  TEST_CASE("rounded rounds each weight to f16, exact does not") {
    Small c;
    c.words[0] = 7;
    c.x[0] = double_to_f16(1);
    c.scales[0] = 0x3c01;  // 1 + 2^-10; times 7 is 7.0068359375, between 7.00390625 and 7.0078125
    CHECK(c.result(Arithmetic::exact).want == 7 * (1 + std::ldexp(1.0, -10)));
    CHECK(c.result(Arithmetic::rounded).want == 7.0078125);
    c.scales[0] = double_to_f16(60000);
    CHECK(c.result(Arithmetic::exact).want == 7 * 60000.0);
    CHECK(c.result(Arithmetic::rounded).want == kInfinity);
  }

  TEST_CASE("the two layouts hold the same matrix; groups have their own scale") {
    const std::size_t k = 256, n = 3;
    std::mt19937 random(4);
    std::vector<std::uint32_t> k8n(k / 8 * n), nk8(k8n.size());
    for (auto& word : k8n) word = static_cast<std::uint32_t>(random());
    for (std::size_t row = 0; row < k / 8; ++row) {
      for (std::size_t column = 0; column < n; ++column) nk8[column * (k / 8) + row] = k8n[row * n + column];
    }
    std::vector<std::uint16_t> scales(2 * n), x(k);
    for (auto& s : scales) s = double_to_f16(0.01 + (random() % 100) / 1000.0);
    for (auto& v : x) v = double_to_f16((random() % 2000) / 1000.0 - 1);
    const auto a = project(x.data(), 1, {k8n.data(), scales.data(), n, false}, k, 128, Arithmetic::rounded);
    const auto b = project(x.data(), 1, {nk8.data(), scales.data(), n, true}, k, 128, Arithmetic::rounded, 1);
    for (std::size_t column = 0; column < n; ++column) {
      double want = 0;
      for (std::size_t i = 0; i < k; ++i) {
        const int nibble = static_cast<int>(k8n[i / 8 * n + column] >> (4 * (i % 8)) & 15);
        const double w = f16_to_double(
            double_to_f16((nibble < 8 ? nibble : nibble - 16) * f16_to_double(scales[i / 128 * n + column])));
        want += f16_to_double(x[i]) * w;
      }
      CHECK(a[column].want == want);
      CHECK(b[column].want == want);
    }
  }

  TEST_CASE("accept: the bound, the overflow edge, NaN and inf") {
    Element element{.want = 100, .s_abs = 0, .tolerance = 0.5};
    CHECK(accept(double_to_f16(100.5), element));
    CHECK_FALSE(accept(double_to_f16(100.5625), element));
    CHECK_FALSE(accept(0x7e00, element));
    element = {.want = 65519, .s_abs = 0, .tolerance = 2};
    CHECK(accept(0x7bff, element));
    CHECK(accept(0x7c00, element));
    CHECK_FALSE(accept(0xfc00, element));
    element = {.want = 65523, .s_abs = 0, .tolerance = 2};
    CHECK_FALSE(accept(0x7bff, element));
    CHECK(accept(0x7c00, element));
    element = {.want = 65400, .s_abs = 0, .tolerance = 2};
    CHECK_FALSE(accept(0x7c00, element));
    element = {.want = kInfinity, .s_abs = 0, .tolerance = 0};
    CHECK(accept(0x7c00, element));
    CHECK_FALSE(accept(0x7bff, element));
    Small c;
    c.words[0] = 0x11;
    c.x[0] = 0x7c00;
    CHECK(c.result(Arithmetic::rounded).want == kInfinity);
    CHECK(c.result(Arithmetic::exact).any_non_finite);
    c.x[1] = 0x7e00;
    CHECK(std::isnan(c.result(Arithmetic::rounded).want));
    CHECK_FALSE(c.result(Arithmetic::exact).any_non_finite);
    CHECK(accept(0x7e00, c.result(Arithmetic::exact)));
    CHECK_FALSE(accept(0x7c00, c.result(Arithmetic::exact)));
  }

  TEST_CASE("statistics: perfect rounding has a ratio of one, truncation shows as bias") {
    std::mt19937 random(5);
    std::uniform_real_distribution<double> uniform(1, 2);
    ErrorStatistics rounded, truncated;
    for (int i = 0; i < 20000; ++i) {
      const Element element{.want = uniform(random), .s_abs = 1, .tolerance = 1e-3};
      const std::uint16_t bits = double_to_f16(element.want);
      rounded.add(bits, element);
      truncated.add(f16_to_double(bits) > element.want ? static_cast<std::uint16_t>(bits - 1) : bits, element);
    }
    CHECK(rounded.rms_ratio() == doctest::Approx(1));
    CHECK(truncated.rms_ratio() > 1.9);
    CHECK(std::fabs(rounded.mean_signed_error()) < 1e-5);
    CHECK(truncated.mean_signed_error() < -4e-4);
    CHECK(rounded.cosine() == doctest::Approx(1));
    CHECK(rounded.relative_error() < 3e-4);
    CHECK(rounded.rejected == 0);
  }

  TEST_CASE("project is project_element for every element, whatever the arithmetic and the number of threads") {
    const std::size_t m = 5, k = 256, n = 7;
    std::mt19937 random(6);
    std::vector<std::uint32_t> words(k / 8 * n);
    for (auto& word : words) word = static_cast<std::uint32_t>(random());
    std::vector<std::uint16_t> scales(2 * n), x(m * k);
    for (auto& s : scales) s = double_to_f16(0.01 + (random() % 100) / 1000.0);
    for (auto& v : x) v = double_to_f16((random() % 2000) / 1000.0 - 1);
    x[2 * k + 9] = 0x7e00;  // NaN in row 2 only
    scales[3] = 0x7c00;     // inf in column 3 only
    const Matrix4 w{words.data(), scales.data(), n, false};
    for (const Arithmetic arithmetic : {Arithmetic::rounded, Arithmetic::exact}) {
      for (const unsigned threads : {1u, 3u}) {
        const auto all = project(x.data(), m, w, k, 128, arithmetic, threads);
        for (std::size_t row = 0; row < m; ++row) {
          for (std::size_t column = 0; column < n; ++column) {
            const Element one = project_element(x.data() + row * k, w, k, 128, column, arithmetic);
            const Element& same = all[row * n + column];
            CHECK((same.want == one.want || (std::isnan(same.want) && std::isnan(one.want))));
            CHECK(same.any_non_finite == one.any_non_finite);
            CHECK(std::isfinite(one.want) == (row != 2 && column != 3));
            if (row != 2 && column != 3) CHECK(same.tolerance == one.tolerance);
          }
        }
      }
    }
  }
}
