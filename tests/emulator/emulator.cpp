// SPDX-License-Identifier: Apache-2.0
#include "emulator.h"

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace qkvjit {
// The kernels' `extern __shared__` arrays. Those that are used as arrays belong to kernels without clusters.
alignas(1024) unsigned char shared[256 * 1024];
alignas(16) unsigned raw[4096];
alignas(16) unsigned packed[4096];
alignas(16) unsigned short x_slab[64 * 1024];
}  // namespace qkvjit

namespace emulator {
namespace {

constexpr std::size_t kStackBytes = 256 * 1024;
constexpr unsigned kRankShift = 24;
constexpr unsigned kWarp = 32;

struct Copy {
  unsigned destination;
  const void* source;
  unsigned size, bytes;
};

struct Barrier {
  unsigned arrived = 0;
  std::uint64_t generation = 0;
};

/// Threads that have left count as arrived from the next phase on, and in this one where they had not come yet.
struct ClusterBarrier {
  unsigned threads = 0, arrived = 0, gone = 0, gone_next = 0;
  std::uint64_t generation = 1;

  void end_if_complete() {
    if (threads == gone || arrived + gone != threads) return;
    gone += gone_next;
    gone_next = arrived = 0;
    ++generation;
  }
};

struct Mbarrier {
  unsigned arrivals = 0;  ///< of a phase
  unsigned missing = 0;
  long long bytes = 0;
  unsigned phases = 0;  ///< that have ended
};

struct Warp {
  Lanes mine{};
  unsigned arrived = 0;
  std::uint64_t generation = 0;
  const char* what = nullptr;
  std::deque<std::vector<std::function<void()>>> groups;  ///< of wgmmas
  std::vector<std::function<void()>> open;
};

struct Block {
  unsigned index = 0, rank = 0;
  std::vector<unsigned char> memory;
  std::map<unsigned, Barrier> barriers;
  std::map<unsigned, Mbarrier> mbarriers;
  std::vector<Warp> warps;
  unsigned live = 0;
};

struct Fiber {
  ucontext_t context{};
  std::unique_ptr<unsigned char[]> stack = std::make_unique<unsigned char[]>(kStackBytes);
  unsigned thread = 0;
  Block* block = nullptr;
  bool done = false;
  const std::function<bool()>* ready = nullptr;  ///< null: may run
  const char* waits_for = "";
  std::uint64_t cluster_generation = 0;  ///< the phase in which it arrived
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

struct Machine {
  Launch launch;
  const std::function<void()>* kernel = nullptr;
  std::vector<Block> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  ClusterBarrier cluster;
  unsigned live = 0;
  std::deque<std::function<void()>> engine;
  Fiber* current = nullptr;
  ucontext_t scheduler{};
  std::string failure;
  std::mt19937_64 random;
};

Machine* machine = nullptr;

Fiber& self() { return *machine->current; }
Warp& own_warp() { return self().block->warps[self().thread / kWarp]; }

void to_scheduler() { swapcontext(&self().context, &machine->scheduler); }

template <typename Ready>
void wait_until(const char* what, const Ready& ready) {
  if (ready()) return;
  const std::function<bool()> test = ready;
  Fiber& fiber = self();
  fiber.ready = &test;
  fiber.waits_for = what;
  to_scheduler();
}

void check_barriers();

void entry() {
  try {
    (*machine->kernel)();
  } catch (const std::exception& e) {
    if (machine->failure.empty()) machine->failure = e.what();
  }
  Fiber& fiber = self();
  fiber.done = true;
  --fiber.block->live;
  --machine->live;
  ClusterBarrier& cluster = machine->cluster;
  ++(fiber.cluster_generation == cluster.generation ? cluster.gone_next : cluster.gone);
  cluster.end_if_complete();
  check_barriers();
  to_scheduler();
}

/// Threads that leave no longer count.
void check_barriers() {
  for (Block& block : machine->blocks) {
    Barrier& all = block.barriers[0];
    if (all.arrived != 0 && all.arrived == block.live) all.arrived = 0, ++all.generation;
  }
}

std::string state_in_words() {
  std::map<std::string, unsigned> waits;
  for (const auto& fiber : machine->fibers) {
    if (!fiber->done) {
      ++waits["block " + std::to_string(fiber->block->index) + " warp " + std::to_string(fiber->thread / kWarp) +
              " in " + fiber->waits_for];
    }
  }
  std::string text;
  for (const auto& [wait, count] : waits) text += "\n  " + std::to_string(count) + " lanes of " + wait;
  return text;
}

void run_cluster(unsigned first_block) {
  Machine& m = *machine;
  const unsigned threads = m.launch.threads;
  m.blocks.assign(m.launch.cluster, Block());
  m.cluster = {.threads = threads * m.launch.cluster};
  m.engine.clear();
  m.live = threads * m.launch.cluster;
  while (m.fibers.size() < m.live) m.fibers.push_back(std::make_unique<Fiber>());
  for (unsigned rank = 0; rank < m.launch.cluster; ++rank) {
    Block& block = m.blocks[rank];
    block.index = first_block + rank, block.rank = rank, block.live = threads;
    block.memory.assign(m.launch.smem_bytes, 0xff);  // as f16 or f32 a NaN: use before a write shows
    block.warps.resize(threads / kWarp);
    for (unsigned thread = 0; thread < threads; ++thread) {
      Fiber& fiber = *m.fibers[rank * threads + thread];
      fiber.thread = thread, fiber.block = &block, fiber.done = false, fiber.ready = nullptr,
      fiber.cluster_generation = 0;
      fiber.groups.clear(), fiber.open.clear();
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, entry, 0);
    }
  }
  std::vector<unsigned> order(m.live / kWarp);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  while (m.live > 0) {
    std::shuffle(order.begin(), order.end(), m.random);
    bool moved = false;
    for (const unsigned warp : order) {
      // A warp goes on as long as one of its lanes can: fewer rounds, and far apart warps.
      for (bool again = true; again;) {
        again = false;
        for (unsigned lane = 0; lane < kWarp; ++lane) {
          Fiber& fiber = *m.fibers[warp * kWarp + lane];
          if (fiber.done || (fiber.ready != nullptr && !(*fiber.ready)())) continue;
          fiber.ready = nullptr;
          m.current = &fiber;
          swapcontext(&m.scheduler, &fiber.context);
          moved = again = true;
          if (!m.failure.empty()) throw Fault(m.failure);
        }
      }
    }
    if (moved) continue;
    if (m.engine.empty()) throw Fault("the threads wait for each other:" + state_in_words());
    const auto work = std::move(m.engine.front());
    m.engine.pop_front();
    work();
  }
  if (!m.engine.empty()) throw Fault("a copy of the engine lands in a block that has left");
}

void do_copy(const Copy& c) {
  unsigned char* to = shared_bytes(c.destination, c.size);
  if (c.bytes != 0) std::memcpy(to, c.source, c.bytes);
  std::memset(to + c.bytes, 0, c.size - c.bytes);
}

Block& block_of(unsigned address) {
  const unsigned rank = address >> kRankShift;
  if (rank == 0) return *self().block;
  if (rank > machine->blocks.size()) fault("a shared address of a block that the cluster does not have");
  Block& block = machine->blocks[rank - 1];
  if (block.live == 0) fault("an access to the shared memory of a block that has left");
  return block;
}

void end_phase_if_complete(Mbarrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  ++barrier.phases;
  barrier.missing = barrier.arrivals;
}

Mbarrier& mbarrier_at(unsigned address) {
  Block& block = block_of(address);
  const auto it = block.mbarriers.find(address & ((1u << kRankShift) - 1));
  if (it == block.mbarriers.end()) fault("an mbarrier that was not initialised");
  return it->second;
}

void finish_wgmmas(std::vector<std::function<void()>>& group) {
  for (const auto& work : group) work();
}

}  // namespace

void fault(const std::string& text) {
  const Fiber& fiber = self();
  throw Fault("block " + std::to_string(fiber.block->index) + " thread " + std::to_string(fiber.thread) + ": " + text);
}

void run(const Launch& launch, const std::function<void()>& kernel) {
  if (launch.threads % kWarp != 0 || launch.blocks % launch.cluster != 0) {
    throw Fault("threads or blocks do not divide");
  }
  Machine here;
  here.launch = launch;
  here.kernel = &kernel;
  here.random.seed(launch.seed);
  machine = &here;
  for (unsigned block = 0; block < launch.blocks; block += launch.cluster) run_cluster(block);
  machine = nullptr;
}

Index thread_index() { return {self().thread}; }
Index block_index() { return {self().block->index}; }
Index grid_extent() { return {machine->launch.blocks}; }
unsigned lane() { return self().thread % kWarp; }
Timing timing() { return machine->launch.timing; }
unsigned cluster_rank() { return self().block->rank; }

unsigned mapped(unsigned address, unsigned rank) {
  if (rank >= machine->launch.cluster) fault("mapa to a rank beyond the cluster");
  return (address & ((1u << kRankShift) - 1)) | (rank + 1) << kRankShift;
}

unsigned char* shared_range(unsigned address, unsigned bytes, unsigned alignment) {
  Block& block = block_of(address);
  const unsigned offset = address & ((1u << kRankShift) - 1);
  if (offset < kSharedBase || offset - kSharedBase + bytes > block.memory.size() || offset % alignment != 0) {
    fault("shared address " + std::to_string(offset - kSharedBase) + " with " + std::to_string(bytes) +
          " bytes: beyond the block's " + std::to_string(block.memory.size()) + " or not aligned");
  }
  return block.memory.data() + (offset - kSharedBase);
}

unsigned char* shared_bytes(unsigned address, unsigned bytes) { return shared_range(address, bytes, bytes); }

void block_barrier(unsigned id, unsigned threads) {
  Block& block = *self().block;
  Barrier& barrier = block.barriers[id];
  const std::uint64_t generation = barrier.generation;
  if (++barrier.arrived == (threads == 0 ? block.live : threads)) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  wait_until("bar.sync", [&barrier, generation] { return barrier.generation != generation; });
}

void wait_for_grids_ahead() {
  auto work = std::exchange(machine->launch.grids_ahead, nullptr);
  if (work) work();
}

void cluster_arrive() {
  ClusterBarrier& barrier = machine->cluster;
  if (self().cluster_generation == barrier.generation) fault("barrier.cluster.arrive twice without a wait");
  self().cluster_generation = barrier.generation;
  ++barrier.arrived;
  barrier.end_if_complete();
}

void cluster_wait() {
  const ClusterBarrier& barrier = machine->cluster;
  const std::uint64_t generation = self().cluster_generation;
  wait_until("barrier.cluster.wait", [&barrier, generation] { return barrier.generation != generation; });
}

void warp_together(const char* what, void* mine, const std::function<void(const Lanes&)>& work) {
  Warp& warp = own_warp();
  if (warp.arrived == 0) warp.what = what;
  if (std::strcmp(warp.what, what) != 0) {
    fault(std::string("a lane is at ") + what + " while others of its warp are at " + warp.what);
  }
  warp.mine[lane()] = mine;
  const std::uint64_t generation = warp.generation;
  if (++warp.arrived == kWarp) {
    work(warp.mine);
    warp.arrived = 0;
    ++warp.generation;
    return;
  }
  wait_until(what, [&warp, generation] { return warp.generation != generation; });
}

void copy_async(unsigned destination, const void* source, unsigned size, unsigned bytes) {
  if (bytes > size) fault("cp.async of more bytes than its size");
  if (bytes != 0 && reinterpret_cast<std::uintptr_t>(source) % size != 0) fault("cp.async from an unaligned source");
  shared_bytes(destination, size);  // complains now
  const Copy copy{destination, source, size, bytes};
  if (timing() == Timing::early) {
    do_copy(copy);
  } else {
    self().open.push_back(copy);
  }
}

void copy_async_commit() { self().groups.push_back(std::move(self().open)), self().open.clear(); }

void copy_async_wait(unsigned pending) {
  auto& groups = self().groups;
  while (groups.size() > pending) {
    for (const Copy& copy : groups.front()) do_copy(copy);
    groups.pop_front();
  }
}

void mbarrier_init(unsigned barrier, unsigned arrivals) {
  shared_bytes(barrier, 8);
  self().block->mbarriers[barrier] = {.arrivals = arrivals, .missing = arrivals};
}

void mbarrier_arrive(unsigned barrier, unsigned expected_bytes) {
  Mbarrier& b = mbarrier_at(barrier);
  if (b.missing == 0) fault("more arrivals at an mbarrier than it was told of");
  b.bytes += expected_bytes;
  --b.missing;
  end_phase_if_complete(b);
}

void mbarrier_wait(unsigned barrier, unsigned parity) {
  const Mbarrier& b = mbarrier_at(barrier);
  wait_until("mbarrier.try_wait", [&b, parity] { return b.phases % 2 != parity; });
}

void engine(std::function<void()> work, std::initializer_list<unsigned> barriers, unsigned bytes) {
  std::vector<Mbarrier*> told;
  for (const unsigned barrier : barriers) told.push_back(&mbarrier_at(barrier));
  auto all = [work = std::move(work), told = std::move(told), bytes, fiber = machine->current] {
    Fiber* before = machine->current;
    machine->current = fiber;
    work();
    for (Mbarrier* barrier : told) {
      barrier->bytes -= bytes;
      end_phase_if_complete(*barrier);
    }
    machine->current = before;
  };
  if (timing() == Timing::early) {
    all();
  } else {
    machine->engine.push_back(std::move(all));
  }
}

void wgmma_issue(std::function<void()> work) {
  if (timing() == Timing::early) {
    work();
  } else {
    own_warp().open.push_back(std::move(work));
  }
}

void wgmma_commit() {
  warp_together("wgmma.commit_group", nullptr, [&](const Lanes&) {
    Warp& warp = own_warp();
    warp.groups.push_back(std::move(warp.open));
    warp.open.clear();
  });
}

void wgmma_wait(unsigned pending) {
  warp_together("wgmma.wait_group", nullptr, [&](const Lanes&) {
    Warp& warp = own_warp();
    while (warp.groups.size() > pending) {
      finish_wgmmas(warp.groups.front());
      warp.groups.pop_front();
    }
  });
}

}  // namespace emulator
