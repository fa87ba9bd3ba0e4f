// SPDX-License-Identifier: Apache-2.0
// Stands for kernel_templates/ptx/mma.cuh: the fragments are those of its header. Sums are formed in double and rounded
// once to f32.
#pragma once

#include "emulator.h"
#include "ptx/numeric.cuh"

namespace qkvjit {

/// Element `i` (0, 1) of a register of two f16.
inline double element_f16(unsigned pair, unsigned i) { return i == 0 ? low_f16(pair) : high_f16(pair); }

inline void mma_m16n8k16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  struct Item {
    float* c;
    unsigned a[4], b[2];
  } item{c, {a0, a1, a2, a3}, {b0, b1}};
  emulator::warp_together("mma.m16n8k16", &item, [](const emulator::Lanes& lanes) {
    double a[16][16], b[16][8];
    for (unsigned lane = 0; lane < 32; ++lane) {
      const auto& item = *static_cast<const Item*>(lanes[lane]);
      const unsigned g = lane / 4, t = lane % 4;
      for (unsigned r = 0; r < 4; ++r) {
        for (unsigned i = 0; i < 2; ++i) a[g + r % 2 * 8][2 * t + r / 2 * 8 + i] = element_f16(item.a[r], i);
      }
      for (unsigned r = 0; r < 2; ++r) {
        for (unsigned i = 0; i < 2; ++i) b[2 * t + r * 8 + i][g] = element_f16(item.b[r], i);
      }
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
      float* sums = static_cast<Item*>(lanes[lane])->c;
      for (unsigned i = 0; i < 4; ++i) {
        double sum = static_cast<double>(sums[i]);
        for (unsigned k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
        sums[i] = static_cast<float>(sum);
      }
    }
  });
}

inline void mma_m16n8k32(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  struct Item {
    int* c;
    unsigned a[4], b[2];
  } item{c, {a0, a1, a2, a3}, {b0, b1}};
  emulator::warp_together("mma.m16n8k32", &item, [](const emulator::Lanes& lanes) {
    int a[16][32], b[32][8];
    const auto byte = [](unsigned word, unsigned i) {
      return static_cast<int>(static_cast<signed char>(word >> (8 * i)));
    };
    for (unsigned lane = 0; lane < 32; ++lane) {
      const auto& item = *static_cast<const Item*>(lanes[lane]);
      const unsigned g = lane / 4, t = lane % 4;
      for (unsigned r = 0; r < 4; ++r) {
        for (unsigned i = 0; i < 4; ++i) a[g + r % 2 * 8][4 * t + r / 2 * 16 + i] = byte(item.a[r], i);
      }
      for (unsigned r = 0; r < 2; ++r) {
        for (unsigned i = 0; i < 4; ++i) b[4 * t + r * 16 + i][g] = byte(item.b[r], i);
      }
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
      int* sums = static_cast<Item*>(lanes[lane])->c;
      for (unsigned i = 0; i < 4; ++i) {
        for (unsigned k = 0; k < 32; ++k) sums[i] += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
      }
    }
  });
}

}  // namespace qkvjit
