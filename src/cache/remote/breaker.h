// SPDX-License-Identifier: Apache-2.0
// Leaves a server alone for a while after it failed, and for twice as long after each further failure. One caller
// tries it again then, the others wait for what that one finds.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>

namespace qkvjit::remote {

class Breaker {
 public:
  using Clock = std::chrono::steady_clock;

  Breaker(Clock::duration back_off, Clock::duration max_back_off, Clock::duration probe)
      : back_off_(back_off), max_back_off_(max_back_off), probe_(probe) {}

  /// A ticket for failed(), or nothing where the server is to be left alone.
  std::optional<std::uint64_t> enter() {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    if (now < closed_until_) return std::nullopt;
    if (next_ > Clock::duration::zero()) closed_until_ = now + probe_;  // one probe, no crowd
    return round_;
  }

  void succeeded() {
    const std::lock_guard lock(mutex_);
    next_ = Clock::duration::zero();
    closed_until_ = {};
    ++round_;
  }

  /// Many that entered together and fail together count once.
  void failed(std::uint64_t ticket) {
    const std::lock_guard lock(mutex_);
    if (ticket != round_) return;
    ++round_;
    next_ = next_ == Clock::duration::zero() ? back_off_ : std::min(next_ * 2, max_back_off_);
    closed_until_ = Clock::now() + next_;
  }

 private:
  const Clock::duration back_off_, max_back_off_, probe_;
  std::mutex mutex_;
  Clock::duration next_{0};
  Clock::time_point closed_until_;
  std::uint64_t round_ = 0;
};

}  // namespace qkvjit::remote
