// SPDX-License-Identifier: Apache-2.0
// A map from key to shared value in which each value is made once: the first to ask makes it, the others wait for it.
// A failure reaches everyone who waits, and is forgotten. Values are found without the writer's lock. What nobody
// outside holds can be taken out again, least recently used first. Thread-safe.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace qkvjit {

/// Whether a value may be taken out once its users have let go of it.
enum class Keep : std::uint8_t { while_used, forever };

template <typename Key, typename T, typename Hash>
class SingleFlightMap {
 public:
  using Value = std::shared_ptr<const T>;

  /// `cost` is what an entry counts for: bytes, or 1.
  explicit SingleFlightMap(std::size_t (*cost)(const T&)) : cost_of_(cost) {}

  /// The value, or null. Counts as a use.
  Value find(const Key& key, Keep keep = Keep::while_used) const {
    const std::shared_lock lock(mutex_);
    const auto it = ready_.find(key);
    if (it == ready_.end()) return nullptr;
    it->second.touch(clock_.load(std::memory_order_relaxed), keep);
    return it->second.value;
  }

  struct Result {
    Value value;
    bool waited = false;  ///< for another thread that made it
  };

  /// The value; where there is none, what `make` returns.
  template <typename Make>
  Result get(const Key& key, Keep keep, Make&& make) {
    std::promise<Value> promise;
    std::shared_future<Value> flight;
    {
      const std::unique_lock lock(mutex_);
      if (const auto it = ready_.find(key); it != ready_.end()) {
        it->second.touch(clock_.load(std::memory_order_relaxed), keep);
        return {it->second.value};
      }
      const auto [it, is_mine] = flights_.try_emplace(key);
      if (is_mine) {
        it->second = promise.get_future().share();
      } else {
        flight = it->second;
      }
    }
    if (flight.valid()) {
      Value value = flight.get();
      if (keep == Keep::forever) find(key, keep);  // still there, for we hold it
      return {std::move(value), true};
    }

    // No lock is held while making: other keys go on, and `make` may use the cache.
    try {
      Value value = make();
      {
        const std::unique_lock lock(mutex_);
        const std::size_t cost = cost_of_(*value);
        const std::uint64_t now = clock_.fetch_add(1, std::memory_order_relaxed) + 1;
        ready_.try_emplace(key, value, cost, now, keep);
        cost_.fetch_add(cost, std::memory_order_relaxed);
        flights_.erase(key);
      }
      promise.set_value(value);
      return {std::move(value)};
    } catch (...) {
      {
        const std::unique_lock lock(mutex_);
        flights_.erase(key);
      }
      promise.set_exception(std::current_exception());
      throw;
    }
  }

  /// Takes out what nobody else holds and nobody keeps forever, until all that is left costs at most `limit` (0: no
  /// limit) or nothing more can go. The caller destroys what it gets, with no lock held.
  std::vector<Value> take_surplus(std::size_t limit) {
    if (limit == 0 || cost() <= limit) return {};
    std::vector<Value> taken;
    const std::unique_lock lock(mutex_);
    // A value gets a new owner only through this map or from an owner, so under the lock a count of one stays one.
    std::vector<typename Entries::iterator> idle;
    for (auto it = ready_.begin(); it != ready_.end(); ++it) {
      if (it->second.value.use_count() == 1 && !it->second.is_kept.load(std::memory_order_relaxed)) idle.push_back(it);
    }
    std::sort(idle.begin(), idle.end(), [](const auto& a, const auto& b) { return last_use(a) < last_use(b); });
    for (const auto& it : idle) {
      if (cost() <= limit) break;
      cost_.fetch_sub(it->second.cost, std::memory_order_relaxed);
      taken.push_back(std::move(it->second.value));
      ready_.erase(it);
    }
    return taken;
  }

  /// Of all entries together.
  [[nodiscard]] std::size_t cost() const noexcept { return cost_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    Entry(Value made, std::size_t its_cost, std::uint64_t now, Keep keep)
        : value(std::move(made)), cost(its_cost), last_use(now), is_kept(keep == Keep::forever) {}
    // Readers store under the shared lock: only what changes is written, to leave the line in every core's cache.
    void touch(std::uint64_t now, Keep keep) const noexcept {
      if (last_use.load(std::memory_order_relaxed) != now) last_use.store(now, std::memory_order_relaxed);
      if (keep == Keep::forever) is_kept.store(true, std::memory_order_relaxed);
    }

    Value value;
    std::size_t cost;
    mutable std::atomic<std::uint64_t> last_use;
    mutable std::atomic<bool> is_kept;
  };
  using Entries = std::unordered_map<Key, Entry, Hash>;

  static std::uint64_t last_use(const typename Entries::iterator& it) {
    return it->second.last_use.load(std::memory_order_relaxed);
  }

  std::size_t (*cost_of_)(const T&);
  mutable std::shared_mutex mutex_;
  Entries ready_;
  std::unordered_map<Key, std::shared_future<Value>, Hash> flights_;
  std::atomic<std::size_t> cost_{0};
  std::atomic<std::uint64_t> clock_{0};  ///< advances with each new entry; uses between two of them are equally recent
};

}  // namespace qkvjit
