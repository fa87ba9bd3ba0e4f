// SPDX-License-Identifier: Apache-2.0
#include "cache/remote/remote_store.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "cache/remote/breaker.h"
#include "cache/remote/connection.h"
#include "cache/remote/connection_pool.h"
#include "cache/remote/envelope.h"
#include "cache/remote/store_queue.h"
#include "support/log.h"

namespace qkvjit::remote {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kNameLength = 64;
constexpr std::chrono::minutes kBetweenWarnings{1};

bool is_name(std::string_view name) {
  return name.size() == kNameLength && name.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

class Store final : public RemoteStore {
 public:
  Store(RemoteCacheOptions options, std::string where, Connect connect)
      : options_(std::move(options)),
        where_(std::move(where)),
        pool_(std::move(connect), options_.max_connections),
        reach_(options_.back_off, options_.max_back_off, options_.deadline),
        storing_(options_.back_off, options_.max_back_off, options_.deadline),
        queue_([this](const StoreQueue::Entry& entry, const Deadline* deadline) { send(entry, deadline); },
               options_.deadline, options_.max_queued_bytes) {}

  std::optional<std::string> load(std::string_view name) noexcept override {
    try {
      const Clock::time_point start = Clock::now();
      auto found = find(name, Deadline(start + options_.deadline));
      update([&](RemoteStats& stats) {
        ++stats.loads;
        stats.load_ms += milliseconds_since(start);
        if (!found.has_value()) return;
        ++stats.hits;
        stats.bytes_loaded += found->size();
      });
      return found;
    } catch (...) {  // no memory: a miss
      return std::nullopt;
    }
  }

  bool store(std::string_view name, std::string bytes) noexcept override {
    try {
      if (options_.read_only || !is_name(name)) return false;
      const bool is_taken =
          bytes.size() <= options_.max_entry_bytes && queue_.push({std::string(name), std::move(bytes)});
      update([&](RemoteStats& stats) { ++(is_taken ? stats.stores : stats.stores_dropped); });
      return is_taken;
    } catch (...) {  // no memory, or no thread to be had
      return false;
    }
  }

  bool flush(std::chrono::milliseconds limit) noexcept override {
    try {
      return queue_.wait_empty(limit);
    } catch (...) {
      return false;
    }
  }

  [[nodiscard]] RemoteStats stats() const override {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

  [[nodiscard]] const std::string& where() const noexcept override { return where_; }

 private:
  std::optional<std::string> find(std::string_view name, const Deadline& deadline) {
    if (!is_name(name)) return std::nullopt;
    const auto ticket = reach_.enter();
    if (!ticket.has_value()) {
      update([](RemoteStats& stats) { ++stats.skipped; });
      return std::nullopt;
    }
    const std::uint64_t limit = options_.max_entry_bytes + kEnvelopeBytes;
    Answer answer = ask(deadline, [&](Connection& connection) { return connection.get(name, limit, deadline); });
    if (is_trouble(answer.outcome)) {
      reach_.failed(*ticket);
      report("load", answer);
      return std::nullopt;
    }
    reach_.succeeded();
    if (answer.outcome == Outcome::absent) {
      update([](RemoteStats& stats) { ++stats.absent; });
      return std::nullopt;
    }
    if (answer.outcome == Outcome::too_large) {
      report("load", answer);
      return std::nullopt;
    }
    std::string_view entry;
    const Verdict verdict = unseal(options_.hmac_key, name, answer.text, entry);
    if (verdict != Verdict::good) {
      reject(name, verdict);
      return std::nullopt;
    }
    answer.text.erase(0, kEnvelopeBytes);
    return std::move(answer.text);
  }

  /// On the queue's thread.
  void send(const StoreQueue::Entry& entry, const Deadline* deadline) noexcept {
    try {
      const auto reach = deadline == nullptr ? std::nullopt : reach_.enter();
      const auto ticket = reach.has_value() ? storing_.enter() : std::nullopt;
      if (!ticket.has_value()) {
        update([&](RemoteStats& stats) { ++(deadline == nullptr ? stats.stores_dropped : stats.skipped); });
        return;
      }
      const Clock::time_point start = Clock::now();
      const std::string sealed = seal(options_.hmac_key, entry.name, entry.bytes);
      const Answer answer =
          ask(*deadline, [&](Connection& connection) { return connection.put(entry.name, sealed, *deadline); });
      // A server that serves but takes nothing is no reason to stop loading from it.
      if (answer.outcome == Outcome::timeout || answer.outcome == Outcome::unreachable) {
        reach_.failed(*reach);
      } else {
        reach_.succeeded();
      }
      update([&](RemoteStats& stats) { stats.store_ms += milliseconds_since(start); });
      if (answer.outcome != Outcome::ok) {
        storing_.failed(*ticket);
        report("store", answer);
        return;
      }
      storing_.succeeded();
      update([&](RemoteStats& stats) {
        ++stats.stored;
        stats.bytes_stored += entry.bytes.size();
      });
    } catch (...) {  // no memory
      return;
    }
  }

  template <typename Ask>
  Answer ask(const Deadline& deadline, Ask&& with) {
    const ConnectionPool::Lease lease = pool_.take(deadline);
    if (lease.get() == nullptr) return {Outcome::timeout, "every connection was busy"};
    return with(*lease.get());
  }

  static bool is_trouble(Outcome outcome) {
    return outcome != Outcome::ok && outcome != Outcome::absent && outcome != Outcome::too_large;
  }

  void report(std::string_view what, const Answer& answer) {
    complain(fmt::format("{} failed: {}", what, answer.text), [&](RemoteStats& stats) {
      switch (answer.outcome) {
        case Outcome::timeout:
          ++stats.timeouts;
          break;
        case Outcome::unreachable:
          ++stats.unreachable;
          break;
        case Outcome::denied:
          ++stats.denied;
          break;
        case Outcome::server_error:
          ++stats.server_errors;
          break;
        case Outcome::too_large:
          ++stats.too_large;
          break;
        default:
          ++stats.bad_answers;
      }
    });
  }

  void reject(std::string_view name, Verdict verdict) {
    switch (verdict) {
      case Verdict::not_ours:
        complain(fmt::format("the entry {} has no envelope of this version", name),
                 [](RemoteStats& stats) { ++stats.not_ours; });
        break;
      case Verdict::other_proof:
        complain(options_.hmac_key.empty()
                     ? fmt::format("the entry {} was written with a key; give its hmac_key to read it", name)
                     : fmt::format("the entry {} was written without a key and is not trusted", name),
                 [](RemoteStats& stats) { ++stats.unsigned_entries; });
        break;
      default:
        complain(fmt::format("the entry {} is damaged, forged, another entry or under another key", name),
                 [](RemoteStats& stats) { ++stats.forged; });
    }
  }

  template <typename Change>
  void update(Change&& change) {
    const std::lock_guard lock(mutex_);
    change(stats_);
  }

  /// Counts every failure, warns of one now and then.
  template <typename Count>
  void complain(std::string text, Count&& count) {
    bool is_due = false;
    std::uint64_t unsaid = 0;
    {
      const std::lock_guard lock(mutex_);
      count(stats_);
      const Clock::time_point now = Clock::now();
      is_due = now >= next_warning_;
      if (is_due) {
        next_warning_ = now + kBetweenWarnings;
        unsaid = std::exchange(unsaid_warnings_, 0);
      } else {
        ++unsaid_warnings_;
      }
      stats_.last_error = text;
    }
    if (!is_due) return;
    log::line(log::Level::warn, "remote cache {}: {}{}", where_, text,
              unsaid == 0 ? "" : fmt::format(" ({} more failures since the last warning)", unsaid));
  }

  const RemoteCacheOptions options_;
  const std::string where_;
  ConnectionPool pool_;
  Breaker reach_;             // of loads, and of everything where the server cannot be reached
  Breaker storing_;           // of stores alone
  mutable std::mutex mutex_;  // of the three below
  RemoteStats stats_;
  Clock::time_point next_warning_{};
  std::uint64_t unsaid_warnings_ = 0;
  StoreQueue queue_;  // last: its thread uses the rest
};

/// In a child of fork() the queue's thread does not exist, locks may be held by threads that do not either, and the
/// connections are the parent's. There everything is a miss, and nothing is destroyed.
class ForkGuard final : public RemoteStore {
 public:
  explicit ForkGuard(std::unique_ptr<Store> store) : store_(std::move(store)) {}
  ~ForkGuard() override {
    if (!is_here()) (void)store_.release();
  }

  std::optional<std::string> load(std::string_view name) noexcept override {
    return is_here() ? store_->load(name) : std::nullopt;
  }
  bool store(std::string_view name, std::string bytes) noexcept override {
    return is_here() && store_->store(name, std::move(bytes));
  }
  bool flush(std::chrono::milliseconds limit) noexcept override { return !is_here() || store_->flush(limit); }
  [[nodiscard]] RemoteStats stats() const override { return is_here() ? store_->stats() : RemoteStats{}; }
  [[nodiscard]] const std::string& where() const noexcept override { return store_->where(); }

 private:
  [[nodiscard]] bool is_here() const noexcept { return getpid() == process_; }

  const pid_t process_ = getpid();
  std::unique_ptr<Store> store_;
};

}  // namespace

std::string quoted(std::string_view words) {
  constexpr std::size_t kMost = 120;
  std::string out = "'";
  for (const char c : words.substr(0, kMost)) out += static_cast<unsigned char>(c) < ' ' || c == '\x7f' ? '.' : c;
  return out += words.size() > kMost ? "…'" : "'";
}

std::shared_ptr<RemoteStore> open_store(const RemoteCacheOptions& options, std::string where, Connect connect) {
  return std::make_shared<ForkGuard>(std::make_unique<Store>(options, std::move(where), std::move(connect)));
}

}  // namespace qkvjit::remote
