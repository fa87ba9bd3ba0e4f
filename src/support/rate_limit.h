// SPDX-License-Identifier: Apache-2.0
// Lets one of many equal warnings through in a while, and says how many it held back. Thread-safe, without a lock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace qkvjit {

class RateLimit {
 public:
  explicit RateLimit(std::chrono::nanoseconds interval = std::chrono::seconds(10)) : interval_(interval.count()) {}

  /// How many were held back since the last that got through, where this one may go; else nothing.
  std::optional<std::uint64_t> try_pass() {
    const std::int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
    std::int64_t next = next_.load(std::memory_order_relaxed);
    if (now < next || !next_.compare_exchange_strong(next, now + interval_, std::memory_order_relaxed)) {
      held_back_.fetch_add(1, std::memory_order_relaxed);
      return std::nullopt;
    }
    return held_back_.exchange(0, std::memory_order_relaxed);
  }

 private:
  std::int64_t interval_;
  std::atomic<std::int64_t> next_{INT64_MIN};
  std::atomic<std::uint64_t> held_back_{0};
};

}  // namespace qkvjit
