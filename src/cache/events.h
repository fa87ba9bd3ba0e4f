// SPDX-License-Identifier: Apache-2.0
// Events for CacheOptions::on_event, kept back until the call that they are of holds no lock and nobody waits for it:
// only then may the callback use the cache, also for the same kernel.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "qkvjit/kernel_cache.h"

namespace qkvjit {

/// The events of one call, on its thread.
class EventList {
 public:
  explicit EventList(const std::function<void(const CacheEvent&)>& callback) : callback_(callback) {}

  void add(CacheEventKind kind, const Specialization& spec, double milliseconds, std::string error = {});
  /// Calls the callback for each and forgets them. What it throws is logged and dropped.
  void fire() noexcept;

 private:
  const std::function<void(const CacheEvent&)>& callback_;
  std::vector<CacheEvent> events_;
};

/// work(events), and afterwards, also where it throws, the events.
template <typename Work>
auto with_events(const std::function<void(const CacheEvent&)>& callback, Work&& work) {
  EventList events(callback);
  try {
    auto result = work(events);
    events.fire();
    return result;
  } catch (...) {
    events.fire();
    throw;
  }
}

/// what() of the exception that is being handled.
std::string current_error_text();

}  // namespace qkvjit
