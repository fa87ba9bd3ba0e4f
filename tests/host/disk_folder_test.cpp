// SPDX-License-Identifier: Apache-2.0
// Which folders the disk cache takes: code is loaded from there, so it must be the user's alone.
#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "cache/cache_directory.h"
#include "support/cache_fixture.h"
#include "support/cache_folder.h"

namespace {

using namespace qkvjit;
using fake::CacheFolder;
namespace fs = std::filesystem;

constexpr uid_t kSomeoneElse = 12345;

/// An environment variable's value, put back at the end.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    set(value);
  }
  ~Variable() { set(old_.has_value() ? old_->c_str() : nullptr); }
  Variable(const Variable&) = delete;  // restores
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) const {
    if (value == nullptr) {
      unsetenv(name_);
    } else {
      setenv(name_, value, 1);
    }
  }
  const char* name_;
  std::optional<std::string> old_;
};

std::string refusal(const fs::path& path) {
  const CacheDirectory opened = open_cache_directory(path);
  CHECK((opened.descriptor.get() < 0) == !opened.refusal.empty());
  return opened.refusal;
}

unsigned mode_of(const fs::path& path) {
  struct stat facts {};
  REQUIRE(stat(path.c_str(), &facts) == 0);
  return facts.st_mode & 07777;
}

}  // namespace

TEST_SUITE("disk_folder") {
  TEST_CASE("the environment says where, in order") {
    const auto directory = [](const char* own, const char* xdg, const char* home) {
      const Variable a("QKVJIT_CACHE_DIR", own), b("XDG_CACHE_HOME", xdg), c("HOME", home);
      return default_cache_directory().string();
    };
    CHECK(directory("/own", "/xdg", "/home/me") == "/own");
    CHECK(directory("own", "/xdg", "/home/me") == "own");
    CHECK(directory("", "/xdg", "/home/me").empty());
    CHECK(directory(nullptr, "/xdg", "/home/me") == "/xdg/qkvjit");
    CHECK(directory(nullptr, "relative", "/home/me") == "/home/me/.cache/qkvjit");
    CHECK(directory(nullptr, nullptr, "/home/me") == "/home/me/.cache/qkvjit");
    CHECK(directory(nullptr, nullptr, "relative").empty());
    CHECK(directory(nullptr, nullptr, nullptr).empty());
  }

  TEST_CASE("HOME unset or absent: kernels stay in memory, or the folders are made") {
    fake::begin();
    const CacheFolder base;
    const Variable own("QKVJIT_CACHE_DIR", nullptr), xdg("XDG_CACHE_HOME", nullptr);
    {
      const Variable home("HOME", nullptr);
      KernelCache cache({}, fake::nvrtc());
      CHECK(cache.compile(fake::spec_of()) != nullptr);
      CHECK(cache.stats().disk.misses == 0);
    }
    const Variable home("HOME", (base.path() / "absent").c_str());
    KernelCache cache({}, fake::nvrtc());
    CHECK(cache.compile(fake::spec_of()) != nullptr);
    CHECK(cache.stats().disk.stores == 1);
    CHECK(fs::exists(base.path() / "absent/.cache/qkvjit/locks"));
  }

  TEST_CASE("an absent folder is made for its user alone, parents too, whatever the umask") {
    const CacheFolder base;
    const mode_t before = umask(0);
    CHECK(refusal(base.path() / "a/b/../c").empty());
    umask(before);
    CHECK(mode_of(base.path() / "a") == 0700);
    CHECK(mode_of(base.path() / "a/c") == 0700);
    CHECK(refusal(base.path() / "a/c").empty());  // and taken as it is
  }

  TEST_CASE("refused: writable by others, someone else's, a file, a pipe") {
    const CacheFolder base;
    const fs::path folder = base.path() / "cache";
    fs::create_directory(folder);
    for (const mode_t mode : {0770, 0702, 0777, 01777}) {
      REQUIRE(chmod(folder.c_str(), mode) == 0);
      CHECK(has(refusal(folder), "lets group or others write; set QKVJIT_CACHE_DIR"));
    }
    REQUIRE(chmod(folder.c_str(), 0755) == 0);  // to read is no harm
    CHECK(refusal(folder).empty());
    const fs::path file = base.path() / "file";
    fake::write_bytes(file, "a file");
    CHECK(has(refusal(file), "is not a folder"));
    CHECK(has(refusal(file / "below"), "is not a folder"));
    REQUIRE(mkfifo((base.path() / "pipe").c_str(), 0600) == 0);
    CHECK(has(refusal(base.path() / "pipe"), "is not a folder"));
    if (geteuid() != 0) {
      MESSAGE("folders of someone else are not tested: that needs root");
      return;
    }
    REQUIRE(chown(folder.c_str(), kSomeoneElse, kSomeoneElse) == 0);
    CHECK(has(refusal(folder), "it belongs to user 12345"));
  }

  TEST_CASE("symlinks on the way: ours are followed, someone else's are not, loops end") {
    const CacheFolder base;
    fs::create_directory(base.path() / "real");
    fs::permissions(base.path() / "real", fs::perms::owner_all);
    fs::create_symlink("real", base.path() / "relative");
    fs::create_symlink(base.path() / "relative", base.path() / "absolute");
    CHECK(refusal(base.path() / "relative/cache").empty());
    CHECK(refusal(base.path() / "absolute/other").empty());
    CHECK(fs::is_directory(base.path() / "real/cache"));
    CHECK(fs::is_directory(base.path() / "real/other"));
    fs::create_symlink("loop", base.path() / "loop");
    CHECK(has(refusal(base.path() / "loop"), "symbolic links"));
    fs::create_symlink("nowhere", base.path() / "dangling");
    CHECK(refusal(base.path() / "dangling").empty());
    CHECK(mode_of(base.path() / "nowhere") == 0700);
    if (geteuid() != 0) return;
    REQUIRE(lchown((base.path() / "relative").c_str(), kSomeoneElse, kSomeoneElse) == 0);
    CHECK(has(refusal(base.path() / "relative"), "relative belongs to user 12345"));
    CHECK(has(refusal(base.path() / "absolute/cache"), "belongs to user 12345"));
  }

  TEST_CASE("a refused folder: memory only, no call fails, nothing is written, the text says what to do") {
    fake::begin();
    const CacheFolder base;
    REQUIRE(chmod(base.path().c_str(), 0777) == 0);
    {
      KernelCache cache({.directory = base.path()}, fake::nvrtc());
      CHECK(cache.compile(fake::spec_of()) != nullptr);
      CHECK(cache.compile(fake::spec_of(72)) != nullptr);
      CHECK(cache.stats().compiles == 2);
      CHECK(cache.stats().disk.misses == 0);
    }
    CHECK(base.files().empty());
    DiskCache cache({base.path(), 0, {}});
    CHECK_FALSE(cache.is_usable());
    CHECK(has(cache.refusal(), "0777"));
    CHECK(cache.list().empty());
    CHECK_FALSE(cache.write(std::string(64, 'a'), "bytes"));
  }

  TEST_CASE("the file of locks is no link to follow: without locks it goes on") {
    fake::begin();
    const CacheFolder base;
    const fs::path target = base.path() / "target";
    fs::create_symlink(target, base.path() / "locks");
    KernelCache cache({.directory = base.path()}, fake::nvrtc());
    CHECK(cache.compile(fake::spec_of()) != nullptr);
    CHECK(cache.stats().disk.stores == 1);
    CHECK_FALSE(fs::exists(target));
  }
}
