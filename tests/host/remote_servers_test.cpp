// SPDX-License-Identifier: Apache-2.0
// The shared cache with a real Redis and a real nginx. Where one is not installed its tests say so and pass, or fail
// with QKVJIT_REQUIRE_SERVERS=1.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/remote_fixture.h"
#include "support/server_process.h"

namespace {

using namespace qkvjit;
using namespace test;

/// True, loudly, where the test cannot run.
[[maybe_unused]] bool is_missing(const std::string& server) {
  if (!find_server(server).empty()) return false;
  std::fprintf(stderr, "SKIPPED: %s is not installed, so the shared cache was not tested with it\n", server.c_str());
  CHECK_MESSAGE(std::getenv("QKVJIT_REQUIRE_SERVERS") == nullptr, server << " is not installed");
  return true;
}

/// Time enough on a busy machine: here it is right or wrong, not fast.
[[maybe_unused]] RemoteCacheOptions patient_options(std::string url, std::string key = kKey) {
  RemoteCacheOptions options = options_for(std::move(url), std::move(key));
  options.deadline = 5s;
  return options;
}

[[maybe_unused]] std::optional<std::string> load(RemoteStore& store, const std::string& name = kName) {
  return store.load(name);
}

[[maybe_unused]] void check_round_trips(RemoteStore& store, std::size_t large) {
  CHECK_FALSE(load(store).has_value());
  CHECK(store.stats().absent == 1);
  CHECK(store.stats().last_error.empty());
  const std::string binary = std::string("\0\r\n\x7f\xff$3\r\n", 9) + std::string(large, '\xa5');
  for (const std::string& bytes : {std::string(), std::string("artifact"), binary}) {
    CHECK(store_now(store, kName, bytes));
    CHECK(load(store) == bytes);
  }
  CHECK_FALSE(load(store, kOtherName).has_value());
  const RemoteStats stats = store.stats();
  CHECK(stats.hits == 3);
  CHECK(stats.stored == 3);
  CHECK(stats.absent == 2);
  CHECK(stats.bytes_loaded == stats.bytes_stored);
  CHECK(stats.last_error.empty());
}

/// What another machine with these options finds.
[[maybe_unused]] std::optional<std::string> load_with(const RemoteCacheOptions& options, RemoteStats& stats) {
  const auto store = make_remote_store(options);
  auto found = load(*store);
  stats = store->stats();
  return found;
}

#ifdef QKVJIT_WITH_REDIS
class Redis {
 public:
  Redis() : port_(free_port()) { start(); }

  void start() {
    process_.reset();
    const std::string configuration = folder_.write(
        "redis.conf", fmt::format("bind 127.0.0.1\nport {}\nunixsocket {}\nsave \"\"\ndir {}\nrequirepass open\n"
                                  "user reader on >sesame ~qkvjit:* -@all +get\n",
                                  port_, folder_.file("redis.sock"), folder_.file("")));
    process_.emplace(std::vector<std::string>{find_server("redis-server"), configuration}, port_, folder_.file("log"));
  }
  void stop() { process_->stop(); }

  [[nodiscard]] std::string url(const std::string& credentials = ":open", int database = 0) const {
    return fmt::format("redis://{}@127.0.0.1:{}/{}", credentials, port_, database);
  }
  [[nodiscard]] std::string without_password() const { return fmt::format("redis://127.0.0.1:{}", port_); }
  [[nodiscard]] std::string unix_url() const {
    return fmt::format("redis+unix://:open@{}", folder_.file("redis.sock"));
  }

