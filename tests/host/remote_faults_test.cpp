// SPDX-License-Identifier: Apache-2.0
// The shared cache against servers that are dead, slow or lying: each is a miss by the deadline, counted by its
// reason, and never an exception.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cache/remote/envelope.h"
#include "cache/remote/socket.h"
#include "support/log.h"
#include "support/remote_fixture.h"
#include "support/socket_server.h"

namespace {

using namespace qkvjit;
using namespace test;
using Peer = SocketServer::Peer;

struct Protocol {
  const char* scheme;
  /// A whole answer with this value.
  std::string (*answer)(std::string_view value);
};

constexpr Protocol kProtocols[] = {
#ifdef QKVJIT_WITH_REDIS
    {"redis", [](std::string_view value) { return fmt::format("${}\r\n{}\r\n", value.size(), value); }},
#endif
#ifdef QKVJIT_WITH_HTTP
    {"http",
     [](std::string_view value) {
       return fmt::format("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}", value.size(), value);
     }},
#endif
};

std::string sealed(const std::string& bytes = "artifact", const std::string& name = kName,
                   const std::string& key = kKey) {
  return remote::seal(key, name, bytes);
}

std::string url_of(const Protocol& protocol, const SocketServer& server) {
  return fmt::format("{}://127.0.0.1:{}", protocol.scheme, server.port());
}

/// Answers every request with the same bytes and then closes, or not.
SocketServer::Handler always(std::string bytes, bool closes = false) {
  return [bytes = std::move(bytes), closes](Peer& peer) {
    while (!peer.read_request().empty() && peer.write(bytes) && !closes) {
    }
  };
}

/// What one load from such a server counts.
RemoteStats stats_after_load(const Protocol& protocol, const SocketServer::Handler& handler,
                             std::uint64_t max_entry_bytes = 1 << 20) {
  SocketServer server(handler);
  RemoteCacheOptions options = options_for(url_of(protocol, server));
  options.max_entry_bytes = max_entry_bytes;
  const auto store = make_remote_store(options);
  CHECK_FALSE(load_in_time(*store).has_value());
  const RemoteStats stats = store->stats();
  CHECK(stats.loads == 1);
  CHECK(stats.hits == 0);
  INFO(stats.last_error);
  CHECK(stats.timeouts + stats.unreachable + stats.denied + stats.server_errors + stats.bad_answers + stats.too_large +
            stats.not_ours + stats.unsigned_entries + stats.forged ==
        1);
  CHECK_FALSE(stats.last_error.empty());
  return stats;
}

}  // namespace

