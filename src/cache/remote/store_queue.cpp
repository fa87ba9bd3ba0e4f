// SPDX-License-Identifier: Apache-2.0
#include "cache/remote/store_queue.h"

#include <algorithm>
#include <utility>

namespace qkvjit::remote {

StoreQueue::StoreQueue(Send send, std::chrono::milliseconds deadline, std::uint64_t most_bytes)
    : send_(std::move(send)), deadline_(deadline), most_bytes_(most_bytes) {}

StoreQueue::~StoreQueue() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
    end_ = Deadline::Clock::now() + deadline_;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool StoreQueue::push(Entry entry) {
  {
    const std::lock_guard lock(mutex_);
    if (is_ending_ || bytes_ + entry.bytes.size() > most_bytes_) return false;
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    const std::uint64_t size = entry.bytes.size();
    entries_.push_back(std::move(entry));
    bytes_ += size;
  }
  changed_.notify_all();
  return true;
}

bool StoreQueue::wait_empty(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [this] { return entries_.empty() && !is_busy_; });
}

void StoreQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return is_ending_ || !entries_.empty(); });
    if (entries_.empty()) return;
    const Entry entry = std::move(entries_.front());
    entries_.pop_front();
    is_busy_ = true;
    Deadline::Clock::time_point at = Deadline::Clock::now() + deadline_;
    if (is_ending_) at = std::min(at, end_);
    lock.unlock();
    const Deadline deadline(at);
    send_(entry, deadline.passed() ? nullptr : &deadline);
    lock.lock();
    is_busy_ = false;
    bytes_ -= entry.bytes.size();
    changed_.notify_all();
  }
}

}  // namespace qkvjit::remote
