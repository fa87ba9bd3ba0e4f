// SPDX-License-Identifier: Apache-2.0
// CUDA does not survive fork(): in the child of a process that has initialised the driver every call of it fails or
// hangs, and a lock that another thread held stays locked. A handler of pthread_atfork counts such forks, so that a
// check costs one relaxed load. Thread-safe.
#pragma once

#include <atomic>
#include <string_view>

namespace qkvjit {

namespace detail {
extern std::atomic<unsigned> fork_generation;
}  // namespace detail

/// How many forks lie between this process and the one that initialised the driver; 0 in that one.
inline unsigned fork_generation() noexcept { return detail::fork_generation.load(std::memory_order_relaxed); }
inline bool is_forked_child() noexcept { return fork_generation() != 0; }

/// From now on a fork of this process makes a child that must not use the driver.
void note_driver_in_use();

/// `operation` begins the message.
[[noreturn]] void throw_forked_process(std::string_view operation);

}  // namespace qkvjit