 private:
  TemporaryFolder folder_;
  const std::uint16_t port_;
  std::optional<ServerProcess> process_;
};
#endif

#ifdef QKVJIT_WITH_HTTP
class Nginx {
 public:
  Nginx() : port_(free_port()), tls_port_(free_port()) {
    const std::string subject =
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost,IP:127.0.0.1";
    has_tls_ =
        std::system(
            fmt::format("{} -keyout {} -out {} 2>/dev/null", subject, folder_.file("key.pem"), ca_file()).c_str()) == 0;
    const std::string tls = !has_tls_ ? ""
                                      : fmt::format(
                                            "listen 127.0.0.1:{} ssl; ssl_certificate {}; "
                                            "ssl_certificate_key {};",
                                            tls_port_, ca_file(), folder_.file("key.pem"));
    const std::string users = folder_.write("users", "me:{PLAIN}secret\n");
    for (const char* name : {"open", "closed", "served", "temporary"}) {
      std::filesystem::create_directory(folder_.file(name));
      std::filesystem::permissions(folder_.file(name), std::filesystem::perms::all);
    }
    const std::string put = "dav_methods PUT; client_max_body_size 32m;";
    const std::string configuration = folder_.write(
        "nginx.conf",
        fmt::format(
            "daemon off; worker_processes 1; pid {0}; error_log stderr;\n"
            "events {{ worker_connections 64; }}\n"
            "http {{ access_log off; client_body_temp_path {1}/body; proxy_temp_path {1}/a; fastcgi_temp_path {1}/b;\n"
            "  uwsgi_temp_path {1}/c; scgi_temp_path {1}/d;\n"
            "  server {{ listen 127.0.0.1:{2}; {3} root {4};\n"
            "    location /open {{ {5} }}\n"
            "    location /closed {{ {5} auth_basic x; auth_basic_user_file {6}; }}\n"
            "    location /token {{ alias {4}/open; if ($http_authorization != \"Bearer t0ken\") {{ return 401; }} }}\n"
            "    location /served {{ alias {4}/open; }}\n"
            "    location /moved {{ return 301 /open; }}\n"
            "    location /broken {{ return 503; }}\n"
            "  }} }}\n",
            folder_.file("pid"), folder_.file("temporary"), port_, tls, folder_.file(""), put, users));
    process_.emplace(std::vector<std::string>{find_server("nginx"), "-e", "stderr", "-c", configuration}, port_,
                     folder_.file("log"));
  }

  [[nodiscard]] std::string url(const std::string& path, const std::string& credentials = "") const {
    return fmt::format("http://{}127.0.0.1:{}/{}", credentials, port_, path);
  }
  [[nodiscard]] std::string tls_url() const { return fmt::format("https://127.0.0.1:{}/open", tls_port_); }
  [[nodiscard]] bool has_tls() const { return has_tls_; }
  [[nodiscard]] std::string ca_file() const { return folder_.file("ca.pem"); }

 private:
  TemporaryFolder folder_;
  const std::uint16_t port_, tls_port_;
  bool has_tls_ = false;
  std::optional<ServerProcess> process_;
};
#endif

}  // namespace

TEST_SUITE("remote_servers") {
#ifdef QKVJIT_WITH_REDIS
  TEST_CASE("Redis: round trips over TCP, a Unix socket and in another database") {
    if (is_missing("redis-server")) return;
    const Redis redis;
    for (const std::string& url : {redis.url(), redis.url("default:open", 3)}) {
      const auto store = make_remote_store(patient_options(url));
      check_round_trips(*store, 8 << 20);
    }
    RemoteStats stats;
    CHECK(load_with(patient_options(redis.unix_url()), stats).has_value());  // what came over TCP
    CHECK(load_with(patient_options(redis.unix_url() + "?db=3"), stats).has_value());
    CHECK_FALSE(load_with(patient_options(redis.unix_url() + "?db=4"), stats).has_value());
    CHECK(stats.absent == 1);
    CHECK_FALSE(load_with(patient_options(redis.unix_url(), "another key"), stats).has_value());
    CHECK(stats.forged == 1);
    CHECK_FALSE(load_with(patient_options(redis.unix_url() + "?db=4000"), stats).has_value());
    CHECK(stats.server_errors == 1);
  }

  TEST_CASE("Redis: wrong credentials, and a user that may only read") {
    if (is_missing("redis-server")) return;
    const Redis redis;
    CHECK(store_now(*make_remote_store(patient_options(redis.url())), kName, "artifact"));
    RemoteStats stats;
    for (const std::string& url :
         {redis.without_password(), redis.url(":wrong-secret"), redis.url("me:wrong-secret")}) {
      CHECK_FALSE(load_with(patient_options(url), stats).has_value());
      CHECK(stats.denied == 1);
      CHECK(stats.last_error.find("secret") == std::string::npos);
    }
    const auto reader = make_remote_store(patient_options(redis.url("reader:sesame")));
    CHECK(load(*reader) == "artifact");
    CHECK_FALSE(store_now(*reader, kName, "other"));
    CHECK(reader->stats().denied == 1);
    CHECK(load(*reader) == "artifact");  // loads go on
    CHECK(reader->store(kName, "other"));
    CHECK(reader->flush(20s));
    CHECK(reader->stats().skipped == 1);  // and stores are left alone
    CHECK(reader->where().find("sesame") == std::string::npos);

    RemoteCacheOptions options = patient_options(redis.url());
    options.read_only = true;
    const auto read_only = make_remote_store(options);
    CHECK_FALSE(read_only->store(kName, "other"));
    CHECK(load(*read_only) == "artifact");
  }

  TEST_CASE("Redis: entries expire, and a server that went away is found again") {
    if (is_missing("redis-server")) return;
    Redis redis;
    RemoteCacheOptions options = patient_options(redis.url());
    options.ttl = 1s;
    options.back_off = 100ms;
    const auto store = make_remote_store(options);
    CHECK(store_now(*store, kName, "artifact"));
    CHECK(load(*store) == "artifact");
    std::this_thread::sleep_for(1200ms);
    CHECK_FALSE(load(*store).has_value());
    CHECK(store->stats().absent == 1);

    redis.stop();
    CHECK_FALSE(load(*store).has_value());
    CHECK(store->stats().unreachable == 1);
    redis.start();
    std::this_thread::sleep_for(150ms);
    CHECK(store_now(*store, kName, "artifact"));
    CHECK(load(*store) == "artifact");
  }

  TEST_CASE("Redis: many threads at once") {
    if (is_missing("redis-server")) return;
    const Redis redis;
    RemoteCacheOptions options = patient_options(redis.unix_url());
    const auto store = make_remote_store(options);
    std::atomic<int> wrong{0};
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < 16; ++i) {
        threads.emplace_back([&, i] {
          const std::string name = fmt::format("{:064x}", i % 4), bytes(1000 + 100 * (i % 4), 'x');
          for (int round = 0; round < 20; ++round) {
            if (!store->store(name, bytes)) ++wrong;
            const auto found = store->load(name);
            if (found.has_value() && *found != bytes) ++wrong;
          }
        });
      }
    }
    CHECK(store->flush(20s));
    CHECK(wrong == 0);
    CHECK(store->stats().stored == 320);
    CHECK(store->stats().last_error.empty());
  }
