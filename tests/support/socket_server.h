// SPDX-License-Identifier: Apache-2.0
// A server on an ephemeral port of 127.0.0.1 that does to each connection what a test says.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace test {

class SocketServer {
 public:
  /// One connection, in a handler's hands; closed when the handler returns.
  class Peer {
   public:
    Peer(int fd, const std::atomic<bool>& is_over) : fd_(fd), is_over_(is_over) {}

    /// What the client has to say until it pauses; empty where it left, or the server ends.
    std::string read_request() {
      std::string out;
      char buffer[4096];
      while (wait(out.empty() ? 3'600'000 : 10)) {
        const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
        if (got <= 0) break;
        out.append(buffer, static_cast<std::size_t>(got));
      }
      return out;
    }

    /// False where the client is gone.
    bool write(std::string_view bytes) {
      while (!bytes.empty() && !is_over_) {
        const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
          bytes.remove_prefix(static_cast<std::size_t>(sent));
        } else if (errno == EAGAIN) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        } else {
          return false;
        }
      }
      return !is_over_;
    }

    /// Says nothing for as long as client and server live.
    void stay() {
      while (!read_request().empty()) {
      }
    }

   private:
    bool wait(int milliseconds) {
      for (int waited = 0; waited < milliseconds && !is_over_; waited += 10) {
        pollfd entry{fd_, POLLIN, 0};
        if (poll(&entry, 1, 10) > 0) return true;
      }
      return false;
    }

    int fd_;
    const std::atomic<bool>& is_over_;
  };
  using Handler = std::function<void(Peer&)>;

  explicit SocketServer(Handler handler) : handler_(std::move(handler)) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener_, any, size) != 0 || listen(listener_, 128) != 0 || getsockname(listener_, any, &size) != 0) {
      throw std::runtime_error("no port to listen on");
    }
    port_ = ntohs(address.sin_port);
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~SocketServer() { stop(); }
  SocketServer(const SocketServer&) = delete;
  SocketServer& operator=(const SocketServer&) = delete;

  /// From then on the port refuses.
  void stop() {
    is_over_ = true;
    if (accepting_.joinable()) accepting_.join();
    if (listener_ >= 0) close(std::exchange(listener_, -1));
  }

  [[nodiscard]] std::uint16_t port() const { return port_; }
  [[nodiscard]] int connections() const { return connections_; }

 private:
  void accept_all() {
    std::vector<std::thread> serving;
    while (!is_over_) {
      pollfd entry{listener_, POLLIN, 0};
      if (poll(&entry, 1, 10) <= 0) continue;
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) continue;
      ++connections_;
      serving.emplace_back([this, fd] {
        Peer peer(fd, is_over_);
        handler_(peer);
        close(fd);
      });
    }
    for (std::thread& thread : serving) thread.join();
  }

  const Handler handler_;
  int listener_ = -1;
  std::uint16_t port_ = 0;
  std::atomic<bool> is_over_{false};
  std::atomic<int> connections_{0};
  std::thread accepting_;
};

}  // namespace test
