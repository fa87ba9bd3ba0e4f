// SPDX-License-Identifier: Apache-2.0
// What nvcc and NVRTC know of themselves, so that a C++ compiler reads the kernels: included ahead of every line.
#pragma once

#include <bit>
#include <cmath>

#include "emulator.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::block_index())
#define gridDim (::emulator::grid_extent())

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline void __threadfence() {}
inline void __syncthreads() { ::emulator::block_barrier(0, 0); }
inline void __syncwarp() { ::emulator::warp_barrier(); }

template <typename T>
inline T __shfl_sync(unsigned, T value, unsigned lane) {
  return ::emulator::exchange(value, lane);
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, unsigned lane_mask) {
  return ::emulator::exchange(value, ::emulator::lane() ^ lane_mask);
}
inline bool __any_sync(unsigned, bool value) { return ::emulator::add_over_warp(value ? 1u : 0u) != 0; }
inline unsigned __reduce_add_sync(unsigned, unsigned value) { return ::emulator::add_over_warp(value); }
