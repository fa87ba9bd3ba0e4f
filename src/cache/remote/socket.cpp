// SPDX-License-Identifier: Apache-2.0
#include "cache/remote/socket.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace qkvjit::remote {
namespace {

Answer failed(Outcome outcome, const char* doing, int error) {
  return {outcome, fmt::format("{}: {}", doing, std::generic_category().message(error))};
}

Answer too_late(const char* doing) { return {Outcome::timeout, fmt::format("{} took too long", doing)}; }

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

/// getaddrinfo's code.
int look_up_now(const std::string& host, std::uint16_t port, int flags, Addresses& out) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (code == 0) out.reset(list);
  return code;
}

Answer look_up(const std::string& host, std::uint16_t port, const Deadline& deadline, Addresses& out) {
  if (look_up_now(host, port, AI_NUMERICHOST, out) == 0) return {};
  // getaddrinfo knows no deadline. A thread that nobody waits for any more ends by itself and keeps what it uses.
  struct Lookup {
    std::mutex mutex;
    std::condition_variable done;
    bool is_done = false;
    int code = 0;
    Addresses addresses;
  };
  const auto lookup = std::make_shared<Lookup>();
  std::thread([lookup, host, port] {
    Addresses addresses;
    const int code = look_up_now(host, port, 0, addresses);
    const std::lock_guard lock(lookup->mutex);
    lookup->is_done = true;
    lookup->code = code;
    lookup->addresses = std::move(addresses);
    lookup->done.notify_one();
  }).detach();
  std::unique_lock lock(lookup->mutex);
  if (!lookup->done.wait_until(lock, deadline.at(), [&] { return lookup->is_done; })) {
    return too_late("looking up the host's name");
  }
  if (lookup->code != 0) {
    return {Outcome::unreachable, fmt::format("looking up the host's name: {}", gai_strerror(lookup->code))};
  }
  out = std::move(lookup->addresses);
  return {};
}

}  // namespace

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Answer Socket::wait(short events, const char* doing, const Deadline& deadline) const {
  for (;;) {
    pollfd entry{fd_, events, 0};
    const int ready = poll(&entry, 1, deadline.milliseconds_left());
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return failed(Outcome::unreachable, doing, errno);
    if (deadline.passed()) return too_late(doing);
  }
}

Answer Socket::connect_to(const void* address, std::size_t size, int family, const Deadline& deadline) {
  constexpr const char* kDoing = "connecting";
  close();
  fd_ = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd_ < 0) return failed(Outcome::unreachable, kDoing, errno);
  if (connect(fd_, static_cast<const sockaddr*>(address), static_cast<socklen_t>(size)) != 0) {
    // EAGAIN: a Unix socket whose queue is full, which poll cannot wait for.
    if (errno != EINPROGRESS) return failed(Outcome::unreachable, kDoing, errno);
    if (Answer waited = wait(POLLOUT, kDoing, deadline); waited.outcome != Outcome::ok) return waited;
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return failed(Outcome::unreachable, kDoing, error);
  }
  return {};
}

Answer Socket::connect_tcp(const std::string& host, std::uint16_t port, const Deadline& deadline) {
  Addresses addresses;
  if (Answer found = look_up(host, port, deadline, addresses); found.outcome != Outcome::ok) return found;
  Answer answer{Outcome::unreachable, "the host has no address"};
  for (const addrinfo* it = addresses.get(); it != nullptr; it = it->ai_next) {
    answer = connect_to(it->ai_addr, it->ai_addrlen, it->ai_family, deadline);
    if (answer.outcome == Outcome::ok) {
      const int on = 1;
      setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      return answer;
    }
    close();
    if (deadline.passed()) break;
  }
  return answer;
}

Answer Socket::connect_unix(const std::string& path, const Deadline& deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return {Outcome::unreachable, fmt::format("a socket's path can have {} bytes", sizeof(address.sun_path) - 1)};
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  Answer answer = connect_to(&address, sizeof(address), AF_UNIX, deadline);
  if (answer.outcome != Outcome::ok) close();
  return answer;
}

Answer Socket::send_all(std::string_view bytes, const Deadline& deadline) {
  constexpr const char* kDoing = "sending";
  while (!bytes.empty()) {
    const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (Answer waited = wait(POLLOUT, kDoing, deadline); waited.outcome != Outcome::ok) return waited;
    } else if (errno != EINTR) {
      return failed(Outcome::unreachable, kDoing, errno);
    }
    // Also here: a server that always takes a little more is no reason to stay.
    if (!bytes.empty() && deadline.passed()) return too_late(kDoing);
  }
  return {};
}

Answer Socket::receive_some(std::size_t most, const Deadline& deadline) {
  constexpr const char* kDoing = "waiting for the answer";
  char buffer[64 << 10];
  for (;;) {
    if (deadline.passed()) return too_late(kDoing);
    const ssize_t got = recv(fd_, buffer, std::min(most, sizeof(buffer)), 0);
    if (got > 0) return {Outcome::ok, std::string(buffer, static_cast<std::size_t>(got))};
    if (got == 0) return {Outcome::unreachable, "the server closed the connection"};
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (Answer waited = wait(POLLIN, kDoing, deadline); waited.outcome != Outcome::ok) return waited;
    } else if (errno != EINTR) {
      return failed(Outcome::unreachable, kDoing, errno);
    }
  }
}

}  // namespace qkvjit::remote
