// SPDX-License-Identifier: Apache-2.0
// Milliseconds since its construction.
#pragma once

#include <chrono>

namespace qkvjit {

class Stopwatch {
 public:
  [[nodiscard]] double milliseconds() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace qkvjit
