// SPDX-License-Identifier: Apache-2.0
// The disk cache between processes: one compile for all, nothing half written however a writer dies, locks that die
// with their holder, one budget. The processes are qkvjit_disk_probe.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "support/cache_fixture.h"
#include "support/cache_folder.h"
#include "support/stopwatch.h"

namespace {

using namespace qkvjit;
using fake::CacheFolder;
using fake::spec_of;
namespace fs = std::filesystem;

/// A running probe; its output is read at wait().
class Probe {
 public:
  explicit Probe(std::vector<std::string> arguments) {
    std::array<int, 2> ends{};
    REQUIRE(pipe2(ends.data(), O_CLOEXEC) == 0);
    arguments.insert(arguments.begin(), QKVJIT_DISK_PROBE);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    process_ = fork();
    REQUIRE(process_ >= 0);
    if (process_ == 0) {
      dup2(ends[1], STDOUT_FILENO);
      execv(pointers[0], pointers.data());
      _exit(127);
    }
    close(ends[1]);
    output_ = fdopen(ends[0], "r");
  }
  ~Probe() {
    if (process_ > 0) stop();
    std::fclose(output_);
  }
  Probe(const Probe&) = delete;  // owns the process
  Probe& operator=(const Probe&) = delete;

  std::string line() {
    std::array<char, 256> text{};
    return std::fgets(text.data(), text.size(), output_) == nullptr ? std::string() : text.data();
  }
  /// The status that waitpid tells.
  int wait() {
    int status = -1;
    waitpid(std::exchange(process_, -1), &status, 0);
    return status;
  }
  int stop() {
    kill(process_, SIGKILL);
    return wait();
  }

 private:
  pid_t process_ = -1;
  std::FILE* output_ = nullptr;
};

/// The numbers in "compiles 1 hits 0 …" of a probe that ends well.
struct Told {
  int compiles = 0, hits = 0, stores = 0, errors = 0, rejected = 0;
};
Told told_by(Probe& probe) {
  Told told;
  const std::string line = probe.line();
  const int read = std::sscanf(line.c_str(), "compiles %d hits %d stores %d errors %d rejected %d", &told.compiles,
                               &told.hits, &told.stores, &told.errors, &told.rejected);
  CHECK_MESSAGE(read == 5, line);
  CHECK(probe.wait() == 0);
  return told;
}

std::vector<std::unique_ptr<Probe>> start(int count, const std::vector<std::string>& arguments) {
  std::vector<std::unique_ptr<Probe>> probes;
  for (int i = 0; i < count; ++i) probes.push_back(std::make_unique<Probe>(arguments));
  return probes;
}

/// Compiles what the probes do, here.
CacheStats compile_here(const CacheFolder& folder, std::chrono::milliseconds lock_timeout = std::chrono::seconds(30)) {
  KernelCache cache({.directory = folder.path(), .lock_timeout = lock_timeout}, fake::nvrtc());
  const auto kernel = cache.compile(spec_of(64));
  CHECK(has(kernel->ptx, kernel->lowered_name));
  return cache.stats();
}

}  // namespace

