// SPDX-License-Identifier: Apache-2.0
// Stands for kernel_templates/ptx/mbarrier.cuh.
#pragma once

#include "emulator.h"

namespace qkvjit {

inline constexpr unsigned kMbarrierBytes = 8;
inline void mbarrier_init(unsigned barrier, unsigned arrivals) { emulator::mbarrier_init(barrier, arrivals); }
inline void mbarrier_arrive(unsigned barrier) { emulator::mbarrier_arrive(barrier, 0); }
inline void mbarrier_wait(unsigned barrier, unsigned parity) { emulator::mbarrier_wait(barrier, parity); }
inline void fence_async_proxy() {}

}  // namespace qkvjit
