// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "qkvjit/qkvjit.h"
#include "qkvjit/safetensors.h"
#include "reference/qkv_reference.h"

using namespace qkvjit;

TEST_SUITE("quantize") {
  TEST_CASE("float16: every pattern survives a round trip and equals the reference's value") {
    for (unsigned bits = 0; bits < 65536; ++bits) {
      const auto pattern = static_cast<std::uint16_t>(bits);
      const float value = f16_to_float(pattern);
      const double want = qkvref::f16_to_double(pattern);
      if (std::isnan(want)) {
        CHECK(std::isnan(value));
        CHECK(std::isnan(f16_to_float(float_to_f16(value))));
      } else {
        REQUIRE(static_cast<double>(value) == want);
        REQUIRE(float_to_f16(value) == pattern);
      }
    }
  }

  TEST_CASE("float16: rounding to nearest even agrees with the reference, between all neighbours and at random") {
    for (std::uint16_t bits = 0; bits < 0x7bff; ++bits) {
      const float low = f16_to_float(bits), high = f16_to_float(static_cast<std::uint16_t>(bits + 1));
      const float middle = (low + high) / 2;  // exact in f32
      for (const float value : {middle, std::nextafter(middle, 0.f), std::nextafter(middle, 1e9f)}) {
        REQUIRE(float_to_f16(value) == qkvref::double_to_f16(value));
        REQUIRE(float_to_f16(-value) == qkvref::double_to_f16(-value));
      }
    }
    std::mt19937 random(1);
    for (int i = 0; i < 200000; ++i) {
      const auto bits = static_cast<std::uint32_t>(random());
      float value;
      static_assert(sizeof(value) == sizeof(bits));
      std::memcpy(&value, &bits, sizeof(value));
      if (!std::isnan(value)) REQUIRE(float_to_f16(value) == qkvref::double_to_f16(value));
    }
    CHECK(float_to_f16(65519.f) == 0x7bff);
    CHECK(float_to_f16(65520.f) == 0x7c00);
    CHECK(float_to_f16(2049.f) == float_to_f16(2048.f));
    CHECK(float_to_f16(2051.f) == float_to_f16(2052.f));
  }

  TEST_CASE("pack: every nibble in every position, both layouts, read back by the reference") {
    const std::size_t k = 16, n = 16;
    std::vector<std::int8_t> q(k * n);
    for (std::size_t row = 0; row < k; ++row) {
      for (std::size_t column = 0; column < n; ++column) {
        q[row * n + column] = static_cast<std::int8_t>(static_cast<int>((row + column) % 16) - 8);
      }
    }
    for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8}) {
      const auto words = pack(q, k, n, layout);
      const qkvref::Matrix4 matrix{words.data(), nullptr, n, layout == WeightLayout::nk8};
      for (std::size_t row = 0; row < k; ++row) {
        for (std::size_t column = 0; column < n; ++column) {
          REQUIRE(qkvref::weight(matrix, k, row, column) == q[row * n + column]);
        }
      }
      CHECK(unpack(words, k, n, layout) == q);
    }
    CHECK(pack(std::vector<std::int8_t>{-8, 0, 0, 0, 0, 0, 0, 7}, 8, 1, WeightLayout::k8n)[0] == 0x70000008u);
  }

  TEST_CASE("pack and unpack: random round trips; the layouts are transposes of each other") {
    std::mt19937 random(2);
    for (const auto& [k, n] : {std::pair{8u, 1u}, {128u, 7u}, {384u, 40u}, {256u, 129u}}) {
      std::vector<std::uint32_t> words(k / 8 * n);
      for (auto& word : words) word = static_cast<std::uint32_t>(random());
      for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8}) {
        CHECK(pack(unpack(words, k, n, layout), k, n, layout) == words);
      }
      const auto q = unpack(words, k, n, WeightLayout::k8n);
      const auto transposed = pack(q, k, n, WeightLayout::nk8);
      for (unsigned row = 0; row < k / 8; ++row) {
        for (unsigned column = 0; column < n; ++column)
          REQUIRE(transposed[column * (k / 8) + row] == words[row * n + column]);
      }
    }
  }

  TEST_CASE("quantize: each weight is within half a step of its scale, the largest maps to 7") {
    const std::size_t k = 384, n = 33;
    std::mt19937 random(3);
    std::normal_distribution<float> normal(0, 0.05f);
    std::vector<float> w(k * n);
    for (auto& value : w) value = normal(random);
    for (std::size_t row = 0; row < 128; ++row) w[row * n + 5] = 0;  // an empty group
    const QuantizedMatrix matrix = quantize(w, k, n);
    for (std::size_t column = 0; column < n; ++column) {
      for (std::size_t group = 0; group < 3; ++group) {
        const float scale = f16_to_float(matrix.scales[group * n + column]);
        int largest = 0;
        for (std::size_t row = group * 128; row < group * 128 + 128; ++row) {
          const int q = matrix.q[row * n + column];
          largest = std::max(largest, std::abs(q));
          REQUIRE(std::fabs(static_cast<float>(q) * scale - w[row * n + column]) <= 0.5001f * scale);
        }
        CHECK(largest == (column == 5 && group == 0 ? 0 : 7));
      }
    }
    CHECK(matrix.scales[5] == 0);
  }

  TEST_CASE("quantize, pack, unpack: what is refused, and what the message says") {
    const std::vector<float> w(256);
    CHECK_THROWS_WITH_AS(quantize(w, 200, 1), doctest::Contains("multiple of the group size 128"), InvalidProblem);
    CHECK_THROWS_WITH_AS(quantize(w, 128, 3), doctest::Contains("got 256 elements, needs 384"), InvalidProblem);
    std::vector<float> bad(256, 1.f);
    bad[130 * 1 + 7] = std::numeric_limits<float>::quiet_NaN();
    CHECK_THROWS_WITH_AS(quantize(bad, 256, 1), doctest::Contains("[137, 0]"), InvalidProblem);
    bad[137] = 1e6f;
    CHECK_THROWS_WITH_AS(quantize(bad, 256, 1), doctest::Contains("group 1 of column 0"), InvalidProblem);
    CHECK_THROWS_WITH_AS(pack(std::vector<std::int8_t>(7), 7, 1, WeightLayout::k8n), doctest::Contains("multiple of 8"),
                         InvalidProblem);
    std::vector<std::int8_t> q(16);
    q[9] = 8;
    CHECK_THROWS_WITH_AS(pack(q, 8, 2, WeightLayout::k8n), doctest::Contains("got 8 at [4, 1]"), InvalidProblem);
    CHECK_THROWS_WITH_AS(unpack(std::vector<std::uint32_t>(3), 8, 2, WeightLayout::nk8),
                         doctest::Contains("needs 2 for [2, 1]"), InvalidProblem);
  }

  TEST_CASE("quantize: a real layer's weights give bit for bit what examples/minilm/make_input.py packed") {
    const SafetensorsFile file(QKVJIT_SOURCE_DIR "/tests/data/minilm_layer0.safetensors");
    for (const std::string matrix : {"q", "k", "v"}) {
      CAPTURE(matrix);
      const StoredTensor& weights = file.at(matrix + ".weight_f32");
      const StoredTensor& packed = file.at(matrix + ".qweight");
      const std::size_t k = weights.shape[0], columns = weights.shape[1], n = packed.shape[1];
      REQUIRE(k == 384);
      REQUIRE(columns >= 64);
      const QuantizedMatrix quantized = quantize(weights.copy<float>(), k, columns);
      const auto q = unpack(packed.copy<std::uint32_t>(), k, n, WeightLayout::k8n);
      const auto scales = file.at(matrix + ".scales").copy<std::uint16_t>();
      for (std::size_t column = 0; column < columns; ++column) {
        for (std::size_t row = 0; row < k; ++row) REQUIRE(quantized.q[row * columns + column] == q[row * n + column]);
        for (std::size_t group = 0; group < k / 128; ++group) {
          REQUIRE(quantized.scales[group * columns + column] == scales[group * n + column]);
        }
      }
    }
  }
}
