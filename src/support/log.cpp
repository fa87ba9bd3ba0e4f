// SPDX-License-Identifier: Apache-2.0
#include "support/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>
#include <string_view>

namespace qkvjit::log {
namespace {

constexpr const char* kName = "qkvjit";

spdlog::level::level_enum level_from_environment() {
  const char* text = std::getenv("QKVJIT_LOG");
  if (text == nullptr || *text == '\0') return spdlog::level::warn;
  const auto level = spdlog::level::from_str(text);
  // from_str answers "off" for any text it does not know; a typo should not silence warnings.
  return level == spdlog::level::off && std::string_view(text) != "off" ? spdlog::level::warn : level;
}

std::shared_ptr<spdlog::logger> make_logger() {
  if (auto theirs = spdlog::get(kName)) return theirs;
  auto logger = std::make_shared<spdlog::logger>(kName, std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_level(level_from_environment());
  logger->set_pattern("[%H:%M:%S.%e] [%n] [%^%l%$] %v");
  // A logger of that name registered by the program meanwhile stays the registered one.
  try {
    spdlog::register_logger(logger);
  } catch (const spdlog::spdlog_ex&) {
    return spdlog::get(kName);
  }
  return logger;
}

spdlog::logger& logger() {
  // Leaked: static destructors of the program may still log.
  static auto* const kLogger = new std::shared_ptr<spdlog::logger>(make_logger());
  return **kLogger;
}

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::trace:
      return spdlog::level::trace;
    case Level::debug:
      return spdlog::level::debug;
    case Level::info:
      return spdlog::level::info;
    case Level::warn:
      return spdlog::level::warn;
    case Level::error:
      break;
  }
  return spdlog::level::err;
}

}  // namespace

bool enabled(Level level) { return logger().should_log(to_spdlog(level)); }

void write(Level level, std::string_view text) {
  logger().log(to_spdlog(level), spdlog::string_view_t(text.data(), text.size()));
}

}  // namespace qkvjit::log
