// SPDX-License-Identifier: Apache-2.0
// The disk cache's entries together: listing, checking, and keeping to a budget.
#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <random>
#include <tuple>
#include <variant>

#include "cache/artifact_entry.h"
#include "cache/disk_cache.h"
#include "cache/disk_files.h"

namespace qkvjit {
namespace {

/// No key has it: 63 one-bits do not happen.
constexpr std::uint64_t kTrimLock = UINT64_MAX;
/// Another trimmer does this one's work, so that waiting longer is of no use.
constexpr std::chrono::milliseconds kTrimPatience{500};

std::chrono::system_clock::time_point time_of(const timespec& time) {
  return std::chrono::system_clock::time_point(std::chrono::duration_cast<std::chrono::system_clock::duration>(
      std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec)));
}

/// The entry's name; empty where the file is none.
std::string entry_name(std::string_view file) {
  if (!file.ends_with(kEntrySuffix)) return {};
  file.remove_suffix(std::string_view(kEntrySuffix).size());
  return parse_hex(file).has_value() ? std::string(file) : std::string();
}

bool is_temporary(std::string_view file) {
  const std::size_t suffix = file.find(kEntrySuffix);
  return suffix != std::string_view::npos && file.ends_with(kTemporarySuffix) &&
         parse_hex(file.substr(0, suffix)).has_value();
}

std::uint64_t total_bytes(const std::vector<DiskCache::Entry>& entries) {
  std::uint64_t total = 0;
  for (const DiskCache::Entry& entry : entries) total += entry.bytes;
  return total;
}

}  // namespace

void mark_used(int folder, const std::string& name) noexcept {
  const timespec now[2] = {{0, UTIME_OMIT}, {0, UTIME_NOW}};
  utimensat(folder, (name + kEntrySuffix).c_str(), now, AT_SYMLINK_NOFOLLOW);  // read-only: then no budget is kept
}

bool remove_entry(int folder, const std::string& name) {
  const std::string file = name + kEntrySuffix;
  if (unlinkat(folder, file.c_str(), 0) == 0 || errno == ENOENT) return true;
  if (unlinkat(folder, file.c_str(), AT_REMOVEDIR) == 0) return true;
  const std::string aside = fmt::format("{}.{}-{:08x}{}", file, getpid(), std::random_device()(), kTemporarySuffix);
  return renameat(folder, file.c_str(), folder, aside.c_str()) == 0;
}

/// `sweep`: removes what writers that died left behind.
std::vector<DiskCache::Entry> DiskCache::scan(int folder, bool sweep) {
  // A descriptor of its own: the position in a folder belongs to the open file.
  const int descriptor = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(descriptor < 0 ? nullptr : fdopendir(descriptor), closedir);
  if (listing == nullptr) throw FileError(fmt::format("cannot be listed: {}", error_text(errno)), errno);
  const auto stale = std::chrono::system_clock::now() - kStaleAfter;
  std::vector<Entry> entries;
  while (const dirent* found = readdir(listing.get())) {  // NOLINT(concurrency-mt-unsafe): one listing, one thread
    const std::string_view file = found->d_name;
    std::string name = entry_name(file);
    const bool is_left_over = sweep && name.empty() && is_temporary(file);
    if (name.empty() && !is_left_over) continue;
    struct stat facts {};
    if (fstatat(folder, found->d_name, &facts, AT_SYMLINK_NOFOLLOW) != 0) continue;  // gone meanwhile
    const auto last_use = time_of(facts.st_mtim);
    if (is_left_over) {
      if (last_use < stale && unlinkat(folder, found->d_name, 0) != 0) unlinkat(folder, found->d_name, AT_REMOVEDIR);
    } else if (S_ISREG(facts.st_mode)) {
      entries.push_back({std::move(name), static_cast<std::uint64_t>(facts.st_size), last_use});
    }
  }
  std::ranges::sort(entries, [](const Entry& a, const Entry& b) {
    return std::tie(a.last_use, a.name) < std::tie(b.last_use, b.name);
  });
  return entries;
}

DiskCache::Removed DiskCache::trim_in(int folder, std::uint64_t max_bytes) {
  if (total_bytes(scan(folder, true)) <= max_bytes) return {};
  // Two that trim at once would together remove more than either needs to; where there are no locks, so be it.
  const KeyLock lock(folder, kLockFile, kTrimLock, kTrimPatience);
  if (lock.state() == LockState::timed_out) return {};
  const std::vector<Entry> entries = scan(folder, false);
  std::uint64_t total = total_bytes(entries);
  Removed removed;
  for (const Entry& entry : entries) {
    if (total <= max_bytes) break;
    if (!remove_entry(folder, entry.name)) continue;
    total -= entry.bytes;
    ++removed.entries;
    removed.bytes += entry.bytes;
  }
  count(&DiskStats::evictions, removed.entries);
  return removed;
}

std::vector<DiskCache::Entry> DiskCache::list() noexcept {
  return with_folder([&](int folder) { return scan(folder, false); });
}

DiskCache::Verified DiskCache::verify() noexcept {
  return with_folder([&](int folder) {
    Verified result;
    for (const Entry& entry : scan(folder, true)) {
      const auto bytes = read_entry(folder, entry.name);
      if (!bytes.has_value()) continue;  // gone meanwhile
      const auto key = entry_key(*bytes);
      const auto* fault = std::get_if<EntryFault>(&key);
      if (fault == nullptr && std::get<ArtifactKey>(key).name() == entry.name) {
        ++result.good;
        continue;
      }
      result.bad.emplace_back(entry.name, fault != nullptr ? fault->reason : "key");
      reject(folder, entry.name, result.bad.back().second);
    }
    return result;
  });
}

DiskCache::Removed DiskCache::trim(std::uint64_t max_bytes) noexcept {
  return with_folder([&](int folder) { return trim_in(folder, max_bytes); });
}

DiskCache::Removed DiskCache::clear() noexcept { return trim(0); }

}  // namespace qkvjit
