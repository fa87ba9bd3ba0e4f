// SPDX-License-Identifier: Apache-2.0
// Redis: GET and SET of "qkvjit:v1:<name>". hiredis writes and reads the protocol; the socket is ours, because
// hiredis's own calls have a timeout for each read, not a deadline for the whole, and look names up for as long as
// that takes.
#include <fmt/format.h>
#include <hiredis/hiredis.h>

#include <charconv>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "cache/remote/connection.h"
#include "cache/remote/socket.h"

namespace qkvjit::remote {
namespace {

constexpr std::string_view kKeyPrefix = "qkvjit:v1:";
constexpr std::size_t kMostOfALine = 4096;  // an error's text, or the "$12345" ahead of a value

struct FreeReader {
  void operator()(redisReader* reader) const { redisReaderFree(reader); }
};
struct FreeReply {
  void operator()(void* reply) const { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, FreeReply>;

struct CloseUnless {
  Socket& socket;
  const bool& is_in_step;
  ~CloseUnless() {
    if (!is_in_step) socket.close();
  }
};

/// "$123\r\n" → 123, where the line is there.
std::optional<std::int64_t> announced_size(std::string_view head) {
  std::int64_t size = 0;
  const auto [end, error] = std::from_chars(head.data() + 1, head.data() + head.size(), size);
  if (error != std::errc() || end == head.data() + head.size() || *end != '\r') return std::nullopt;
  return size;
}

class RedisConnection final : public Connection {
 public:
  RedisConnection(const Url& url, std::chrono::seconds ttl) : url_(url), ttl_(ttl) {}

  Answer get(std::string_view name, std::uint64_t limit, const Deadline& deadline) override {
    return ask({"GET", fmt::format("{}{}", kKeyPrefix, name)}, limit, deadline);
  }

  Answer put(std::string_view name, std::string_view value, const Deadline& deadline) override {
    const std::string key = fmt::format("{}{}", kKeyPrefix, name);
    if (ttl_.count() == 0) return ask({"SET", key, value}, 0, deadline);
    return ask({"SET", key, value, "EX", std::to_string(ttl_.count())}, 0, deadline);
  }

 private:
  Answer ask(std::initializer_list<std::string_view> command, std::uint64_t limit, const Deadline& deadline) {
    const bool was_open = socket_.is_open();
    Answer answer = ask_once(command, limit, deadline);
    // A kept connection may have been closed by the server meanwhile; that says nothing about a new one.
    if (was_open && answer.outcome == Outcome::unreachable) answer = ask_once(command, limit, deadline);
    return answer;
  }

  Answer ask_once(std::initializer_list<std::string_view> command, std::uint64_t limit, const Deadline& deadline) {
    bool is_in_step = false;
    const CloseUnless guard{socket_, is_in_step};  // also where an exception leaves half an answer behind
    Answer answer;
    if (!socket_.is_open()) answer = open(deadline);
    const bool is_open = answer.outcome == Outcome::ok;  // and logged in, with its database selected
    if (is_open) answer = exchange(command, limit, deadline);
    is_in_step = is_open && (answer.outcome == Outcome::ok || answer.outcome == Outcome::absent ||
                             answer.outcome == Outcome::server_error);
    return answer;
  }

  Answer open(const Deadline& deadline) {
    Answer answer = url_.scheme == Scheme::redis_unix ? socket_.connect_unix(url_.path, deadline)
                                                      : socket_.connect_tcp(url_.host, url_.port, deadline);
    if (answer.outcome == Outcome::ok && !url_.password.empty()) {
      answer = url_.user.empty() ? exchange({"AUTH", url_.password}, 0, deadline)
                                 : exchange({"AUTH", url_.user, url_.password}, 0, deadline);
    }
    if (answer.outcome == Outcome::ok && url_.database != 0) {
      answer = exchange({"SELECT", std::to_string(url_.database)}, 0, deadline);
    }
    return answer;
  }

  Answer exchange(std::initializer_list<std::string_view> command, std::uint64_t limit, const Deadline& deadline) {
    std::vector<const char*> parts;
    std::vector<std::size_t> sizes;
    for (const std::string_view part : command) {
      parts.push_back(part.data());
      sizes.push_back(part.size());
    }
    char* text = nullptr;
    const int size = redisFormatCommandArgv(&text, static_cast<int>(parts.size()), parts.data(), sizes.data());
    if (size < 0) return {Outcome::bad_answer, "no memory for the command"};
    const std::unique_ptr<char, void (*)(char*)> owner(text, redisFreeCommand);
    const Answer sent = socket_.send_all({text, static_cast<std::size_t>(size)}, deadline);
    return sent.outcome == Outcome::ok ? receive(limit, deadline) : sent;
  }

  Answer receive(std::uint64_t limit, const Deadline& deadline) {
    const std::unique_ptr<redisReader, FreeReader> reader(redisReaderCreate());
    if (reader == nullptr) return {Outcome::bad_answer, "no memory for the answer"};
    std::string head;
    for (std::uint64_t received = 0;;) {
      Answer piece = socket_.receive_some(kMostOfALine + limit - received, deadline);
      if (piece.outcome != Outcome::ok) return piece;
      received += piece.text.size();
      if (head.size() < kMostOfALine) {
        head.append(piece.text, 0, kMostOfALine - head.size());
        if (Answer refused = look_at(head, limit); refused.outcome != Outcome::ok) return refused;
      }
      redisReaderFeed(reader.get(), piece.text.data(), piece.text.size());
      void* raw = nullptr;
      if (redisReaderGetReply(reader.get(), &raw) != REDIS_OK) {
        return {Outcome::bad_answer, fmt::format("not Redis's protocol: {}", quoted(head))};
      }
      if (raw != nullptr) return answer_of(*Reply(static_cast<redisReply*>(raw)));
      if (received >= kMostOfALine + limit) return {Outcome::bad_answer, "the answer does not end"};
    }
  }

  /// Before hiredis sees it: an array could make it allocate whatever the server says, a long string would be
  /// received for nothing.
  static Answer look_at(std::string_view head, std::uint64_t limit) {
    if (std::string_view("+-:$").find(head.front()) == std::string_view::npos) {
      return {Outcome::bad_answer, fmt::format("not an answer to the command: {}", quoted(head))};
    }
    if (head.front() != '$') return {};
    const auto size = announced_size(head);
    if (limit == 0) return {Outcome::bad_answer, "a value, where none was asked for"};
    if (size.has_value() && *size > 0 && static_cast<std::uint64_t>(*size) > limit) {
      return {Outcome::too_large, fmt::format("{} bytes, of which {} would be taken", *size, limit)};
    }
    return {};
  }

  static Answer answer_of(const redisReply& reply) {
    const std::string_view text(reply.str == nullptr ? "" : reply.str, reply.str == nullptr ? 0 : reply.len);
    switch (reply.type) {
      case REDIS_REPLY_STRING:
        return {Outcome::ok, std::string(text)};
      case REDIS_REPLY_STATUS:
        return text == "OK" ? Answer{} : Answer{Outcome::bad_answer, "the status is " + quoted(text)};
      case REDIS_REPLY_NIL:
        return {Outcome::absent, {}};
      case REDIS_REPLY_ERROR: {
        bool is_denied = text.find("AUTH") != std::string_view::npos;
        for (const std::string_view code : {"WRONGPASS", "NOPERM", "ERR invalid password"}) {
          is_denied = is_denied || text.starts_with(code);
        }
        return {is_denied ? Outcome::denied : Outcome::server_error, "the server says " + quoted(text)};
      }
      default:
        return {Outcome::bad_answer, fmt::format("an answer of the unexpected type {}", reply.type)};
    }
  }

  const Url url_;
  const std::chrono::seconds ttl_;
  Socket socket_;
};

}  // namespace

Connect redis_connections(const Url& url, const RemoteCacheOptions& options) {
  return [url, ttl = options.ttl] { return std::make_unique<RedisConnection>(url, ttl); };
}

}  // namespace qkvjit::remote
