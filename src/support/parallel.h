// SPDX-License-Identifier: Apache-2.0
// A loop whose steps run on several threads, the caller's among them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace qkvjit {

/// Calls work(i) once for each i below `count`, on up to `threads` threads (0: as many as the machine has), and returns
/// when all are done. `work` must not throw. Where the system gives no more threads, fewer do the work.
template <typename Work>
void for_each_parallel(std::size_t count, unsigned threads, Work&& work) {
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  std::atomic<std::size_t> next{0};
  const auto run = [&] {
    for (std::size_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::jthread> workers;
  try {
    for (std::size_t i = 1; i < std::min<std::size_t>(threads, count); ++i) workers.emplace_back(run);
  } catch (const std::system_error&) {
    // The workers that did start are enough, or this thread alone.
  }
  run();
}

}  // namespace qkvjit
