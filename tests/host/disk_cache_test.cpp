// SPDX-License-Identifier: Apache-2.0
// The disk cache within one process: what is stored is found, what is damaged heals, what the file system refuses is a
// miss, and the budget holds.
#include "cache/disk_cache.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "cache/artifact_entry.h"
#include "compile/compiler.h"
#include "support/cache_fixture.h"
#include "support/cache_folder.h"

namespace {

using namespace qkvjit;
using fake::CacheFolder;
using fake::spec_of;
namespace fs = std::filesystem;

ArtifactKey key_of(const Specialization& spec) { return ArtifactKey::of(spec, *fake::nvrtc()); }

std::shared_ptr<const CompiledKernel> compiled_in(KernelCache& cache, unsigned n = 64) {
  return cache.compile(spec_of(n));
}

/// A cache in `folder`, its kernel compiled or found.
CacheStats compile_in(const CacheFolder& folder, unsigned n = 64, CacheOptions options = {}) {
  options.directory = folder.path();
  KernelCache cache(options, fake::nvrtc());
  const auto kernel = compiled_in(cache, n);
  CHECK(kernel->spec == spec_of(n));
  CHECK(has(kernel->ptx, kernel->lowered_name));
  return cache.stats();
}

/// Writes one of our calls refuses, until it goes out of scope.
struct BrokenCalls {
  BrokenCalls() = default;
  ~BrokenCalls() { file_calls = FileCalls(); }
  BrokenCalls(const BrokenCalls&) = delete;  // restores
  BrokenCalls& operator=(const BrokenCalls&) = delete;
};

template <int kCode>
int fail_with(int) {
  errno = kCode;
  return -1;
}

}  // namespace