#endif

#ifdef QKVJIT_WITH_HTTP
  TEST_CASE("HTTP: round trips, credentials, and servers that only serve") {
    if (is_missing("nginx")) return;
    const Nginx nginx;
    check_round_trips(*make_remote_store(patient_options(nginx.url("open"))), 8 << 20);
    check_round_trips(*make_remote_store(patient_options(nginx.url("closed/", "me:secret@"))), 100);

    RemoteStats stats;
    for (const std::string& credentials : {std::string(), std::string("me:wrong-secret@")}) {
      CHECK_FALSE(load_with(patient_options(nginx.url("closed", credentials)), stats).has_value());
      CHECK(stats.denied == 1);
      CHECK(stats.last_error.find("secret") == std::string::npos);
    }
    CHECK_FALSE(load_with(patient_options(nginx.url("token")), stats).has_value());
    CHECK(stats.denied == 1);
    RemoteCacheOptions with_token = patient_options(nginx.url("token"));
    with_token.bearer_token = "t0ken";
    CHECK(load_with(with_token, stats).has_value());

    const auto served = make_remote_store(patient_options(nginx.url("served")));
    CHECK(load(*served).has_value());
    CHECK_FALSE(store_now(*served, kName, "other"));
    CHECK(served->stats().server_errors == 1);
    CHECK(load(*served).has_value());

    CHECK_FALSE(load_with(patient_options(nginx.url("moved")), stats).has_value());
    CHECK(stats.bad_answers == 1);
    CHECK_FALSE(load_with(patient_options(nginx.url("broken")), stats).has_value());
    CHECK(stats.server_errors == 1);
    CHECK_FALSE(store_now(*make_remote_store(patient_options(nginx.url("open/no/such/folder"))), kName, "artifact"));
  }

  TEST_CASE("HTTPS: the server's certificate is checked") {
    if (is_missing("nginx")) return;
    const Nginx nginx;
    if (!nginx.has_tls()) {
      std::fprintf(stderr, "SKIPPED: openssl could not make a certificate, so HTTPS was not tested\n");
      CHECK(std::getenv("QKVJIT_REQUIRE_SERVERS") == nullptr);
      return;
    }
    RemoteCacheOptions options = patient_options(nginx.tls_url());
    RemoteStats stats;
    CHECK_FALSE(load_with(options, stats).has_value());
    CHECK(stats.unreachable == 1);
    options.ca_file = nginx.ca_file();
    check_round_trips(*make_remote_store(options), 1 << 20);
  }
#endif
}
