// SPDX-License-Identifier: Apache-2.0
#include "cache/remote/remote_url.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "qkvjit/error.h"

namespace qkvjit::remote {
namespace {

constexpr std::string_view kForms =
    "redis://[user:password@]host[:port][/db], redis+unix://[user:password@]/path/of.sock[?db=n], "
    "http://[user:password@]host[:port][/prefix] or https://…";

std::string_view scheme_name(Scheme scheme) {
  switch (scheme) {
    case Scheme::redis:
      return "redis";
    case Scheme::redis_unix:
      return "redis+unix";
    case Scheme::http:
      return "http";
    case Scheme::https:
      break;
  }
  return "https";
}

/// Everything from the scheme to the last '@' may hold a password, also where the URL is malformed.
std::string masked(std::string_view text) {
  const std::size_t at = text.rfind('@');
  if (at == std::string_view::npos) return std::string(text);
  const std::size_t scheme = text.find("://");
  const std::string_view head = scheme < at ? text.substr(0, scheme + 3) : std::string_view();
  return fmt::format("{}***{}", head, text.substr(at));
}

/// `why` quotes nothing: of a malformed URL any part may be a piece of the password.
[[noreturn]] void refuse(std::string_view url, std::string_view why) {
  throw Error(fmt::format("Remote cache: the URL '{}' {}. It needs one of the forms {}.", masked(url), why, kForms));
}

std::optional<unsigned> number(std::string_view text, unsigned limit) {
  unsigned value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value > limit) return std::nullopt;
  return value;
}

std::string percent_decoded(std::string_view text, std::string_view url) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    unsigned code = 0;
    const char* const begin = text.data() + i + 1;
    if (i + 2 >= text.size() || std::from_chars(begin, begin + 2, code, 16).ptr != begin + 2 || code == 0) {
      refuse(url, "has a '%' in its user or password that is not followed by two hexadecimal digits");
    }
    out += static_cast<char>(code);
    i += 2;
  }
  return out;
}

void parse_credentials(Url& out, std::string_view text, std::string_view url) {
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos) refuse(url, "has a user but no password (write ':' between them)");
  out.user = percent_decoded(text.substr(0, colon), url);
  out.password = percent_decoded(text.substr(colon + 1), url);
}

void parse_host(Url& out, std::string_view text, std::string_view url) {
  std::string_view port;
  bool has_port = false;
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) refuse(url, "has a '[' without a ']'");
    out.host = text.substr(1, end - 1);
    const std::string_view rest = text.substr(end + 1);
    has_port = rest.starts_with(':');
    if (!rest.empty() && !has_port) refuse(url, "has more than a port after its ']'");
    port = rest.substr(has_port ? 1 : 0);
  } else {
    const std::size_t colon = text.find(':');
    has_port = colon != std::string_view::npos;
    out.host = text.substr(0, colon);
    if (has_port) port = text.substr(colon + 1);
  }
  if (out.host.empty()) refuse(url, "names no host");
  if (!has_port) return;
  const auto value = number(port, 65535);
  if (!value.has_value() || *value == 0) refuse(url, "has a port that is not one of 1 to 65535");
  out.port = static_cast<std::uint16_t>(*value);
}

void parse_database(Url& out, std::string_view text, std::string_view url) {
  const auto value = number(text, 1'000'000);
  if (!value.has_value()) refuse(url, "has a database that is no number");
  out.database = *value;
}

}  // namespace

std::string Url::text() const {
  const std::string_view name = scheme_name(scheme);
  if (scheme == Scheme::redis_unix) {
    return fmt::format("{}://{}{}", name, path, database == 0 ? std::string() : fmt::format("?db={}", database));
  }
  const bool bracketed = host.find(':') != std::string::npos;
  const std::string server =
      fmt::format("{}://{}{}{}:{}", name, bracketed ? "[" : "", host, bracketed ? "]" : "", port);
  return scheme == Scheme::redis ? fmt::format("{}/{}", server, database) : server + path;
}

Url parse_url(std::string_view text) {
  Url url;
  const std::size_t colon = text.find("://");
  const std::string_view scheme = text.substr(0, colon == std::string_view::npos ? 0 : colon);
  if (scheme == "redis") {
    url.port = 6379;
  } else if (scheme == "redis+unix") {
    url.scheme = Scheme::redis_unix;
  } else if (scheme == "http") {
    url.scheme = Scheme::http;
    url.port = 80;
  } else if (scheme == "https") {
    url.scheme = Scheme::https;
    url.port = 443;
  } else if (scheme == "rediss") {
    refuse(text, "asks for Redis over TLS, which is not supported (use https, or a TLS tunnel)");
  } else {
    refuse(text, "begins with no scheme known here");
  }
  if (std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) <= ' ' || c == '\x7f'; }))
    refuse(text, "holds a space or a control character");

  const std::string_view rest = text.substr(colon + 3);
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  std::string_view authority = rest.substr(0, slash);
  std::string_view path = rest.substr(slash);
  if (const std::size_t at = authority.rfind('@'); at != std::string_view::npos) {
    parse_credentials(url, authority.substr(0, at), text);
    authority.remove_prefix(at + 1);
  }
  if (url.scheme == Scheme::redis_unix) {
    if (!authority.empty()) refuse(text, "names a host; the path of a socket begins with '/'");
    const std::size_t query = std::min(path.find('?'), path.size());
    if (query < path.size()) {
      if (!path.substr(query).starts_with("?db=")) refuse(text, "has a query that is not ?db=n");
      parse_database(url, path.substr(query + 4), text);
    }
    url.path = path.substr(0, query);
    if (url.path.size() < 2) refuse(text, "names no socket");
    return url;
  }
  parse_host(url, authority, text);
  if (url.scheme == Scheme::redis) {
    if (path.size() > 1) parse_database(url, path.substr(1), text);
    return url;
  }
  if (path.find_first_of("?#@") != std::string_view::npos) refuse(text, "has '?', '#' or '@' in its prefix");
  while (path.ends_with('/')) path.remove_suffix(1);
  url.path = path;
  return url;
}

}  // namespace qkvjit::remote
