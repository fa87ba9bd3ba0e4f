// SPDX-License-Identifier: Apache-2.0
// Stands for kernel_templates/ptx/memory.cuh.
#pragma once

#include <cstring>

#include "emulator.h"

namespace qkvjit {

struct Vector4 {
  unsigned x, y, z, w;
};
struct Vector2 {
  unsigned x, y;
};

inline unsigned block_index() { return emulator::block_index().x; }
inline unsigned shared_address(const void*) { return emulator::kSharedBase; }

template <typename T>
inline T load_shared(unsigned address) {
  T v;
  std::memcpy(&v, emulator::shared_bytes(address, sizeof(T)), sizeof(T));
  return v;
}
template <typename T>
inline void store_shared(unsigned address, T v) {
  std::memcpy(emulator::shared_bytes(address, sizeof(T)), &v, sizeof(T));
}
inline Vector4 load_shared_16(unsigned address) { return load_shared<Vector4>(address); }
inline Vector2 load_shared_8(unsigned address) { return load_shared<Vector2>(address); }
inline unsigned load_shared_4(unsigned address) { return load_shared<unsigned>(address); }
inline void store_shared_16(unsigned address, Vector4 v) { store_shared(address, v); }
inline void store_shared_8(unsigned address, Vector2 v) { store_shared(address, v); }
inline void store_shared_4(unsigned address, unsigned v) { store_shared(address, v); }

inline Vector4 load_matrices(unsigned address) {
  struct Item {
    unsigned address;
    unsigned result[4];
  } item{address, {}};
  emulator::warp_together("ldmatrix", &item, [](const emulator::Lanes& lanes) {
    for (unsigned lane = 0; lane < 32; ++lane) {
      for (unsigned matrix = 0; matrix < 4; ++matrix) {
        const auto* row = static_cast<const Item*>(lanes[matrix * 8 + lane / 4]);
        std::memcpy(&static_cast<Item*>(lanes[lane])->result[matrix],
                    emulator::shared_bytes(row->address, 16) + lane % 4 * 4, 4);
      }
    }
  });
  return {item.result[0], item.result[1], item.result[2], item.result[3]};
}

inline Vector2 load_global_8(const void* pointer) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % 8 != 0) emulator::fault("an unaligned global load");
  Vector2 v;
  std::memcpy(&v, pointer, 8);
  return v;
}

template <typename T>
inline void store_global(void* pointer, T v) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % sizeof(T) != 0) emulator::fault("an unaligned global store");
  std::memcpy(pointer, &v, sizeof(T));
}
inline void store_global_4(void* pointer, unsigned v) { store_global(pointer, v); }
inline void store_global_8(void* pointer, Vector2 v) { store_global(pointer, v); }
inline void store_global_16(void* pointer, Vector4 v) { store_global(pointer, v); }

inline void copy_async_16_stream(unsigned destination, const void* source, unsigned bytes) {
  emulator::copy_async(destination, source, 16, bytes);
}
inline void copy_async_16(unsigned destination, const void* source, unsigned bytes) {
  emulator::copy_async(destination, source, 16, bytes);
}
inline void copy_async_8(unsigned destination, const void* source, unsigned bytes) {
  emulator::copy_async(destination, source, 8, bytes);
}
inline void copy_async_4(unsigned destination, const void* source, unsigned bytes) {
  emulator::copy_async(destination, source, 4, bytes);
}
inline void copy_async_commit() { emulator::copy_async_commit(); }
template <unsigned kPending>
inline void copy_async_wait() {
  emulator::copy_async_wait(kPending);
}

}  // namespace qkvjit
