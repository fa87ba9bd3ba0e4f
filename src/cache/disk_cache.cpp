// SPDX-License-Identifier: Apache-2.0
// Entries: loading, storing and locking. Listing and removing them is in disk_upkeep.cpp.
#include "cache/disk_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <span>
#include <variant>

#include "cache/artifact_entry.h"
#include "cache/cache_directory.h"
#include "cache/disk_files.h"
#include "compile/kernel_templates.h"
#include "support/log.h"

namespace qkvjit {
namespace {

/// Beyond all that a compile makes; a file of that size is not read into memory.
constexpr off_t kMaxEntryBytes = off_t{256} << 20;

std::uint64_t lock_number(const ArtifactKey& key) {
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < sizeof number; ++i) number = number << 8 | key.digest()[i];
  return number;
}

}  // namespace

void DiskCache::open_folder() {
  is_opened_ = true;
  folder_ = nullptr;
  refusal_.clear();
  path_ = options_.directory.value_or(default_cache_directory());
  if (path_.empty()) {
    refusal_ =
        "there is no disk cache: none of CacheOptions::directory, QKVJIT_CACHE_DIR, XDG_CACHE_HOME and HOME is set";
    log::line(log::Level::debug, "{}", refusal_);
    return;
  }
  // A kernel's text would not be all in its key.
  refusal_ = unknown_include(kernel_templates());
  if (refusal_.empty()) {
    CacheDirectory opened = open_cache_directory(path_);
    if (opened.refusal.empty()) {
      folder_ = std::make_shared<const FileDescriptor>(std::move(opened.descriptor));
      return;
    }
    refusal_ = std::move(opened.refusal);
  }
  log::line(log::Level::warn, "kernels are kept in memory only: {}", refusal_);
}

std::shared_ptr<const FileDescriptor> DiskCache::folder(bool again) {
  const std::lock_guard lock(mutex_);
  if (!is_opened_ || again) open_folder();
  return folder_;
}

bool DiskCache::is_usable() noexcept {
  return with_folder([](int) { return true; });
}

std::string DiskCache::refusal() const {
  const std::lock_guard lock(mutex_);
  return refusal_;
}

std::filesystem::path DiskCache::directory() const {
  const std::lock_guard lock(mutex_);
  return path_;
}

std::optional<CompiledKernel> DiskCache::load(const ArtifactKey& key, const Specialization& spec,
                                              bool is_second_look) noexcept {
  return with_folder([&](int folder) -> std::optional<CompiledKernel> {
    const std::string name = key.name();
    if (const auto bytes = read_entry(folder, name)) {
      auto decoded = decode_entry(*bytes, key, spec);
      if (auto* kernel = std::get_if<CompiledKernel>(&decoded)) {
        mark_used(folder, name);
        count(&DiskStats::hits);
        return std::move(*kernel);
      }
      reject(folder, name, std::get<EntryFault>(decoded).reason);
    }
    if (!is_second_look) count(&DiskStats::misses);
    return std::nullopt;
  });
}

void DiskCache::store(const ArtifactKey& key, const CompiledKernel& kernel) noexcept {
  try {
    if (is_usable()) write(key.name(), encode_entry(key, kernel));
  } catch (const std::exception& failure) {
    fail(failure.what());
  }
}

KeyLock DiskCache::lock(const ArtifactKey& key) noexcept {
  try {
    const auto open = folder();
    if (open == nullptr) return {};
    const Stopwatch watch;
    KeyLock taken(open->get(), kLockFile, lock_number(key), options_.lock_timeout);
    if (taken.state() == LockState::timed_out) {
      count(&DiskStats::lock_timeouts);
      if (const auto held_back = warnings_.try_pass()) {
        log::line(
            log::Level::warn,
            "another process has compiled {} for more than {} ms: it is compiled here too ({} more warnings of the "
            "disk cache before)",
            key.name(), options_.lock_timeout.count(), *held_back);
      }
    }
    const std::lock_guard lock(mutex_);
    stats_.lock_wait_ms += watch.milliseconds();
    return taken;
  } catch (const std::exception& failure) {
    fail(failure.what());
    return {};
  }
}