TEST_SUITE("remote_faults") {
  TEST_CASE("the hand-written servers' good answer is taken") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      SocketServer server(always(protocol.answer(sealed())));
      const auto store = make_remote_store(options_for(url_of(protocol, server)));
      CHECK(load_in_time(*store) == "artifact");
      CHECK(load_in_time(*store) == "artifact");
      CHECK(server.connections() == 1);  // kept
      CHECK(store->stats().hits == 2);
      CHECK(store->stats().bytes_loaded == 16);
    }
  }

  TEST_CASE("a server that refuses, or whose name is unknown") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      SocketServer server(always(""));
      server.stop();
      const auto store = make_remote_store(options_for(url_of(protocol, server)));
      CHECK_FALSE(load_in_time(*store).has_value());
      CHECK(store->stats().unreachable == 1);

      const auto nowhere = make_remote_store(options_for(fmt::format("{}://cache.invalid", protocol.scheme)));
      CHECK_FALSE(load_in_time(*nowhere).has_value());
      CHECK(nowhere->stats().unreachable + nowhere->stats().timeouts == 1);
    }
  }

  TEST_CASE("a server that accepts and says nothing, to loads and to stores") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      const auto silent = [](Peer& peer) { peer.stay(); };
      CHECK(stats_after_load(protocol, silent).timeouts == 1);
      SocketServer server(silent);
      const auto store = make_remote_store(options_for(url_of(protocol, server)));
      CHECK_FALSE(in_time(kDeadline, [&] { return store_now(*store, kName, std::string(8 << 20, 'x')); }));
      CHECK(store->stats().timeouts == 1);
    }
  }

  TEST_CASE("a server that sends a byte now and then") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      const auto drip = [&protocol](Peer& peer) {
        (void)peer.read_request();
        for (const char byte : protocol.answer(sealed(std::string(4096, 'x')))) {
          if (!peer.write({&byte, 1})) return;
          std::this_thread::sleep_for(20ms);
        }
      };
      CHECK(stats_after_load(protocol, drip).timeouts == 1);
    }
  }

  TEST_CASE("half an answer") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      const std::string whole = protocol.answer(sealed());
      for (const std::size_t length : {std::size_t{1}, whole.size() / 4, whole.size() / 2, whole.size() - 3}) {
        CAPTURE(length);
        const RemoteStats stats = stats_after_load(protocol, always(whole.substr(0, length), true));
        // HTTP that ends within its headers is an answer with nothing in it.
        CHECK(stats.bad_answers + stats.unreachable + stats.not_ours == 1);
      }
    }
  }

  TEST_CASE("garbage instead of the protocol") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      for (const char* garbage :
           {"\x7f\x45LF\x02\x01", "*1000000000\r\n", "$-7\r\n", "+PONG\r\n", ":1\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "HTTP/1.1 206 OK\r\n\r\n", "%1\r\n"}) {
        CAPTURE(garbage);
        const RemoteStats stats = stats_after_load(protocol, always(garbage, true));
        CHECK(stats.bad_answers + stats.unreachable + stats.not_ours == 1);
      }
    }
  }

  TEST_CASE("entries that are not what was asked for") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      const auto answers = [&](const std::string& value) {
        return stats_after_load(protocol, always(protocol.answer(value)));
      };
      CHECK(answers(sealed("artifact", kName, "another key")).forged == 1);
      CHECK(answers(sealed("artifact", kOtherName)).forged == 1);
      CHECK(answers(sealed("artifact", kName, "")).unsigned_entries == 1);
      CHECK(answers("artifact").not_ours == 1);
      CHECK(answers("").not_ours == 1);
      CHECK(answers(sealed() + "x").forged == 1);
      CHECK(answers(sealed().substr(0, remote::kEnvelopeBytes + 3)).forged == 1);
    }
  }

  TEST_CASE("entries that are too large, announced or not") {
    constexpr std::uint64_t kMost = 100'000;
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      CHECK(stats_after_load(protocol, always(protocol.answer(sealed(std::string(kMost + 1, 'x')))), kMost).too_large ==
            1);
      SocketServer server(always(protocol.answer(sealed(std::string(kMost, 'x')))));
      RemoteCacheOptions options = options_for(url_of(protocol, server));
      options.max_entry_bytes = kMost;
      const auto store = make_remote_store(options);
      CHECK(load_in_time(*store) == std::string(kMost, 'x'));
      CHECK_FALSE(store->store(kName, std::string(kMost + 1, 'x')));
      CHECK(store->stats().stores_dropped == 1);
    }
#ifdef QKVJIT_WITH_REDIS
    CHECK(stats_after_load(kProtocols[0], always("$1000000000000\r\n")).too_large == 1);
    CHECK(stats_after_load(kProtocols[0], always("+" + std::string(2 << 20, 'x'))).bad_answers == 1);
#endif
#ifdef QKVJIT_WITH_HTTP
    const Protocol& http = kProtocols[std::size(kProtocols) - 1];
    CHECK(stats_after_load(http, always("HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")).too_large == 1);
    // No length at all, and no end.
    const auto endless = [](Peer& peer) {
      (void)peer.read_request();
      bool is_there = peer.write("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
      const std::string chunk(64 << 10, 'x');
      while (is_there) is_there = peer.write(chunk);
    };
    CHECK(stats_after_load(http, endless).too_large == 1);
#endif
  }

