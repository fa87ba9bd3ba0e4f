// SPDX-License-Identifier: Apache-2.0
// A process with a disk cache and a fake NVRTC, for tests that need several, or one that dies. Its arguments say what
// it does; it prints what the test compares.
#define DOCTEST_CONFIG_DISABLE  // of the fixture only the specialisations are used
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

#include "cache/disk_cache.h"
#include "support/cache_fixture.h"
#include "support/file.h"

namespace {

using namespace qkvjit;

int steps_to_live = 0;

void step() {
  if (--steps_to_live == 0) kill(getpid(), SIGKILL);
}

/// Dies before the nth call of those that write a file; each write takes half of what is left.
void die_at(int nth) {
  steps_to_live = nth;
  file_calls.create = [](int directory, const char* name, int flags, mode_t mode) {
    step();
    return FileCalls{}.create(directory, name, flags, mode);
  };
  file_calls.write = [](int descriptor, const void* bytes, std::size_t size) {
    step();
    return ::write(descriptor, bytes, size > 100 ? size / 2 : size);
  };
  file_calls.fsync = [](int descriptor) {
    step();
    return ::fsync(descriptor);
  };
  file_calls.close = [](int descriptor) {
    step();
    return ::close(descriptor);
  };
  file_calls.rename = [](int from_directory, const char* from, int to_directory, const char* to) {
    step();
    return ::renameat(from_directory, from, to_directory, to);
  };
}

void compile_and_tell(const CacheOptions& options, unsigned first, unsigned count) {
  KernelCache cache(options, fake::nvrtc());
  for (unsigned n = first; n < first + count; ++n) cache.compile(fake::spec_of(8 * n));
  const CacheStats stats = cache.stats();
  std::printf("compiles %d hits %d stores %d errors %d rejected %d\n", static_cast<int>(stats.compiles),
              static_cast<int>(stats.disk.hits), static_cast<int>(stats.disk.stores),
              static_cast<int>(stats.disk.errors), static_cast<int>(stats.disk.rejected));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const std::string_view how = argv[1];
  CacheOptions options{.directory = argv[2]};
  const unsigned number = static_cast<unsigned>(std::atoi(argv[3]));
  if (how == "compile") {  // a kernel that takes `number` ms
    fake::nvrtc_milliseconds = static_cast<int>(number);
    compile_and_tell(options, 8, 1);
  } else if (how == "die") {
    die_at(static_cast<int>(number));
    compile_and_tell(options, 8, 1);
  } else if (how == "fill") {  // from `number` on, within a budget
    options.max_disk_bytes = static_cast<std::uint64_t>(std::atoll(argv[4]));
    compile_and_tell(options, number, 20);
  } else if (how == "limited") {  // no file beyond `number` bytes
    const rlimit limit{number, number};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 3;
    compile_and_tell(options, 8, 1);
  } else if (how == "as_user") {
    if (geteuid() == 0 && setuid(number) != 0) return 3;
    compile_and_tell(options, 8, 1);
  } else if (how == "hold") {  // the lock of spec_of(8 * number), until it is killed
    DiskCache cache({argv[2], 0, std::chrono::seconds(10)});
    const KeyLock lock = cache.lock(ArtifactKey::of(fake::spec_of(8 * number), *fake::nvrtc()));
    std::printf("%s\n", lock.state() == LockState::held ? "held" : "not held");
    std::fflush(stdout);
    std::this_thread::sleep_for(std::chrono::minutes(1));
  } else {
    return 2;
  }
  return 0;
}