std::optional<std::string> DiskCache::read(const std::string& name) noexcept {
  return with_folder([&](int folder) { return read_entry(folder, name); });
}

bool DiskCache::write(const std::string& name, std::string_view bytes) noexcept {
  return with_folder([&](int folder) {
    if (options_.max_bytes != 0 && bytes.size() > options_.max_bytes) {
      throw Error(fmt::format("an entry of {} bytes is beyond max_disk_bytes, {}", bytes.size(), options_.max_bytes));
    }
    // Beyond the process's own limit a write would end it by a signal.
    rlimit file_size{};
    if (getrlimit(RLIMIT_FSIZE, &file_size) == 0 && bytes.size() > file_size.rlim_cur) {
      throw FileError(fmt::format("an entry of {} bytes is beyond RLIMIT_FSIZE, {}", bytes.size(), file_size.rlim_cur),
                      EFBIG);
    }
    const auto write_into = [&](int target) {
      AtomicFile file("cache entry", name + kEntrySuffix, target, 0600);
      file.write(std::as_bytes(std::span(bytes)));
      file.commit();
    };
    std::shared_ptr<const FileDescriptor> remade;
    try {
      write_into(folder);
    } catch (const FileError& failure) {
      // Someone removed the folder: a long-lived process makes it again.
      if (failure.code() != ENOENT || (remade = this->folder(true)) == nullptr) throw;
      folder = remade->get();
      write_into(folder);
    }
    count(&DiskStats::stores);
    if (options_.max_bytes != 0) trim_in(folder, options_.max_bytes);
    return true;
  });
}

std::optional<std::string> DiskCache::read_entry(int folder, const std::string& name) {
  const std::string file = name + kEntrySuffix;
  // O_NONBLOCK: a pipe in its place does not block.
  const FileDescriptor entry(openat(folder, file.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (entry.get() < 0) {
    if (errno == ENOENT) return std::nullopt;
    if (errno != ELOOP && errno != ENXIO) throw FileError(fmt::format("{}: {}", file, error_text(errno)), errno);
    reject(folder, name, "not a file");
    return std::nullopt;
  }
  struct stat facts {};
  if (fstat(entry.get(), &facts) != 0) throw FileError(fmt::format("{}: {}", file, error_text(errno)), errno);
  if (!S_ISREG(facts.st_mode) || facts.st_size > kMaxEntryBytes) {
    reject(folder, name, S_ISREG(facts.st_mode) ? "too large" : "not a file");
    return std::nullopt;
  }
  std::string bytes(static_cast<std::size_t>(facts.st_size), '\0');
  if (const std::string failure = read_exactly(entry.get(), 0, bytes.data(), bytes.size()); !failure.empty()) {
    throw Error(fmt::format("{}: {}", file, failure));
  }
  return bytes;
}

void DiskCache::reject(int folder, const std::string& name, const std::string& reason) {
  remove_entry(folder, name);
  {
    const std::lock_guard lock(mutex_);
    ++stats_.rejected;
    ++stats_.rejected_reasons[reason];
  }
  if (const auto held_back = warnings_.try_pass()) {
    log::line(log::Level::warn,
              "the cache entry {} in '{}' was bad ({}) and is removed ({} more warnings of the disk "
              "cache before)",
              name, directory().string(), reason, *held_back);
  }
}

void DiskCache::fail(const char* what) noexcept {
  try {
    count(&DiskStats::errors);
    if (const auto held_back = warnings_.try_pass()) {
      log::line(log::Level::warn, "the disk cache '{}' failed, compiling goes on without it: {} ({} more before)",
                directory().string(), what, *held_back);
    }
  } catch (const std::exception&) {  // no memory for a warning: the counter stands
  }
}

void DiskCache::count(std::uint64_t DiskStats::*counter, std::uint64_t by) {
  const std::lock_guard lock(mutex_);
  stats_.*counter += by;
}

DiskStats DiskCache::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace qkvjit