#ifdef QKVJIT_WITH_HTTP
  TEST_CASE("a redirect is not followed") {
    const Protocol& http = kProtocols[std::size(kProtocols) - 1];
    SocketServer elsewhere(always(http.answer(sealed())));
    const std::string redirect = fmt::format(
        "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{}/{}\r\nContent-Length: 0\r\n\r\n", elsewhere.port(), kName);
    CHECK(stats_after_load(http, always(redirect)).bad_answers == 1);
    CHECK(elsewhere.connections() == 0);
  }
#endif

  TEST_CASE("a kept connection that the server has closed meanwhile") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      SocketServer server(always(protocol.answer(sealed()), true));
      const auto store = make_remote_store(options_for(url_of(protocol, server)));
      for (int i = 0; i < 3; ++i) {
        CHECK(load_in_time(*store) == "artifact");
        std::this_thread::sleep_for(20ms);
      }
      CHECK(server.connections() == 3);
    }
  }

  TEST_CASE("a dead server costs one deadline now and then, and is found again") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      std::atomic<bool> is_silent{true};
      SocketServer server([&](Peer& peer) {
        while (!peer.read_request().empty()) {
          if (!is_silent && !peer.write(protocol.answer(sealed()))) return;
        }
      });
      RemoteCacheOptions options = options_for(url_of(protocol, server));
      options.back_off = 300ms;
      const auto store = make_remote_store(options);
      CHECK_FALSE(load_in_time(*store).has_value());
      for (int i = 0; i < 10; ++i) {
        CHECK_FALSE(in_time(0ms, [&] { return store->load(kName); }).has_value());
      }
      CHECK(store->stats().timeouts == 1);
      CHECK(store->stats().skipped == 10);
      std::this_thread::sleep_for(350ms);
      // One of many tries it; the others do not wait.
      {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 8; ++i) threads.emplace_back([&] { (void)store->load(kName); });
      }
      CHECK(store->stats().timeouts == 2);
      CHECK(store->stats().skipped == 17);
      std::this_thread::sleep_for(350ms);
      CHECK_FALSE(store->load(kName).has_value());  // the second time off is twice as long
      CHECK(store->stats().skipped == 18);
      is_silent = false;
      std::this_thread::sleep_for(400ms);
      CHECK(load_in_time(*store) == "artifact");
      CHECK(load_in_time(*store) == "artifact");
      CHECK(store->stats().skipped == 18);
    }
  }

  TEST_CASE("many threads and few connections to a silent server") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      SocketServer server([](Peer& peer) { peer.stay(); });
      RemoteCacheOptions options = options_for(url_of(protocol, server));
      options.max_connections = 4;
      const auto store = make_remote_store(options);
      std::atomic<int> misses{0};
      in_time(kDeadline, [&] {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 32; ++i) threads.emplace_back([&] { misses += store->load(kName).has_value() ? 0 : 1; });
        return 0;
      });
      CHECK(misses == 32);
      const RemoteStats stats = store->stats();
      CHECK(stats.timeouts + stats.skipped == 32);
    }
  }

  TEST_CASE("many threads share the connections there may be") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      SocketServer server([&](Peer& peer) {
        while (!peer.read_request().empty()) {
          std::this_thread::sleep_for(10ms);
          if (!peer.write(protocol.answer(sealed()))) return;
        }
      });
      RemoteCacheOptions options = options_for(url_of(protocol, server));
      options.max_connections = 4;
      options.deadline = 5s;
      const auto store = make_remote_store(options);
      std::atomic<int> hits{0};
      {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 32; ++i) threads.emplace_back([&] { hits += store->load(kName) == "artifact" ? 1 : 0; });
      }
      CHECK(hits == 32);
      CHECK(server.connections() == 4);
    }
  }

  TEST_CASE("many failures are one warning, which names the server and no credentials") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      SocketServer server(always(protocol.answer(sealed("artifact", kOtherName))));
      const auto store =
          make_remote_store(options_for(fmt::format("{}://me:s3cret@127.0.0.1:{}", protocol.scheme, server.port())));
      log::line(log::Level::debug, "");  // the logger is there
      std::ostringstream lines;
      const auto sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(lines);
      auto& sinks = spdlog::get("qkvjit")->sinks();
      sinks.push_back(sink);
      for (int i = 0; i < 20; ++i) CHECK_FALSE(store->load(kName).has_value());
      sinks.pop_back();
      const std::string text = lines.str();
      CHECK(std::count(text.begin(), text.end(), '\n') == 1);
      CHECK(text.find(store->where()) != std::string::npos);
      CHECK(text.find("s3cret") == std::string::npos);
      CHECK(store->where().find("s3cret") == std::string::npos);
      CHECK(store->stats().last_error.find("s3cret") == std::string::npos);
    }
  }

  TEST_CASE("the end waits one deadline for what is queued, and a full queue drops") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      SocketServer server([](Peer& peer) { peer.stay(); });
      RemoteCacheOptions options = options_for(url_of(protocol, server));
      options.max_queued_bytes = 1000;
      auto store = make_remote_store(options);
      const auto store_one = [&] { return store->store(kName, std::string(300, 'x')); };
      int taken = 0;
      for (int i = 0; i < 8; ++i) taken += in_time(0ms, store_one) ? 1 : 0;
      CHECK(taken == 3);
      CHECK(store->stats().stores == 3);
      CHECK(store->stats().stores_dropped == 5);
      in_time(kDeadline, [&] {
        store.reset();
        return 0;
      });
    }
  }

  TEST_CASE("the end stores what there is time for") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      const bool is_redis = std::string_view(protocol.scheme) == "redis";
      std::atomic<int> requests{0};
      SocketServer server([&](Peer& peer) {
        while (!peer.read_request().empty()) {
          ++requests;
          std::this_thread::sleep_for(80ms);
          if (!peer.write(is_redis ? "+OK\r\n" : "HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")) return;
        }
      });
      auto store = make_remote_store(options_for(url_of(protocol, server)));
      for (int i = 0; i < 20; ++i) CHECK(store->store(kName, "artifact"));
      in_time(kDeadline, [&] {
        store.reset();
        return 0;
      });
      CHECK(requests >= 2);
      CHECK(requests <= 4);
    }
  }