TEST_SUITE("disk_process") {
  TEST_CASE("16 processes on an empty folder: one compile, 15 hits, no error") {
    const CacheFolder base;
    const std::string folder = base.path() / "not/yet/there";
    Told all;
    for (const auto& probe : start(16, {"compile", folder, "300"})) {
      const Told told = told_by(*probe);
      all.compiles += told.compiles;
      all.hits += told.hits;
      all.errors += told.errors;
      all.rejected += told.rejected;
    }
    CHECK(all.compiles == 1);
    CHECK(all.hits == 15);
    CHECK(all.errors == 0);
    CHECK(all.rejected == 0);
  }

  TEST_CASE("a writer killed at any call: nothing damaged is seen, the next process compiles and stores") {
    int survivor = 0;
    for (int step = 1; survivor == 0; ++step) {
      REQUIRE(step < 100);
      CAPTURE(step);
      fake::begin();
      const CacheFolder folder;
      Probe probe({"die", folder.path(), std::to_string(step)});
      const int status = probe.wait();
      if (!WIFSIGNALED(status)) {
        CHECK(status == 0);
        survivor = step;
      }
      const bool is_stored = fs::exists(folder.entry(ArtifactKey::of(spec_of(64), *fake::nvrtc())));
      const CacheStats stats = compile_here(folder);
      CHECK(stats.disk.rejected == 0);
      CHECK(stats.disk.errors == 0);
      CHECK(stats.disk.lock_timeouts == 0);
      CHECK(stats.compiles == (is_stored ? 0 : 1));
      CHECK(compile_here(folder).disk.hits == 1);
      // What it left is swept when it is old.
      for (const std::string& file : folder.files()) {
        if (file.ends_with(".tmp")) fake::set_age(folder.path() / file, std::chrono::hours(1));
      }
      DiskCache(folder.options()).trim(1 << 30);
      for (const std::string& file : folder.files()) CHECK_FALSE(file.ends_with(".tmp"));
    }
    CHECK(survivor > 10);  // it died in the middle of writing, too
  }

  TEST_CASE("the lock of a killed process stalls nobody") {
    fake::begin();
    const CacheFolder folder;
    Probe holder({"hold", folder.path(), "8"});
    REQUIRE(holder.line() == "held\n");
    CHECK(compile_here(folder, std::chrono::milliseconds(50)).disk.lock_timeouts == 1);
    fs::remove(folder.entry(ArtifactKey::of(spec_of(64), *fake::nvrtc())));
    CHECK(WIFSIGNALED(holder.stop()));
    const Stopwatch watch;
    const CacheStats stats = compile_here(folder);
    CHECK(stats.compiles == 1);
    CHECK(stats.disk.lock_timeouts == 0);
    CHECK(watch.milliseconds() < 5000);
  }

  TEST_CASE("a lock held too long: wait for the deadline, then compile; other kernels do not wait") {
    fake::begin();
    const CacheFolder folder;
    Probe holder({"hold", folder.path(), "8"});
    REQUIRE(holder.line() == "held\n");
    const Stopwatch watch;
    const CacheStats stats = compile_here(folder, std::chrono::milliseconds(300));
    CHECK(stats.compiles == 1);
    CHECK(stats.disk.stores == 1);
    CHECK(stats.disk.lock_timeouts == 1);
    CHECK(stats.disk.lock_wait_ms >= 299);
    CHECK(watch.milliseconds() < 5000);
    CHECK(compile_here(folder).disk.hits == 1);  // asks for no lock
    KernelCache cache({.directory = folder.path()}, fake::nvrtc());
    CHECK(cache.compile(spec_of(72)) != nullptr);
    CHECK(cache.stats().disk.lock_timeouts == 0);
    CHECK(cache.stats().disk.lock_wait_ms < 5000);
  }

  TEST_CASE("one budget for all processes") {
    fake::begin();
    const CacheFolder folder;
    compile_here(folder);
    const std::uint64_t budget = 10 * fs::file_size(folder.entry(ArtifactKey::of(spec_of(64), *fake::nvrtc())));
    std::vector<std::unique_ptr<Probe>> probes;
    for (int i = 0; i < 4; ++i) {
      probes.push_back(std::make_unique<Probe>(
          std::vector<std::string>{"fill", folder.path(), std::to_string(100 + 20 * i), std::to_string(budget)}));
    }
    for (const auto& probe : probes) {
      const Told told = told_by(*probe);
      CHECK(told.compiles == 20);
      CHECK(told.stores == 20);
      CHECK(told.errors == 0);
    }
    DiskCache cache(folder.options());
    std::uint64_t total = 0;
    for (const DiskCache::Entry& entry : cache.list()) total += entry.bytes;
    CHECK(total <= budget);
    CHECK(total > budget / 2);  // and not everything was thrown away
    CHECK(cache.verify().bad.empty());
  }

  TEST_CASE("a limit on the size of files does not end the process") {
    const CacheFolder folder;
    Probe probe({"limited", folder.path(), "500"});
    const Told told = told_by(probe);
    CHECK(told.compiles == 1);
    CHECK(told.stores == 0);
    CHECK(told.errors == 1);
  }

  TEST_CASE("a folder that is read-only for its owner: kernels are found, new ones are compiled") {
    fake::begin();
    constexpr uid_t kNobody = 65534;
    const CacheFolder base;
    const fs::path folder = base.path() / "cache";
    const bool is_root = geteuid() == 0;
    const auto hand_over = [&](mode_t mode) {
      for (const fs::path& path : {base.path(), folder}) {
        if (is_root) REQUIRE(chown(path.c_str(), kNobody, kNobody) == 0);
      }
      REQUIRE(chmod(folder.c_str(), mode) == 0);
    };
    fs::create_directory(folder);
    hand_over(0500);
    {
      Probe probe({"as_user", folder, std::to_string(kNobody)});
      const Told told = told_by(probe);
      CHECK(told.compiles == 1);
      CHECK(told.stores == 0);
      CHECK(told.errors == 1);
    }
    hand_over(0700);
    {
      Probe probe({"as_user", folder, std::to_string(kNobody)});
      CHECK(told_by(probe).stores == 1);
    }
    hand_over(0500);
    Probe probe({"as_user", folder, std::to_string(kNobody)});
    const Told told = told_by(probe);
    CHECK(told.hits == 1);
    CHECK(told.compiles == 0);
  }
}
