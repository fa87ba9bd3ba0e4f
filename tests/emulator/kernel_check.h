// SPDX-License-Identifier: Apache-2.0
// A kernel of one Specialization on random data in the emulator, against the reference.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "emulator.h"
#include "qkv_params.h"
#include "qkv_reference.h"
#include "qkvjit/specialization.h"

namespace emulator {

using qkvjit::Specialization;

/// Memory with guards of kGuard bytes around it, 256-byte aligned but for `shift` bytes.
class Buffer {
 public:
  static constexpr std::size_t kGuard = 512;
  static constexpr unsigned char kPattern = 0xff;  // as f16 a NaN

  explicit Buffer(std::size_t bytes, std::size_t shift = 0)
      : bytes_(bytes), memory_(bytes + 2 * kGuard + 512, kPattern) {
    const auto base = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard;
    offset_ = (base + 255) / 256 * 256 + shift - reinterpret_cast<std::uintptr_t>(memory_.data());
  }
  template <typename T>
  explicit Buffer(const std::vector<T>& values, std::size_t shift = 0) : Buffer(values.size() * sizeof(T), shift) {
    if (bytes_ != 0) std::memcpy(data(), values.data(), bytes_);
  }
  unsigned char* data() { return memory_.data() + offset_; }
  [[nodiscard]] const unsigned char* data() const { return memory_.data() + offset_; }
  /// What it holds, and the pattern in its place.
  std::vector<unsigned char> take() {
    std::vector<unsigned char> content(data(), data() + bytes_);
    std::memset(data(), kPattern, bytes_);
    return content;
  }
  [[nodiscard]] bool guards_are_whole() const {
    const auto is_pattern = [](unsigned char byte) { return byte == kPattern; };
    return std::all_of(memory_.begin(), memory_.begin() + static_cast<std::ptrdiff_t>(offset_), is_pattern) &&
           std::all_of(memory_.begin() + static_cast<std::ptrdiff_t>(offset_ + bytes_), memory_.end(), is_pattern);
  }