#ifdef QKVJIT_WITH_REDIS
  TEST_CASE("a server that always has more to say") {
    SocketServer server([](Peer& peer) {
      const std::string chunk(64 << 10, 'x');
      while (peer.write(chunk)) {
      }
    });
    remote::Socket socket;
    const remote::Deadline deadline(100ms);
    REQUIRE(socket.connect_tcp("127.0.0.1", server.port(), deadline).outcome == remote::Outcome::ok);
    const auto outcome = in_time(100ms, [&] {
      remote::Answer piece;
      const remote::Deadline end(1s);  // of a socket that forgets its own
      while (piece.outcome == remote::Outcome::ok && !end.passed()) piece = socket.receive_some(1, deadline);
      return piece.outcome;
    });
    CHECK(outcome == remote::Outcome::timeout);
  }
#endif

  TEST_CASE("a child of fork misses, and ends") {
    for (const Protocol& protocol : kProtocols) {
      CAPTURE(protocol.scheme);
      SocketServer server(always(protocol.answer(sealed())));
      auto store = make_remote_store(options_for(url_of(protocol, server)));
      CHECK(load_in_time(*store) == "artifact");
      CHECK(store->store(kName, "artifact"));  // starts the thread
      const pid_t child = fork();
      if (child == 0) {
        alarm(5);
        const bool is_miss = !store->load(kName).has_value() && !store->store(kName, "x") && store->flush(10ms);
        store.reset();
        _exit(is_miss ? 0 : 1);
      }
      int status = 0;
      REQUIRE(waitpid(child, &status, 0) == child);
      CHECK(status == 0);
      CHECK(load_in_time(*store) == "artifact");  // the parent's connection is unharmed
    }
  }
}
