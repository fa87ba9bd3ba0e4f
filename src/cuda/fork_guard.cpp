// SPDX-License-Identifier: Apache-2.0
#include "cuda/fork_guard.h"

#include <fmt/format.h>
#include <pthread.h>

#include <mutex>

#include "qkvjit/error.h"

namespace qkvjit {

std::atomic<unsigned> detail::fork_generation{0};

void note_driver_in_use() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Without memory for one handler there is no guard, which is no reason to refuse a process that never forks.
    pthread_atfork(nullptr, nullptr, [] { detail::fork_generation.fetch_add(1, std::memory_order_relaxed); });
  });
}

void throw_forked_process(std::string_view operation) {
  throw ForkedProcess(fmt::format(
      "{}: this process was forked from one that had initialised CUDA, which a child cannot use; start workers with "
      "exec (Python: the 'spawn' start method), or fork before the parent makes its first DeviceContext",
      operation));
}

}  // namespace qkvjit
