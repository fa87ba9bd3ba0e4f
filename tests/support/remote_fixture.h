// SPDX-License-Identifier: Apache-2.0
// What the suites of the shared cache have in common: names, options, and a clock for "by the deadline".
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "qkvjit/remote_cache.h"

namespace test {

using namespace std::chrono_literals;

inline constexpr auto kDeadline = 250ms;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr auto kSlack = 600ms;
#else
inline constexpr auto kSlack = 150ms;
#endif

inline const std::string kName(64, 'a');
inline const std::string kOtherName(64, 'b');
inline const std::string kKey = "a key of any length";

inline qkvjit::RemoteCacheOptions options_for(std::string url, std::string key = kKey) {
  qkvjit::RemoteCacheOptions options;
  options.url = std::move(url);
  options.hmac_key = std::move(key);
  options.deadline = kDeadline;
  return options;
}

/// work() returns by `limit` and the slack.
template <typename Work>
auto in_time(std::chrono::milliseconds limit, Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  auto result = work();
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
  CHECK_MESSAGE(took <= limit + kSlack, "took " << took.count() << " ms");
  return result;
}

inline std::optional<std::string> load_in_time(qkvjit::RemoteStore& store, const std::string& name = kName) {
  return in_time(kDeadline, [&] { return store.load(name); });
}

/// Stores and waits for the server's word; true where it took the entry.
inline bool store_now(qkvjit::RemoteStore& store, const std::string& name, std::string bytes) {
  const auto before = store.stats().stored;
  if (!store.store(name, std::move(bytes))) return false;
  CHECK(store.flush(20s));
  return store.stats().stored == before + 1;
}

}  // namespace test