 private:
  std::size_t bytes_;
  std::vector<unsigned char> memory_;
  std::size_t offset_ = 0;
};

/// The raw words of a matrix [k, n] in the prepacked layout, from the layout's table.
inline std::vector<std::uint32_t> prepacked(const qkvref::Matrix4& w, std::size_t k) {
  const std::size_t blocks_k = (k + 63) / 64, blocks_n = (w.n + 63) / 64;
  std::vector<std::uint32_t> words(blocks_k * blocks_n * 512, 0);
  for (std::size_t row = 0; row < k; ++row) {
    for (std::size_t column = 0; column < w.n; ++column) {
      const std::size_t kk = row % 64, c = column % 64;
      const std::size_t tile = c / 32 * 2 + c % 4 / 2, g = c % 32 / 4, t = kk % 8 / 2;
      const std::size_t word = ((row / 64 * blocks_n + column / 64) * 128 + 32 * tile + 4 * g + t) * 4 + kk / 16;
      const std::size_t nibble = c % 2 + 2 * (kk % 16 / 8) + 4 * (kk % 2);
      words[word] |= static_cast<std::uint32_t>(qkvref::weight(w, k, row, column) & 15) << (4 * nibble);
    }
  }
  return words;
}

struct Case {
  std::uint64_t m = 1;
  Timing timing = Timing::early;
  std::uint64_t seed = 1;
  unsigned multiprocessors = 3;  ///< prefill: blocks that stay
};

/// `kernel` is the instantiation, as a function of the pipeline's parameters.
template <Specialization kSpec, typename Kernel>
void check_kernel(const char* name, Kernel kernel, const Case& c) {
  using qkvjit::DType;
  CAPTURE(std::string(name));
  CAPTURE(c.m);
  CAPTURE(c.seed);
  CAPTURE((c.timing == Timing::late));
  const std::size_t k = kSpec.k, groups = (k + kSpec.group_size - 1) / kSpec.group_size;
  const std::array<std::size_t, 3> columns{kSpec.n_q, kSpec.n_k, kSpec.n_v};
  std::mt19937_64 random(c.seed);
  std::normal_distribution<double> normal;
  const std::size_t shift = kSpec.aligned ? 0 : 2;

  std::vector<std::uint16_t> x(c.m * k);
  for (auto& each : x) each = qkvref::double_to_f16(normal(random));
  Buffer x_buffer(x, shift);
  std::array<std::vector<std::uint32_t>, 3> words;
  std::array<std::vector<std::uint16_t>, 3> scales;
  std::vector<Buffer> inputs, outputs;
  std::array<qkvref::Matrix4, 3> matrices{};
  qkvjit::QkvParams params{};
  for (std::size_t i = 0; i < 3; ++i) {
    words[i].resize(k / 8 * columns[i]);
    for (auto& word : words[i]) word = static_cast<std::uint32_t>(random());
    scales[i].resize(groups * columns[i]);
    for (auto& s : scales[i]) s = qkvref::double_to_f16(0.01 * (1.5 + normal(random) * 0.3));
    matrices[i] = {words[i].data(), scales[i].data(), columns[i], kSpec.layout == qkvjit::WeightLayout::nk8};
    inputs.emplace_back(kSpec.layout == qkvjit::WeightLayout::prepacked ? prepacked(matrices[i], k) : words[i],
                        kSpec.aligned || kSpec.layout == qkvjit::WeightLayout::prepacked ? 0 : 4);
    inputs.emplace_back(scales[i], shift);
    outputs.emplace_back(c.m * columns[i] * 2, shift);
  }
  params.x = x_buffer.data();
  for (std::size_t i = 0; i < 3; ++i) {
    params.weights[i] = inputs[2 * i].data();
    params.scales[i] = inputs[2 * i + 1].data();
    params.outputs[i] = outputs[i].data();
  }
  params.m = c.m;

  constexpr bool kStays = kSpec.pipeline == qkvjit::Pipeline::prefill && kSpec.tile.cluster_k == 1;
  Launch launch;
  launch.cluster = kSpec.tile.cluster_k * kSpec.tile.cluster_n;
  launch.blocks = static_cast<unsigned>((c.m + kSpec.tile.block_m - 1) / kSpec.tile.block_m) * column_tiles(kSpec) *
                  kSpec.tile.cluster_k;
  if (kStays) launch.blocks = std::min(launch.blocks, c.multiprocessors / launch.cluster * launch.cluster);
  launch.threads = threads_per_block(kSpec.tile);
  launch.smem_bytes = smem_bytes(kSpec);
  launch.timing = c.timing;
  launch.seed = c.seed;
  if constexpr (waits_for_grids_ahead(kSpec)) {
    // x, and without the promise the weights too, are written by the grids ahead.
    params.weights_are_constant = c.timing == Timing::late;
    std::vector<Buffer*> late{&x_buffer};
    if (params.weights_are_constant == 0) {
      for (Buffer& input : inputs) late.push_back(&input);
    }
    std::vector<std::vector<unsigned char>> content;
    for (Buffer* buffer : late) content.push_back(buffer->take());
    launch.grids_ahead = [late, content] {
      for (std::size_t i = 0; i < late.size(); ++i) std::memcpy(late[i]->data(), content[i].data(), content[i].size());
    };
  }
  try {
    if constexpr (kSpec.pipeline == qkvjit::Pipeline::prefill) {
      qkvjit::PrefillParams prefill{};
      prefill.x_map.opaque[0] = reinterpret_cast<std::uintptr_t>(params.x);
      prefill.x_map.opaque[1] = k;
      prefill.x_map.opaque[2] = c.m;
      prefill.x_map.opaque[3] = kSpec.tile.block_m / kSpec.tile.cluster_n;
      prefill.qkv = params;
      run(launch, [&] { kernel(prefill); });
    } else {
      run(launch, [&] { kernel(params); });
    }
  } catch (const Fault& fault) {
    FAIL(std::string(fault.what()));
  }

  constexpr bool kExact = kSpec.pipeline == qkvjit::Pipeline::gemv || kSpec.pipeline == qkvjit::Pipeline::decode;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto want = qkvref::project(x.data(), c.m, matrices[i], k, kSpec.group_size,
                                      kExact ? qkvref::Arithmetic::exact : qkvref::Arithmetic::rounded, 1);
    std::size_t wrong = 0;
    std::string first;
    for (std::size_t at = 0; at < want.size(); ++at) {
      std::uint16_t got;
      std::memcpy(&got, outputs[i].data() + 2 * at, 2);
      if (qkvref::accept(got, want[at])) continue;
      if (wrong++ == 0) {
        first = "token " + std::to_string(at / columns[i]) + " column " + std::to_string(at % columns[i]) + ": got " +
                std::to_string(qkvref::f16_to_double(got)) + ", want " + std::to_string(want[at].want);
      }
    }
    CHECK_MESSAGE(wrong == 0, "matrix " << i << ": " << wrong << " of " << want.size() << " wrong, first " << first);
    CHECK(outputs[i].guards_are_whole());
  }
}

/// Early and late, over `tokens`.
template <Specialization kSpec, typename Kernel>
void check_tokens(const char* name, Kernel kernel, std::initializer_list<std::uint64_t> tokens) {
  std::uint64_t seed = 1;
  for (const std::uint64_t m : tokens) {
    for (const Timing timing : {Timing::early, Timing::late}) {
      check_kernel<kSpec>(name, kernel, {.m = m, .timing = timing, .seed = seed++});
    }
  }
}

}  // namespace emulator
