// SPDX-License-Identifier: Apache-2.0
// One of 2^62 locks between processes: a byte of a file that nobody reads or writes. The kernel lets go of it when the
// holder ends, however it ends, so a file that lies there means nothing. Two locks of one process exclude each other
// too. A child forked (without exec) under a lock keeps it until it ends: that is what deadlines are for.
#pragma once

#include <chrono>
#include <cstdint>

#include "support/file.h"

namespace qkvjit {

enum class LockState : std::uint8_t {
  held,
  timed_out,    ///< someone else had it until the deadline
  unavailable,  ///< the file cannot be opened, or its file system has no locks
};

class KeyLock {
 public:
  KeyLock() = default;  ///< unavailable
  /// The lock `number` of `file_name` in `directory`, waited for up to `timeout`.
  KeyLock(int directory, const char* file_name, std::uint64_t number, std::chrono::milliseconds timeout);

  [[nodiscard]] LockState state() const noexcept { return state_; }

 private:
  FileDescriptor file_;  // closing it lets go
  LockState state_ = LockState::unavailable;
};

}  // namespace qkvjit
