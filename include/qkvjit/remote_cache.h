// SPDX-License-Identifier: Apache-2.0
// A cache that a fleet shares: compiled artifacts in a Redis or on a plain HTTP server (GET and PUT). In the target
// qkvjit_remote, so that the core library links neither. Thread-safe. A server that is slow, dead or lying costs at
// most the deadline and then a miss, never a failed call.
//
// Whoever can write to the server decides what code runs on the GPUs that read from it: give every machine the same
// hmac_key, and nothing without it is looked at.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace qkvjit {

struct RemoteCacheOptions {
  /// redis://[user:password@]host[:port][/db], redis+unix://[user:password@]/path/of.sock[?db=n],
  /// http://[user:password@]host[:port][/prefix], https://… Special characters in user and password as %XX.
  std::string url;
  /// For the whole of a load or a store: name lookup, connecting, TLS, transfer.
  std::chrono::milliseconds deadline{250};
  /// Any length, 32 random bytes are best. Empty: entries carry a checksum, which proves nothing about who wrote them.
  std::string hmac_key;
  std::uint64_t max_entry_bytes = 64u << 20;  ///< larger entries are neither loaded nor stored
  bool read_only = false;                     ///< never store
  std::chrono::seconds ttl{0};                ///< Redis: entries expire this long after they are stored; 0: never
  std::string bearer_token;                   ///< HTTP: instead of a user and password in the URL
  std::string ca_file;                        ///< HTTPS: a PEM file of trusted authorities instead of the system's
  /// After a failure the server is left alone for `back_off`, after each further one for twice as long.
  std::chrono::milliseconds back_off{1000};
  std::chrono::milliseconds max_back_off{60'000};
  unsigned max_connections = 8;
  std::uint64_t max_queued_bytes = 64u << 20;  ///< stores that wait; more are dropped
};

struct RemoteStats {
  std::uint64_t loads = 0;
  std::uint64_t hits = 0;
  std::uint64_t absent = 0;          ///< the server answered that it has no such entry
  std::uint64_t skipped = 0;         ///< loads and stores not tried, because the server failed a moment ago
  std::uint64_t stores = 0;          ///< accepted for storing
  std::uint64_t stored = 0;          ///< acknowledged by the server
  std::uint64_t stores_dropped = 0;  ///< the queue was full, the entry too large, or there was no time left at the end
  // Why a load or store that reached out failed:
  std::uint64_t timeouts = 0;
  std::uint64_t unreachable = 0;    ///< no such host, refused, closed on us
  std::uint64_t denied = 0;         ///< wrong or missing credentials
  std::uint64_t server_errors = 0;  ///< the server said that it cannot
  std::uint64_t bad_answers = 0;    ///< not the protocol, half an answer, a redirect
  // Why an entry that arrived was not taken:
  std::uint64_t too_large = 0;
  std::uint64_t not_ours = 0;          ///< no envelope of this version
  std::uint64_t unsigned_entries = 0;  ///< written without a key, and this cache has one; or the other way round
  std::uint64_t forged = 0;            ///< HMAC or checksum does not fit name, bytes and key
  double load_ms = 0;
  double store_ms = 0;
  std::uint64_t bytes_loaded = 0;
  std::uint64_t bytes_stored = 0;
  std::string last_error;  ///< the last failure in words, without credentials
};

class RemoteStore {
 public:
  RemoteStore() = default;
  virtual ~RemoteStore() = default;
  RemoteStore(const RemoteStore&) = delete;
  RemoteStore& operator=(const RemoteStore&) = delete;

  /// The bytes stored under `name` (64 hexadecimal digits in lower case), authenticated; nothing on any trouble.
  virtual std::optional<std::string> load(std::string_view name) noexcept = 0;

  /// Queues the entry for a thread that stores it, and returns at once. False where it was not taken.
  virtual bool store(std::string_view name, std::string bytes) noexcept = 0;

  /// Waits until everything queued was tried. False where that took longer than `limit`.
  virtual bool flush(std::chrono::milliseconds limit) noexcept = 0;

  [[nodiscard]] virtual RemoteStats stats() const = 0;

  /// The URL without user and password, for people to read.
  [[nodiscard]] virtual const std::string& where() const noexcept = 0;
};

/// Connects at the first load or store. Throws Error where an option makes no sense, or where the URL needs a
/// transport that this build lacks. Destroying the store gives what is queued one more deadline.
std::shared_ptr<RemoteStore> make_remote_store(const RemoteCacheOptions& options);

}  // namespace qkvjit
