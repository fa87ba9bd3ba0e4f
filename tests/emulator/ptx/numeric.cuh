// SPDX-License-Identifier: Apache-2.0
// Stands for kernel_templates/ptx/numeric.cuh. Each operation rounds once: what double cannot hold is rounded to odd
// first, which a later rounding to few bits does not see.
#pragma once

#include <bit>
#include <cmath>

#include "qkv_reference.h"

namespace qkvjit {

inline unsigned and_xor(unsigned a, unsigned b, unsigned c) { return (a & b) ^ c; }

inline unsigned byte_permute(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = a | static_cast<unsigned long long>(b) << 32;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> (4 * i) & 15u;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7u))) & 255u;
    if ((nibble & 8u) != 0) byte = (byte & 128u) != 0 ? 255u : 0u;
    result |= byte << (8 * i);
  }
  return result;
}

/// a*b + c, to odd in double.
inline double fma_to_odd(double a, double b, double c) {
  const double product = a * b;  // exact: two short significands
  const double sum = product + c;
  if (!std::isfinite(sum)) return sum;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  if (error == 0 || (std::bit_cast<unsigned long long>(sum) & 1u) != 0) return sum;
  return std::nextafter(sum, (error > 0) ? HUGE_VAL : -HUGE_VAL);
}

inline double low_f16(unsigned pair) { return qkvref::f16_to_double(static_cast<unsigned short>(pair & 0xffffu)); }
inline double high_f16(unsigned pair) { return qkvref::f16_to_double(static_cast<unsigned short>(pair >> 16)); }
inline unsigned pair_f16(double low, double high) {
  return qkvref::double_to_f16(low) | static_cast<unsigned>(qkvref::double_to_f16(high)) << 16;
}

inline unsigned fma_f16x2(unsigned a, unsigned b, unsigned c) {
  return pair_f16(fma_to_odd(low_f16(a), low_f16(b), low_f16(c)), fma_to_odd(high_f16(a), high_f16(b), high_f16(c)));
}
inline unsigned sub_f16x2(unsigned a, unsigned b) {
  return pair_f16(low_f16(a) - low_f16(b), high_f16(a) - high_f16(b));
}
inline unsigned mul_f16x2(unsigned a, unsigned b) {
  return pair_f16(low_f16(a) * low_f16(b), high_f16(a) * high_f16(b));
}
inline float f16_to_f32(unsigned short bits) { return static_cast<float>(qkvref::f16_to_double(bits)); }
inline unsigned short f32_to_f16(float value) { return qkvref::double_to_f16(static_cast<double>(value)); }
inline unsigned f32_to_f16x2(float low, float high) {
  return pair_f16(static_cast<double>(low), static_cast<double>(high));
}

}  // namespace qkvjit
