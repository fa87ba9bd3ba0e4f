// SPDX-License-Identifier: Apache-2.0
// The URLs of remote caches, taken apart.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace qkvjit::remote {

enum class Scheme : std::uint8_t { redis, redis_unix, http, https };

struct Url {
  Scheme scheme = Scheme::redis;
  std::string user;
  std::string password;
  std::string host;  ///< without the brackets of an IPv6 address
  std::uint16_t port = 0;
  std::string path;  ///< HTTP: the prefix, without a slash at its end; redis+unix: the socket
  unsigned database = 0;

  /// Without user and password.
  [[nodiscard]] std::string text() const;
};

/// Throws Error with the URL (credentials masked), what is wrong with it and the forms there are.
Url parse_url(std::string_view text);

}  // namespace qkvjit::remote
