// SPDX-License-Identifier: Apache-2.0
// A stream socket of which every call returns by a deadline, the lookup of the host's name too.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "cache/remote/connection.h"

namespace qkvjit::remote {

class Socket {
 public:
  Socket() = default;
  ~Socket() { close(); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  [[nodiscard]] bool is_open() const { return fd_ >= 0; }
  void close();

  Answer connect_tcp(const std::string& host, std::uint16_t port, const Deadline& deadline);
  Answer connect_unix(const std::string& path, const Deadline& deadline);
  Answer send_all(std::string_view bytes, const Deadline& deadline);
  /// What there is, at least one byte and at most `most`.
  Answer receive_some(std::size_t most, const Deadline& deadline);

 private:
  Answer connect_to(const void* address, std::size_t size, int family, const Deadline& deadline);
  Answer wait(short events, const char* doing, const Deadline& deadline) const;

  int fd_ = -1;
};

}  // namespace qkvjit::remote
