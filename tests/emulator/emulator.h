// SPDX-License-Identifier: Apache-2.0
// Runs the kernels' own source on the CPU, one cluster of blocks after the other, each thread a fiber that yields where
// it waits. The PTX of kernel_templates/ptx is replaced by the functions of tests/emulator/ptx, which do in plain C++
// what the PTX ISA says; everything else is the product's text. It finds wrong indices, wrong arithmetic, missing waits
// and barriers that never complete. It says nothing of speed, registers or memory models.
//
// Asynchronous work (cp.async, bulk and tensor copies, wgmma) is done either as early or as late as the ISA allows, so
// that a place that is reused too early, or read before the wait, gives wrong results in one of the two.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

namespace emulator {

enum class Timing : std::uint8_t { early, late };

struct Launch {
  unsigned blocks = 1;
  unsigned threads = 32;
  unsigned cluster = 1;
  unsigned smem_bytes = 0;
  Timing timing = Timing::early;
  std::uint64_t seed = 0;  ///< of the order in which warps run
  /// What the grids ahead still write: done when a thread first waits for them, and never if none does.
  std::function<void()> grids_ahead;
};

/// A deadlock, an address out of the block's shared memory or not aligned, lanes of a warp in different instructions, a
/// write to a block that has left.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Runs `kernel` once for each thread. Throws Fault.
void run(const Launch& launch, const std::function<void()>& kernel);

// What follows is for code that runs inside.

struct Index {
  unsigned x;
};
Index thread_index();
Index block_index();
Index grid_extent();
unsigned lane();
Timing timing();

/// Where the block's dynamic shared memory begins: 128-byte aligned, not 1024.
inline constexpr unsigned kSharedBase = 0x480;
/// `address` as map_to_rank gives it for block `rank`; without it an address is the own block's.
unsigned mapped(unsigned address, unsigned rank);
/// The bytes at a shared address, which must be a multiple of `bytes`.
unsigned char* shared_bytes(unsigned address, unsigned bytes);
/// The same for consecutive bytes with an alignment of their own.
unsigned char* shared_range(unsigned address, unsigned bytes, unsigned alignment);

/// Barrier `id` of the block; `threads` 0: all that have not left.
void block_barrier(unsigned id, unsigned threads);
void wait_for_grids_ahead();
void cluster_arrive();
void cluster_wait();
unsigned cluster_rank();

/// All 32 lanes come with the same `what`; the last does `work` with what each brought.
using Lanes = void* [32];
void warp_together(const char* what, void* mine, const std::function<void(const Lanes&)>& work);
inline void warp_barrier() {
  warp_together("__syncwarp", nullptr, [](const Lanes&) {});
}

template <typename T>
T exchange(T value, unsigned from) {
  struct Item {
    T value, result;
    unsigned from;
  } item{value, value, from};
  warp_together("shfl", &item, [](const Lanes& lanes) {
    for (void* each : lanes) {
      auto* mine = static_cast<Item*>(each);
      mine->result = static_cast<Item*>(lanes[mine->from % 32])->value;
    }
  });
  return item.result;
}

inline unsigned add_over_warp(unsigned value) {
  struct Item {
    unsigned value, result;
  } item{value, 0};
  warp_together("vote", &item, [](const Lanes& lanes) {
    unsigned sum = 0;
    for (void* each : lanes) sum += static_cast<Item*>(each)->value;
    for (void* each : lanes) static_cast<Item*>(each)->result = sum;
  });
  return item.result;
}

/// cp.async: `size` bytes of which `bytes` are read and the rest is zero.
void copy_async(unsigned destination, const void* source, unsigned size, unsigned bytes);
void copy_async_commit();
void copy_async_wait(unsigned pending);

// mbarrier
void mbarrier_init(unsigned barrier, unsigned arrivals);
/// One arrival that also adds to the bytes that the phase waits for.
void mbarrier_arrive(unsigned barrier, unsigned expected_bytes);
void mbarrier_wait(unsigned barrier, unsigned parity);
/// Work of the copy engine: does `work`, then takes `bytes` off each barrier's count.
void engine(std::function<void()> work, std::initializer_list<unsigned> barriers, unsigned bytes);

// wgmma: work of this warp, in groups
void wgmma_issue(std::function<void()> work);
void wgmma_commit();
void wgmma_wait(unsigned pending);

[[noreturn]] void fault(const std::string& text);

}  // namespace emulator
