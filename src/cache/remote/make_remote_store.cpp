// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <utility>

#include "cache/remote/connection.h"
#include "cache/remote/remote_store.h"
#include "cache/remote/remote_url.h"
#include "qkvjit/error.h"
#include "qkvjit/remote_cache.h"

namespace qkvjit {
namespace remote {
namespace {

void check(bool holds, std::string_view option, std::string_view needs) {
  if (!holds) throw Error(fmt::format("Remote cache: the option {} needs {}.", option, needs));
}

[[maybe_unused]] [[noreturn]] void lacks(const Url& url, std::string_view option, std::string_view package) {
  throw Error(fmt::format(
      "Remote cache: this build of qkvjit cannot reach '{}'. It needs to be configured with {}=ON, for which the "
      "packages {} and libsodium-dev (Debian's names) must be installed.",
      url.text(), option, package));
}

std::shared_ptr<RemoteStore> open(const Url& url, [[maybe_unused]] const RemoteCacheOptions& options) {
  if (url.scheme == Scheme::redis || url.scheme == Scheme::redis_unix) {
#ifdef QKVJIT_WITH_REDIS
    return open_store(options, url.text(), redis_connections(url, options));
#else
    lacks(url, "QKVJIT_WITH_REDIS", "libhiredis-dev");
#endif
  }
#ifdef QKVJIT_WITH_HTTP
  return open_store(options, url.text(), http_connections(url, options));
#else
  lacks(url, "QKVJIT_WITH_HTTP", "libcurl4-openssl-dev");
#endif
}

}  // namespace
}  // namespace remote

std::shared_ptr<RemoteStore> make_remote_store(const RemoteCacheOptions& options) {
  using namespace std::chrono_literals;
  const remote::Url url = remote::parse_url(options.url);
  const bool is_http = url.scheme == remote::Scheme::http || url.scheme == remote::Scheme::https;
  constexpr auto kLongest = std::chrono::hours(1);
  remote::check(options.deadline > 0ms && options.deadline <= kLongest, "deadline", "1 ms to 1 hour");
  remote::check(options.back_off > 0ms && options.back_off <= options.max_back_off, "back_off",
                "at least 1 ms and at most max_back_off");
  remote::check(options.max_back_off <= 24 * kLongest, "max_back_off", "at most a day");
  remote::check(options.max_connections > 0, "max_connections", "at least 1");
  remote::check(options.max_entry_bytes > 0 && options.max_entry_bytes <= 1u << 30, "max_entry_bytes",
                "1 byte to 1 GiB");
  remote::check(options.ttl >= 0s, "ttl", "0 or more seconds");
  remote::check(!is_http || options.ttl == 0s, "ttl", "a redis URL; an HTTP server expires entries by its own rules");
  remote::check(is_http || options.bearer_token.empty(), "bearer_token", "an http or https URL");
  remote::check(options.bearer_token.find_first_of("\r\n") == std::string::npos, "bearer_token", "to be one line");
  remote::check(options.bearer_token.empty() || (url.user.empty() && url.password.empty()), "bearer_token",
                "a URL without user and password");
  remote::check(url.scheme == remote::Scheme::https || options.ca_file.empty(), "ca_file", "an https URL");
  return remote::open(url, options);
}

}  // namespace qkvjit
