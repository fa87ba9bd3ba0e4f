// SPDX-License-Identifier: Apache-2.0
#include "cache/key_lock.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <thread>

namespace qkvjit {

KeyLock::KeyLock(int directory, const char* file_name, std::uint64_t number, std::chrono::milliseconds timeout)
    : file_(openat(directory, file_name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600)) {
  if (file_.get() < 0) return;
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(number >> 2);  // positive, and so is its end
  range.l_len = 1;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  // There is no lock with a deadline, so it is asked for again and again, at first often.
  for (std::chrono::milliseconds pause(1);; pause = std::min(2 * pause, std::chrono::milliseconds(20))) {
    if (fcntl(file_.get(), F_OFD_SETLK, &range) == 0) {
      state_ = LockState::held;
      return;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EACCES) return;
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) {
      state_ = LockState::timed_out;
      return;
    }
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline - now));
  }
}

}  // namespace qkvjit
