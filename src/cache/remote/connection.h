// SPDX-License-Identifier: Apache-2.0
// One connection to a server, whatever its protocol. Used by one thread at a time; returns by the deadline.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "cache/remote/remote_url.h"
#include "qkvjit/remote_cache.h"

namespace qkvjit::remote {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(Clock::duration left) : at_(Clock::now() + left) {}
  explicit Deadline(Clock::time_point at) : at_(at) {}

  [[nodiscard]] Clock::time_point at() const { return at_; }
  [[nodiscard]] bool passed() const { return Clock::now() >= at_; }
  /// Rounded up, so that a wait of this long does not end just before the deadline; 0 once it has passed.
  [[nodiscard]] int milliseconds_left() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30));
  }

 private:
  Clock::time_point at_;
};

enum class Outcome : std::uint8_t {
  ok,
  absent,
  timeout,
  unreachable,
  denied,
  server_error,
  bad_answer,
  too_large,
};

struct Answer {
  Outcome outcome = Outcome::ok;
  std::string text;  ///< the value that was got; of a failure: what happened, without credentials
};

class Connection {
 public:
  Connection() = default;
  virtual ~Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /// `limit`: a value of more bytes is not received.
  virtual Answer get(std::string_view name, std::uint64_t limit, const Deadline& deadline) = 0;
  virtual Answer put(std::string_view name, std::string_view value, const Deadline& deadline) = 0;
};

using Connect = std::function<std::unique_ptr<Connection>()>;

// Each is defined where its transport was built.
Connect redis_connections(const Url& url, const RemoteCacheOptions& options);
Connect http_connections(const Url& url, const RemoteCacheOptions& options);

/// A server's own words, fit for one line of a log.
std::string quoted(std::string_view words);

}  // namespace qkvjit::remote
