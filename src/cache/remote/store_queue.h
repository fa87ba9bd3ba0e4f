// SPDX-License-Identifier: Apache-2.0
// Entries on their way to the server, and the one thread that takes them there. In the background, because a store
// on the compile path would make every cold kernel wait for a slow server that can give it nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "cache/remote/connection.h"

namespace qkvjit::remote {

class StoreQueue {
 public:
  struct Entry {
    std::string name;
    std::string bytes;
  };
  /// Stores one entry by the deadline, or null: drops it. Called by the thread, without the lock. Must not throw.
  using Send = std::function<void(const Entry&, const Deadline*)>;

  StoreQueue(Send send, std::chrono::milliseconds deadline, std::uint64_t most_bytes);
  /// Goes on for one more deadline, then drops what is left.
  ~StoreQueue();
  StoreQueue(const StoreQueue&) = delete;
  StoreQueue& operator=(const StoreQueue&) = delete;

  /// False where it is full. The thread starts with the first entry.
  bool push(Entry entry);
  bool wait_empty(std::chrono::milliseconds limit);

 private:
  void work();

  const Send send_;
  const std::chrono::milliseconds deadline_;
  const std::uint64_t most_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  std::uint64_t bytes_ = 0;  // of the entries that wait and of the one on its way
  bool is_busy_ = false;
  bool is_ending_ = false;
  Deadline::Clock::time_point end_{};
  std::thread thread_;
};

}  // namespace qkvjit::remote
