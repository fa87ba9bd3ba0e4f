// SPDX-License-Identifier: Apache-2.0
// Connections that are kept between calls, lent to one thread at a time. The lock is never held across I/O.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cache/remote/connection.h"

namespace qkvjit::remote {

class ConnectionPool {
 public:
  ConnectionPool(Connect connect, unsigned most) : connect_(std::move(connect)), most_(most) {}

  /// Gives its connection back when it goes.
  class Lease {
   public:
    Lease(ConnectionPool& pool, std::unique_ptr<Connection> connection)
        : pool_(&pool), connection_(std::move(connection)) {}
    ~Lease() {
      if (connection_ != nullptr) pool_->give_back(std::move(connection_));
    }
    Lease(Lease&& other) noexcept = default;
    Lease& operator=(Lease&&) = delete;
    Connection* get() const { return connection_.get(); }

   private:
    ConnectionPool* pool_;
    std::unique_ptr<Connection> connection_;
  };

  /// Null inside where every connection was lent until the deadline.
  Lease take(const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    const auto is_free = [this] { return !idle_.empty() || made_ < most_; };
    if (!given_back_.wait_until(lock, deadline.at(), is_free)) return {*this, nullptr};
    if (idle_.empty()) {
      auto connection = connect_();  // opens nothing yet
      idle_.reserve(++made_);        // so that giving back cannot fail
      return {*this, std::move(connection)};
    }
    auto connection = std::move(idle_.back());  // the one used last: the others may fall asleep
    idle_.pop_back();
    return {*this, std::move(connection)};
  }

 private:
  void give_back(std::unique_ptr<Connection> connection) {
    {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(connection));
    }
    given_back_.notify_one();
  }

  const Connect connect_;
  const unsigned most_;
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::vector<std::unique_ptr<Connection>> idle_;
  unsigned made_ = 0;
};

}  // namespace qkvjit::remote
