// SPDX-License-Identifier: Apache-2.0
// Compiled kernels in a folder, one file each, shared by any number of processes. Nothing here throws: what cannot be
// read is a miss, what cannot be written is left out, each with a counter and a warning now and then. Thread-safe.
//
//   <64 hex digits>.qkve       an entry (artifact_entry.h), named by its key; its time of modification is its last use
//   ….qkve.<pid>-<random>.tmp  an entry being written; its writer died where it is older than kStaleAfter
//   locks                      empty; see key_lock.h
//
// Flat: a budget of 1 GiB is a few thousand files. Other files are left alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache/artifact_key.h"
#include "cache/key_lock.h"
#include "qkvjit/kernel_cache.h"
#include "support/file.h"
#include "support/rate_limit.h"
#include "support/stopwatch.h"

namespace qkvjit {

class DiskCache {
 public:
  struct Options {
    std::optional<std::filesystem::path> directory;  ///< as CacheOptions
    std::uint64_t max_bytes = 0;                     ///< 0: no limit
    std::chrono::milliseconds lock_timeout{0};
  };
  struct Entry {
    std::string name;  ///< 64 hex digits
    std::uint64_t bytes = 0;
    std::chrono::system_clock::time_point last_use;
  };
  struct Removed {
    std::size_t entries = 0;
    std::uint64_t bytes = 0;
  };
  struct Verified {
    std::size_t good = 0;
    std::vector<std::pair<std::string, std::string>> bad;  ///< names, and why; they were removed
  };
  static constexpr std::chrono::minutes kStaleAfter{10};

  explicit DiskCache(Options options) : options_(std::move(options)) {}

  /// Opens the folder at the first call; false, after a warning, where there is none that can be used.
  bool is_usable() noexcept;
  /// Why it is not usable; empty where it is.
  [[nodiscard]] std::string refusal() const;
  [[nodiscard]] std::filesystem::path directory() const;

  /// A damaged entry is removed and counted. A second look, under the lock, is not counted as a second miss.
  std::optional<CompiledKernel> load(const ArtifactKey& key, const Specialization& spec,
                                     bool is_second_look = false) noexcept;
  /// Also keeps to the budget, least recently used entries out first.
  void store(const ArtifactKey& key, const CompiledKernel& kernel) noexcept;
  /// Keeps other processes from compiling `key`. Where it is not held one compiles without.
  KeyLock lock(const ArtifactKey& key) noexcept;

  // --- Whole entries as bytes, for tools --------------------------------------------------------------------------
  std::optional<std::string> read(const std::string& name) noexcept;
  /// False where it could not be written.
  bool write(const std::string& name, std::string_view bytes) noexcept;
  /// The least recently used first. Like those below it is safe beside running processes.
  std::vector<Entry> list() noexcept;
  Verified verify() noexcept;
  Removed trim(std::uint64_t max_bytes) noexcept;
  Removed clear() noexcept;

  [[nodiscard]] DiskStats stats() const;

 private:
  /// The open folder; null where none is used. `again`: it was removed, make it anew.
  std::shared_ptr<const FileDescriptor> folder(bool again = false);
  void open_folder();
  std::optional<std::string> read_entry(int folder, const std::string& name);
  void reject(int folder, const std::string& name, const std::string& reason);
  void fail(const char* what) noexcept;
  std::vector<Entry> scan(int folder, bool sweep);
  Removed trim_in(int folder, std::uint64_t max_bytes);
  void count(std::uint64_t DiskStats::*counter, std::uint64_t by = 1);

  /// work(descriptor of the folder), timed; a value-initialised result where there is no folder or it throws.
  template <typename Work>
  auto with_folder(Work&& work) noexcept -> decltype(work(0)) {
    try {
      if (const auto open = folder()) {
        const Stopwatch watch;
        auto result = work(open->get());
        const std::lock_guard lock(mutex_);
        stats_.ms += watch.milliseconds();
        return result;
      }
    } catch (const std::exception& failure) {
      fail(failure.what());
    }
    return {};
  }

  Options options_;
  mutable std::mutex mutex_;  // of those below
  bool is_opened_ = false;
  std::filesystem::path path_;
  std::string refusal_;
  std::shared_ptr<const FileDescriptor> folder_;  // null: none is used
  DiskStats stats_;
  RateLimit warnings_;
};

}  // namespace qkvjit
