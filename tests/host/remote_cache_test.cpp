// SPDX-License-Identifier: Apache-2.0
// The shared cache without a server: URLs, options, and the envelope around each entry.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <string>

#include "cache/remote/envelope.h"
#include "cache/remote/remote_url.h"
#include "qkvjit/error.h"
#include "support/remote_fixture.h"

namespace {

using namespace qkvjit;
using namespace test;
using remote::Scheme;
using remote::Verdict;

/// What parse_url says of it.
std::string refusal(const std::string& url) {
  try {
    (void)remote::parse_url(url);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::string refusal(const RemoteCacheOptions& options) {
  try {
    (void)make_remote_store(options);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

std::string hexadecimal(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) out += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return out;
}

}  // namespace

TEST_SUITE("remote") {
  TEST_CASE("URLs are taken apart") {
    remote::Url url = remote::parse_url("redis://cache.example:6380/3");
    CHECK(url.scheme == Scheme::redis);
    CHECK(url.host == "cache.example");
    CHECK(url.port == 6380);
    CHECK(url.database == 3);
    CHECK(url.password.empty());
    CHECK(url.text() == "redis://cache.example:6380/3");

    url = remote::parse_url("redis://:p%40ss%2Fword@[::1]");
    CHECK(url.user.empty());
    CHECK(url.password == "p@ss/word");
    CHECK(url.host == "::1");
    CHECK(url.port == 6379);
    CHECK(url.text() == "redis://[::1]:6379/0");

    url = remote::parse_url("redis+unix://me:secret@/run/redis.sock?db=2");
    CHECK(url.scheme == Scheme::redis_unix);
    CHECK(url.user == "me");
    CHECK(url.path == "/run/redis.sock");
    CHECK(url.database == 2);
    CHECK(url.text() == "redis+unix:///run/redis.sock?db=2");

    url = remote::parse_url("https://me:secret@cache.example/a/prefix/");
    CHECK(url.scheme == Scheme::https);
    CHECK(url.port == 443);
    CHECK(url.path == "/a/prefix");
    CHECK(url.text() == "https://cache.example:443/a/prefix");
    CHECK(remote::parse_url("http://cache.example").port == 80);
  }

  TEST_CASE("a wrong URL is refused with what it got and needs, and without its password") {
    for (const char* url : {"",
                            "cache.example",
                            "ftp://host",
                            "rediss://host",
                            "redis://",
                            "redis://:6379",
                            "redis://host:",
                            "redis://host:0",
                            "redis://host:65536",
                            "redis://host:1x",
                            "redis://host/x",
                            "redis://host/-1",
                            "redis://[::1",
                            "redis://[::1]x",
                            "redis://secret@host",
                            "redis://me:secret%4@host",
                            "redis://me:secret%zz@host",
                            "redis://me:secret%00@host",
                            "redis+unix://host/run/x.sock",
                            "redis+unix://",
                            "redis+unix:///x?timeout=3",
                            "http://host/?a=b",
                            "http://host/#x",
                            "http://me:secret/word@host",
                            "redis://host/secret@x",
                            "http://ho st",
                            "http://host/a\r\nX: y",
                            "me:secret@host"}) {
      CAPTURE(url);
      const std::string text = refusal(url);
      CHECK(has(text, "redis://[user:password@]host[:port][/db]"));
      CHECK_FALSE(has(text, "secret"));
      CHECK_FALSE(has(text, "/word"));
    }
    CHECK(has(refusal(std::string("redis://host:65536")), "redis://host:65536"));
    CHECK(has(refusal(std::string("redis://host:65536")), "1 to 65535"));
  }

  TEST_CASE("options that make no sense are refused by name") {
    const auto refused = [](const char* option, auto change, const char* url = "redis://host") {
      RemoteCacheOptions options = options_for(url);
      change(options);
      CAPTURE(option);
      CHECK(has(refusal(options), fmt::format("the option {} needs", option)));
    };
    refused("deadline", [](auto& o) { o.deadline = 0ms; });
    refused("deadline", [](auto& o) { o.deadline = 2h; });
    refused("back_off", [](auto& o) { o.back_off = 0ms; });
    refused("back_off", [](auto& o) { o.back_off = o.max_back_off + 1ms; });
    refused("max_connections", [](auto& o) { o.max_connections = 0; });
    refused("max_entry_bytes", [](auto& o) { o.max_entry_bytes = 0; });
    refused("ttl", [](auto& o) { o.ttl = -1s; });
    refused(
        "ttl", [](auto& o) { o.ttl = 1s; }, "http://host");
    refused("bearer_token", [](auto& o) { o.bearer_token = std::string("t"); });
    refused(
        "bearer_token", [](auto& o) { o.bearer_token = std::string("t\r\nX: y"); }, "http://host");
    refused(
        "bearer_token", [](auto& o) { o.bearer_token = std::string("t"); }, "http://me:secret@host");
    refused(
        "ca_file", [](auto& o) { o.ca_file = std::string("ca.pem"); }, "http://host");
  }

  TEST_CASE("a transport that was not built is refused with its option and package") {
    // In a build that has both there is nothing to refuse.
    const std::string redis = refusal(options_for("redis://me:secret@host"));
    const std::string http = refusal(options_for("http://me:secret@host"));
#ifdef QKVJIT_WITH_REDIS
    CHECK(redis.empty());
#else
    CHECK(has(redis, "QKVJIT_WITH_REDIS=ON"));
    CHECK(has(redis, "libhiredis-dev"));
    CHECK_FALSE(has(redis, "secret"));
#endif
#ifdef QKVJIT_WITH_HTTP
    CHECK(http.empty());
#else
    CHECK(has(http, "QKVJIT_WITH_HTTP=ON"));
    CHECK(has(http, "libcurl4-openssl-dev"));
    CHECK_FALSE(has(http, "secret"));
#endif
  }

#if defined(QKVJIT_WITH_REDIS) || defined(QKVJIT_WITH_HTTP)
  TEST_CASE("the envelope is the one written down") {
    // The digests were computed with another implementation.
    const std::string plain = remote::seal("", kName, "artifact");
    CHECK(hexadecimal(plain.substr(0, 24)) == "716b766a69740d0a01000000010000000800000000000000");
    CHECK(hexadecimal(plain.substr(24, 32)) == "732b6ff00ad540fcfc11d94e6d389a802f228cc5d9e952d668f956bfb0c86dfb");
    CHECK(plain.substr(remote::kEnvelopeBytes) == "artifact");
    const std::string keyed = remote::seal(kKey, kName, "artifact");
    CHECK(hexadecimal(keyed.substr(24, 32)) == "cd921abc36a0ed86963744e3d9cd75b2da5939d2993139b1076fe55d4736e839");
  }

  TEST_CASE("no byte of an envelope can change, and it cannot be cut") {
    for (const std::string& key : {std::string(), kKey, std::string(200, 'k')}) {
      for (const std::string& bytes : {std::string(), std::string("artifact"), std::string(1000, '\0')}) {
        const std::string good = remote::seal(key, kName, bytes);
        std::string_view entry;
        REQUIRE(remote::unseal(key, kName, good, entry) == Verdict::good);
        CHECK(entry == bytes);
        CHECK(remote::unseal(key, kOtherName, good, entry) == Verdict::forged);
        CHECK(remote::unseal(key + "x", kName, good, entry) == (key.empty() ? Verdict::other_proof : Verdict::forged));
        int accepted = 0;
        for (std::size_t i = 0; i < good.size(); ++i) {
          for (const int bit : {1, 128}) {
            std::string bad = good;
            bad[i] = static_cast<char>(bad[i] ^ bit);
            accepted += remote::unseal(key, kName, bad, entry) == Verdict::good ? 1 : 0;
          }
          accepted += remote::unseal(key, kName, good.substr(0, i), entry) == Verdict::good ? 1 : 0;
        }
        accepted += remote::unseal(key, kName, good + '\0', entry) == Verdict::good ? 1 : 0;
        CHECK(accepted == 0);
      }
    }
  }

  TEST_CASE("a name that is not 64 hexadecimal digits reaches no server") {
    RemoteCacheOptions options = options_for("redis://127.0.0.1:1");
    options.url = "redis+unix:///nowhere";
#ifndef QKVJIT_WITH_REDIS
    options.url = "http://127.0.0.1:1";
#endif
    const auto store = make_remote_store(options);
    for (const std::string& name : {std::string(), std::string("../x"), kName + "a", std::string(64, 'A'),
                                    std::string(63, 'a') + "\n", std::string(63, 'a') + "/"}) {
      CHECK_FALSE(store->load(name).has_value());
      CHECK_FALSE(store->store(name, "artifact"));
    }
    CHECK(store->stats().unreachable == 0);
    CHECK_FALSE(store->load(kName).has_value());
    CHECK(store->stats().unreachable == 1);
  }
#endif
}
