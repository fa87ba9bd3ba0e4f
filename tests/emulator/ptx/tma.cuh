// SPDX-License-Identifier: Apache-2.0
// Stands for kernel_templates/ptx/tma.cuh. The map holds what the test's launch wrote: base, extents and box.
#pragma once

#include <cstring>

#include "emulator.h"
#include "ptx/mbarrier.cuh"
#include "qkv_params.h"

namespace qkvjit {

inline void mbarrier_arrive_expect(unsigned barrier, unsigned bytes) { emulator::mbarrier_arrive(barrier, bytes); }
inline void mbarrier_arrive_at_rank(unsigned barrier, unsigned rank) {
  emulator::mbarrier_arrive(emulator::mapped(barrier, rank), 0);
}
inline void fence_mbarrier_init() {}
inline void prefetch_map(const TensorMap&) {}

inline void bulk_copy(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
  if (bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(source) % 16 != 0) {
    emulator::fault("a bulk copy that is no multiple of 16 bytes");
  }
  emulator::engine([=] { std::memcpy(emulator::shared_range(destination, bytes, 16), source, bytes); }, {barrier},
                   bytes);
}

/// Box [rows][64] of a matrix of 16-bit elements, 128-byte swizzle, zeros beyond the extents.
inline void copy_box(unsigned destination, const TensorMap& map, unsigned column, unsigned row) {
  const auto* base = reinterpret_cast<const unsigned char*>(map.opaque[0]);
  const unsigned long long extent_k = map.opaque[1], extent_m = map.opaque[2], rows = map.opaque[3];
  emulator::shared_range(destination, static_cast<unsigned>(rows * 128), 128);
  for (unsigned r = 0; r < rows; ++r) {
    for (unsigned octet = 0; octet < 8; ++octet) {
      const unsigned linear = destination + r * 128 + octet * 16;
      unsigned char* to = emulator::shared_bytes(linear ^ (linear >> 7 & 7u) << 4, 16);
      for (unsigned i = 0; i < 8; ++i) {
        const unsigned long long k = column + octet * 8 + i, m = row + r;
        if (k < extent_k && m < extent_m) {
          std::memcpy(to + 2 * i, base + (m * extent_k + k) * 2, 2);
        } else {
          std::memset(to + 2 * i, 0, 2);
        }
      }
    }
  }
}

inline void tensor_copy(unsigned destination, const TensorMap& map, unsigned column, unsigned row, unsigned barrier) {
  emulator::engine([=, &map] { copy_box(destination, map, column, row); }, {barrier},
                   static_cast<unsigned>(map.opaque[3] * 128));
}

inline void tensor_copy_multicast(unsigned destination, const TensorMap& map, unsigned column, unsigned row,
                                  unsigned barrier, unsigned short ranks) {
  for (unsigned rank = 0; rank < 16; ++rank) {
    if ((ranks >> rank & 1u) == 0) continue;
    emulator::engine([=, &map] { copy_box(emulator::mapped(destination, rank), map, column, row); },
                     {emulator::mapped(barrier, rank)}, static_cast<unsigned>(map.opaque[3] * 128));
  }
}

template <unsigned kRegisters>
inline void raise_registers() {}
template <unsigned kRegisters>
inline void lower_registers() {}
inline void named_barrier(unsigned id, unsigned threads) { emulator::block_barrier(id, threads); }

}  // namespace qkvjit
