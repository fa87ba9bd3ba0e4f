// SPDX-License-Identifier: Apache-2.0
// What suites that check error messages share. Pure functions.
#pragma once

#include <functional>
#include <string>

/// The message of the Exception that `work` throws, or a text that says there was none.
template <typename Exception>
std::string thrown_by(const std::function<void()>& work) {
  try {
    work();
  } catch (const Exception& error) {
    return error.what();
  }
  return "threw nothing of that class";
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
