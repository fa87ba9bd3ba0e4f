// SPDX-License-Identifier: Apache-2.0
#include "cache/events.h"

#include "compile/name_expression.h"
#include "support/log.h"
#include "support/rate_limit.h"

namespace qkvjit {

const char* to_string(CacheEventKind kind) noexcept {
  switch (kind) {
    case CacheEventKind::compiled:
      return "compiled";
    case CacheEventKind::compile_failed:
      return "compile_failed";
    case CacheEventKind::compile_refused:
      return "compile_refused";
    case CacheEventKind::loaded:
      return "loaded";
    case CacheEventKind::load_failed:
      return "load_failed";
    case CacheEventKind::waited:
      return "waited";
    case CacheEventKind::module_evicted:
      return "module_evicted";
    case CacheEventKind::artifact_evicted:
      return "artifact_evicted";
  }
  return "unknown";
}

void EventList::add(CacheEventKind kind, const Specialization& spec, double milliseconds, std::string error) {
  if (!callback_) return;
  events_.push_back({kind, spec, kernel_label(spec), describe(spec), milliseconds, std::move(error)});
}

void EventList::fire() noexcept {
  static RateLimit limit;
  for (const CacheEvent& event : std::exchange(events_, {})) {
    try {
      callback_(event);
    } catch (...) {
      if (limit.try_pass()) log::line(log::Level::warn, "CacheOptions::on_event threw: {}", current_error_text());
    }
  }
}

std::string current_error_text() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of an unknown type";
  }
}

}  // namespace qkvjit
