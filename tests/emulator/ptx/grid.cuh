// SPDX-License-Identifier: Apache-2.0
// Stands for kernel_templates/ptx/grid.cuh.
#pragma once

#include "ptx/memory.cuh"

namespace qkvjit {

inline void launch_dependents() {}
inline void wait_for_grids_ahead() { emulator::wait_for_grids_ahead(); }
inline unsigned cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_arrive_relaxed() { emulator::cluster_arrive(); }
inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline unsigned map_to_rank(unsigned address, unsigned rank) { return emulator::mapped(address, rank); }
inline void store_cluster_16(unsigned mapped, Vector4 v) { store_shared(mapped, v); }

}  // namespace qkvjit