TEST_SUITE("disk") {
  TEST_CASE("a second cache finds what the first has compiled") {
    fake::begin();
    const CacheFolder folder;
    const CacheStats cold = compile_in(folder);
    CHECK(cold.compiles == 1);
    CHECK(cold.disk.misses == 1);
    CHECK(cold.disk.stores == 1);
    CHECK(cold.disk.hits == 0);
    CHECK(cold.disk.errors == 0);
    CHECK(cold.disk.ms > 0);
    struct stat facts {};
    REQUIRE(stat(folder.entry(key_of(spec_of())).c_str(), &facts) == 0);
    CHECK((facts.st_mode & 0777) == 0600);

    const CacheStats warm = compile_in(folder);
    CHECK(warm.compiles == 0);
    CHECK(warm.disk.hits == 1);
    CHECK(warm.disk.misses == 0);
    CHECK(warm.disk.stores == 0);
    CHECK(fake::nvrtc_compiles == 1);
    CHECK(compile_in(folder, 72).compiles == 1);  // another kernel
  }

  TEST_CASE("no folder: nothing is written, nothing is counted") {
    fake::begin();
    KernelCache cache({.directory = ""}, fake::nvrtc());
    (void)compiled_in(cache);
    CHECK(cache.stats().disk.misses == 0);
    CHECK(cache.stats().disk.errors == 0);
  }

  TEST_CASE("a kernel found on disk is loaded and launched from as a compiled one") {
    fake::begin();
    const CacheFolder folder;
    compile_in(folder);
    {
      const DeviceContext context(0, fake::table());
      KernelCache cache({.directory = folder.path()}, fake::nvrtc());
      CHECK(cache.get(context, spec_of()) != nullptr);
      CHECK(cache.stats().compiles == 0);
      CHECK(cache.stats().loads == 1);
    }
    fake::check_clean();
  }

  TEST_CASE("another template or another build of NVRTC: a miss, and both stay") {
    fake::begin();
    const CacheFolder folder;
    compile_in(folder);
    auto other = std::make_shared<NvrtcTable>(*fake::nvrtc());
    other->build = "13.0.2";
    for (const std::uint64_t compiles : {1, 0}) {
      KernelCache cache({.directory = folder.path()}, other);
      (void)compiled_in(cache);
      CHECK(cache.stats().compiles == compiles);
    }
    CHECK(compile_in(folder).disk.hits == 1);
  }

  TEST_CASE("a flipped bit or a cut at every 64th byte heals itself") {
    fake::begin();
    const CacheFolder folder;
    compile_in(folder);
    const fs::path entry = folder.entry(key_of(spec_of()));
    const std::string good = fake::read_bytes(entry);
    REQUIRE(good.size() > 640);
    for (std::size_t at = 0; at < good.size(); at += 64) {
      for (const bool is_cut : {false, true}) {
        std::string bad = good;
        if (is_cut) {
          bad.resize(at);
        } else {
          bad[at] = static_cast<char>(bad[at] ^ 0x10);
        }
        fake::write_bytes(entry, bad);
        const CacheStats stats = compile_in(folder);
        REQUIRE(stats.compiles == 1);
        REQUIRE(stats.disk.rejected == 1);
        REQUIRE(stats.disk.rejected_reasons.size() == 1);
        REQUIRE(stats.disk.stores == 1);
        REQUIRE(compile_in(folder).disk.hits == 1);
      }
    }
  }

  TEST_CASE("what lies in an entry's place heals, whatever it is") {
    const CacheFolder folder;
    const fs::path entry = folder.entry(key_of(spec_of()));
    const fs::path elsewhere = folder.path() / "elsewhere";
    const auto heals = [&](const char* reason) {
      fake::begin();
      const CacheStats stats = compile_in(folder);
      CHECK(stats.compiles == 1);
      CHECK(stats.disk.rejected == 1);
      CHECK_MESSAGE(stats.disk.rejected_reasons.count(reason) == 1, reason);
      CHECK(compile_in(folder).disk.hits == 1);
      fs::remove_all(entry);
    };
    fake::write_bytes(entry, "");
    heals("too short");
    fake::write_bytes(entry, std::string(5000, 'x'));
    heals("magic");
    fs::create_directory(entry);
    heals("not a file");
    fs::create_directory(entry);
    fake::write_bytes(entry / "file", "in a folder that is not empty");
    heals("not a file");
    REQUIRE(mkfifo(entry.c_str(), 0600) == 0);
    heals("not a file");
    compile_in(folder, 72);
    fs::copy_file(folder.entry(key_of(spec_of(72))), entry);
    heals("key");
    fs::copy_file(folder.entry(key_of(spec_of(72))), elsewhere);
    fs::create_symlink(elsewhere, entry);
    heals("not a file");
    CHECK(fs::exists(elsewhere));  // nothing behind the link was touched
    fs::create_symlink("/nowhere", entry);
    heals("not a file");
    std::ofstream(entry).close();
    fs::resize_file(entry, std::uintmax_t{300} << 20);  // sparse
    heals("too large");
  }

  TEST_CASE("full disk, quota, read-only, errors at closing: the call succeeds, one error, nothing left behind") {
    const CacheFolder folder;
    compile_in(folder, 8);
    const BrokenCalls broken;
    const auto survives = [&](auto set) {
      fake::begin();
      file_calls = FileCalls();
      set(file_calls);
      const CacheStats stats = compile_in(folder);
      file_calls = FileCalls();
      CHECK(stats.compiles == 1);
      CHECK(stats.disk.errors == 1);
      CHECK(stats.disk.stores == 0);
      const auto files = folder.files();
      CHECK(files.size() == 2);  // the first kernel and the file of locks
    };
    survives([](FileCalls& calls) {
      calls.write = [](int, const void*, std::size_t) {
        errno = ENOSPC;
        return ssize_t{-1};
      };
    });
    survives([](FileCalls& calls) {
      calls.write = [](int descriptor, const void* bytes, std::size_t size) {  // the first half fits
        static int calls_made = 0;
        if (++calls_made == 1) return ::write(descriptor, bytes, size / 2);
        errno = EDQUOT;
        return ssize_t{-1};
      };
    });
    survives([](FileCalls& calls) {
      calls.create = [](int, const char*, int, mode_t) {
        errno = EROFS;
        return -1;
      };
    });
    survives([](FileCalls& calls) { calls.fsync = fail_with<EIO>; });
    survives([](FileCalls& calls) {
      calls.rename = [](int, const char*, int, const char*) {
        errno = EACCES;
        return -1;
      };
    });
  }

  TEST_CASE("writes that take a few bytes, and interrupted ones, are gone on with") {
    fake::begin();
    const CacheFolder folder;
    {
      const BrokenCalls broken;
      file_calls.write = [](int descriptor, const void* bytes, std::size_t size) {
        static int calls_made = 0;
        if (++calls_made % 2 == 0) {
          errno = EINTR;
          return ssize_t{-1};
        }
        return ::write(descriptor, bytes, std::min<std::size_t>(size, 100));
      };
      CHECK(compile_in(folder).disk.stores == 1);
    }
    CHECK(compile_in(folder).disk.hits == 1);
  }

  TEST_CASE("a folder that is removed under a running cache is made again") {
    fake::begin();
    const CacheFolder base;
    const fs::path folder = base.path() / "cache";
    KernelCache cache({.directory = folder}, fake::nvrtc());
    (void)compiled_in(cache, 64);
    fs::remove_all(folder);
    (void)compiled_in(cache, 72);
    CHECK(cache.stats().disk.stores == 2);
    CHECK(cache.stats().disk.errors == 0);
    KernelCache other({.directory = folder}, fake::nvrtc());
    (void)compiled_in(other, 72);
    CHECK(other.stats().disk.hits == 1);
  }

  TEST_CASE("a failed compile stores nothing, and the next one does") {
    fake::begin();
    const CacheFolder folder;
    KernelCache cache({.directory = folder.path()}, fake::nvrtc());
    fake::nvrtc_failures = 1;
    CHECK_THROWS_AS(compiled_in(cache), CompileError);
    CHECK(cache.stats().disk.stores == 0);
    CHECK_FALSE(fs::exists(folder.entry(key_of(spec_of()))));
    (void)compiled_in(cache);
    CHECK(cache.stats().disk.stores == 1);
  }

  TEST_CASE("a frozen cache takes kernels from disk, and still compiles none") {
    fake::begin();
    const CacheFolder folder;
    compile_in(folder);
    KernelCache cache({.directory = folder.path()}, fake::nvrtc());
    cache.freeze();
    CHECK(compiled_in(cache) != nullptr);
    CHECK_THROWS_AS(compiled_in(cache, 72), CacheFrozen);
    CHECK(cache.stats().compiles == 0);
  }

  TEST_CASE("32 threads, two caches, one folder: one compile a kernel") {
    fake::begin();
    fake::nvrtc_milliseconds = 20;
    const CacheFolder folder;
    KernelCache first({.directory = folder.path()}, fake::nvrtc());
    KernelCache second({.directory = folder.path()}, fake::nvrtc());
    fake::race(fake::kThreads, [&](int i) {
      KernelCache& cache = i % 2 == 0 ? first : second;
      CHECK(cache.compile(spec_of(i % 8 < 4 ? 64 : 72)) != nullptr);
      return nullptr;
    });
    CHECK(fake::nvrtc_compiles == 2);
    CHECK(first.stats().disk.errors + second.stats().disk.errors == 0);
    CHECK(first.stats().disk.lock_timeouts + second.stats().disk.lock_timeouts == 0);
  }

  TEST_CASE("the least recently used leave first, and a hit is a use") {
    fake::begin();
    const CacheFolder folder;
    std::uint64_t bytes = 0;
    for (unsigned i = 1; i <= 4; ++i) {
      compile_in(folder, 8 * i);
      const fs::path entry = folder.entry(key_of(spec_of(8 * i)));
      bytes = std::max(bytes, static_cast<std::uint64_t>(fs::file_size(entry)));
      fake::set_age(entry, std::chrono::seconds(1000 - 100 * i));
    }
    CHECK(compile_in(folder, 8).disk.hits == 1);  // the oldest, now the newest
    const CacheStats stats = compile_in(folder, 40, {.max_disk_bytes = 4 * bytes});
    CHECK(stats.disk.stores == 1);
    CHECK(stats.disk.evictions == 1);
    CHECK(fs::exists(folder.entry(key_of(spec_of(8)))));
    CHECK_FALSE(fs::exists(folder.entry(key_of(spec_of(16)))));
    CHECK(fs::exists(folder.entry(key_of(spec_of(24)))));
    CHECK(fs::exists(folder.entry(key_of(spec_of(40)))));
    // One that no budget holds is not written at all.
    const CacheStats small = compile_in(folder, 48, {.max_disk_bytes = 100});
    CHECK(small.compiles == 1);
    CHECK(small.disk.errors == 1);
    CHECK(fs::exists(folder.entry(key_of(spec_of(24)))));
  }

  TEST_CASE("list, verify, trim and clear; other files and what is being written stay") {
    fake::begin();
    const CacheFolder folder;
    for (unsigned i = 1; i <= 5; ++i) compile_in(folder, 8 * i);
    const std::string name = key_of(spec_of(8)).name();
    const std::string other_name = std::string(64, 'a');
    fs::copy_file(folder.entry(key_of(spec_of(8))), folder.path() / (other_name + ".qkve"));
    fake::write_bytes(folder.path() / "README", "mine");
    fs::create_directory(folder.path() / "folder.qkve");
    const fs::path fresh = folder.path() / (name + ".qkve.1-00000001.tmp");
    const fs::path stale = folder.path() / (name + ".qkve.1-00000002.tmp");
    fake::write_bytes(fresh, "half");
    fake::write_bytes(stale, "half");
    fake::set_age(stale, DiskCache::kStaleAfter + std::chrono::seconds(5));

    DiskCache cache(folder.options());
    CHECK(cache.list().size() == 6);
    CHECK(fs::exists(stale));  // looking changes nothing
    const auto verified = cache.verify();
    CHECK(verified.good == 5);
    REQUIRE(verified.bad.size() == 1);
    CHECK(verified.bad[0] == std::pair(other_name, std::string("key")));
    CHECK_FALSE(fs::exists(stale));
    const auto entries = cache.list();
    REQUIRE(entries.size() == 5);
    CHECK(entries[0].bytes == fs::file_size(folder.path() / (entries[0].name + ".qkve")));

    const auto bytes = cache.read(entries[4].name);
    REQUIRE(bytes.has_value());
    CHECK(cache.write(entries[4].name, *bytes));
    const auto removed = cache.trim(2 * entries[4].bytes);
    CHECK(removed.entries >= 3);
    CHECK(cache.list().back().name == entries[4].name);
    CHECK(cache.clear().entries == 5 - removed.entries);
    CHECK(cache.list().empty());
    CHECK(fs::exists(fresh));
    CHECK(fs::exists(folder.path() / "README"));
    CHECK(cache.stats().errors == 0);
  }
}
