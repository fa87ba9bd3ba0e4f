// SPDX-License-Identifier: Apache-2.0
// The library's log: one spdlog logger named "qkvjit" on stderr. Its level is read once from QKVJIT_LOG
// (trace, debug, info, warn, error, off; warn where unset). A program that registers a logger of that name with
// spdlog before the first line keeps its own. Thread-safe. Never call it on the launch path or in a destructor.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace qkvjit::log {

enum class Level { trace, debug, info, warn, error };

[[nodiscard]] bool enabled(Level level);
void write(Level level, std::string_view text);

/// log::line(log::Level::info, "compiled {} in {:.0f} ms", name, ms); formats only where the level is on.
template <typename... Args>
void line(Level level, fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(level)) write(level, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace qkvjit::log
