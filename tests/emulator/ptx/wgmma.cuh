// SPDX-License-Identifier: Apache-2.0
// Stands for kernel_templates/ptx/wgmma.cuh and wgmma_shapes.cuh: the fragments are those of its header. A warp's 16
// rows are done by themselves.
#pragma once

#include <array>

#include "emulator.h"
#include "ptx/mma.cuh"

namespace qkvjit {

inline void wgmma_fence() {
  emulator::warp_together("wgmma.fence", nullptr, [](const emulator::Lanes&) {});
}
inline void wgmma_commit() { emulator::wgmma_commit(); }
template <unsigned kPending>
inline void wgmma_wait() {
  emulator::wgmma_wait(kPending);
}
inline void wgmma_results(float (&)[4]) {}
inline unsigned wgmma_descriptor_low(unsigned address) { return address >> 4 | 1u << 16; }
inline unsigned long long wgmma_descriptor(unsigned low) { return low | 0x40000040ull << 32; }

template <unsigned kTokens>
inline void wgmma_m64k16(float (&c)[kTokens / 8][4], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  struct Item {
    float (*c)[4];
    const unsigned* a;
    unsigned long long b;
    bool accumulate;
  } item{c, a, b, accumulate};
  emulator::warp_together("wgmma", &item, [](const emulator::Lanes& lanes) {
    std::array<Item, 32> items;
    for (unsigned lane = 0; lane < 32; ++lane) items[lane] = *static_cast<const Item*>(lanes[lane]);
    emulator::wgmma_issue([items] {
      double a[16][16];
      for (unsigned lane = 0; lane < 32; ++lane) {
        if (items[lane].b != items[0].b || items[lane].accumulate != items[0].accumulate) {
          emulator::fault("lanes with different wgmma descriptors");
        }
        for (unsigned r = 0; r < 4; ++r) {
          for (unsigned i = 0; i < 2; ++i) {
            a[lane / 4 + r % 2 * 8][2 * (lane % 4) + r / 2 * 8 + i] = element_f16(items[lane].a[r], i);
          }
        }
      }
      const unsigned start = static_cast<unsigned>(items[0].b & 0x3fffu) << 4;
      for (unsigned token = 0; token < kTokens; ++token) {
        double b[16];
        for (unsigned k = 0; k < 16; k += 8) {
          const unsigned linear = start + token / 8 * 1024 + token % 8 * 128 + k * 2;
          const unsigned char* octet = emulator::shared_bytes(linear ^ (linear >> 7 & 7u) << 4, 16);
          for (unsigned i = 0; i < 8; ++i) {
            unsigned short bits;
            std::memcpy(&bits, octet + 2 * i, 2);
            b[k + i] = qkvref::f16_to_double(bits);
          }
        }
        for (unsigned row = 0; row < 16; ++row) {
          float& sum = items[row % 8 * 4 + token % 8 / 2].c[token / 8][row / 8 * 2 + token % 2];
          double total = items[0].accumulate ? static_cast<double>(sum) : 0.0;
          for (unsigned k = 0; k < 16; ++k) total += a[row][k] * b[k];
          sum = static_cast<float>(total);
        }
      }
    });
  });
}

}  // namespace qkvjit
