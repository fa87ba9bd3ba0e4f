// SPDX-License-Identifier: Apache-2.0
// Symmetric INT4 quantisation on the host, round to nearest: for each group of `group_size` k and each column,
// s = rn_f16(max|w| / 7), q = clamp(rn(w / s), -8, 7) (q = 0 where s = 0); and packing of the integers into
// the words the kernels read. Pure functions over vectors; no GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "qkvjit/specialization.h"

namespace qkvjit {

struct QuantizedMatrix {
  std::size_t k = 0;
  std::size_t n = 0;
  std::size_t group_size = 128;
  std::vector<std::int8_t> q;         ///< [K, N] row-major, -8 … 7
  std::vector<std::uint16_t> scales;  ///< [K/group_size, N] f16 bit patterns
};

/// `w` is [K, N] row-major f32 (y = x*w). Throws InvalidProblem: sizes that do not fit, K not a multiple of
/// group_size, a non-finite weight, or a scale that f16 cannot hold.
QuantizedMatrix quantize(std::span<const float> w, std::size_t k, std::size_t n, std::size_t group_size = 128);

/// Packs [K, N] integers in -8 … 7 into words: k8n gives [K/8, N], nk8 gives [N, K/8].
/// Throws InvalidProblem for K % 8 != 0, a size mismatch, or an integer out of range (names its position).
std::vector<std::uint32_t> pack(std::span<const std::int8_t> q, std::size_t k, std::size_t n, WeightLayout layout);

/// The inverse of pack, bit for bit.
std::vector<std::int8_t> unpack(std::span<const std::uint32_t> words, std::size_t k, std::size_t n,
                                WeightLayout layout);

/// IEEE binary16, round to nearest even; overflow gives inf.
std::uint16_t float_to_f16(float value) noexcept;
float f16_to_float(std::uint16_t bits) noexcept;

}  // namespace qkvjit
