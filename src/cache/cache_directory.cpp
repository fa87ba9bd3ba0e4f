// SPDX-License-Identifier: Apache-2.0
#include "cache/cache_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <deque>
#include <utility>

namespace qkvjit {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxSymlinks = 40;  // as the kernel's own limit

fs::path absolute_from(const char* variable) {
  const char* value = std::getenv(variable);
  fs::path path(value == nullptr ? "" : value);
  return path.is_absolute() ? path : fs::path();
}

FileDescriptor open_folder(int parent, const char* name, int flags) {
  return FileDescriptor(openat(parent, name, flags | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

/// Goes down one name at a time, so that every symlink on the way is seen.
class Walk {
 public:
  explicit Walk(const fs::path& path) : current_(open_folder(AT_FDCWD, "/", O_PATH)) { put_in_front(path); }

  /// The folder, or a refusal without a remedy.
  CacheDirectory run() {
    while (!names_.empty()) {
      const std::string name = std::move(names_.front());
      names_.pop_front();
      walked_ += "/" + name;
      if (std::string refusal = step(name); !refusal.empty()) return {FileDescriptor(), std::move(refusal)};
    }
    FileDescriptor folder = open_folder(current_.get(), ".", O_RDONLY);
    struct stat facts {};
    if (folder.get() < 0 || fstat(folder.get(), &facts) != 0) return {FileDescriptor(), error_text(errno)};
    if (facts.st_uid != geteuid()) {
      return {FileDescriptor(), fmt::format("it belongs to user {}, this process is user {}", facts.st_uid, geteuid())};
    }
    if ((facts.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
      return {FileDescriptor(), fmt::format("its mode {:04o} lets group or others write", facts.st_mode & 07777)};
    }
    return {std::move(folder), {}};
  }

 private:
  void put_in_front(const fs::path& path) {
    auto at = names_.begin();
    for (const fs::path& part : path) {
      if (part == "/" || part == "." || part.empty()) continue;
      at = names_.insert(at, part.string()) + 1;
    }
  }

  std::string step(const std::string& name) {
    struct stat facts {};
    if (fstatat(current_.get(), name.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno != ENOENT) return fmt::format("{}: {}", walked_, error_text(errno));
      // Another process may make it at the same moment.
      if (mkdirat(current_.get(), name.c_str(), 0700) != 0 && errno != EEXIST) {
        return fmt::format("{} cannot be made: {}", walked_, error_text(errno));
      }
    } else if (S_ISLNK(facts.st_mode)) {
      return follow(name, facts.st_uid);
    } else if (!S_ISDIR(facts.st_mode)) {
      return fmt::format("{} is not a folder", walked_);
    }
    FileDescriptor next = open_folder(current_.get(), name.c_str(), O_PATH);
    if (next.get() < 0) return fmt::format("{}: {}", walked_, error_text(errno));
    current_ = std::move(next);
    return {};
  }

  std::string follow(const std::string& name, uid_t owner) {
    if (owner != geteuid() && owner != 0) return fmt::format("the symlink {} belongs to user {}", walked_, owner);
    if (++symlinks_ > kMaxSymlinks) return fmt::format("{}: {}", walked_, error_text(ELOOP));
    std::array<char, PATH_MAX> target{};
    const ssize_t size = readlinkat(current_.get(), name.c_str(), target.data(), target.size());
    if (size <= 0) return fmt::format("{}: {}", walked_, error_text(errno));
    const fs::path path(std::string_view(target.data(), static_cast<std::size_t>(size)));
    if (path.is_absolute()) current_ = open_folder(AT_FDCWD, "/", O_PATH);
    put_in_front(path);
    return {};
  }

  FileDescriptor current_;
  std::deque<std::string> names_;
  std::string walked_;  // for messages
  int symlinks_ = 0;
};

}  // namespace

fs::path default_cache_directory() {
  if (const char* own = std::getenv("QKVJIT_CACHE_DIR")) return own;
  if (const fs::path base = absolute_from("XDG_CACHE_HOME"); !base.empty()) return base / "qkvjit";
  if (const fs::path home = absolute_from("HOME"); !home.empty()) return home / ".cache" / "qkvjit";
  return {};
}

CacheDirectory open_cache_directory(const fs::path& path) {
  std::error_code error;
  CacheDirectory opened = Walk(fs::absolute(path, error)).run();
  if (!opened.refusal.empty()) {
    opened.refusal = fmt::format(
        "'{}': {}; set QKVJIT_CACHE_DIR (or CacheOptions::directory) to a folder that is yours alone, mode 0700",
        path.string(), opened.refusal);
  }
  return opened;
}

}  // namespace qkvjit
