// SPDX-License-Identifier: Apache-2.0
// The GPU suites' entry: with no usable GPU it says so and ends with exit code 77, which ctest shows as "skipped".
// QKVJIT_REQUIRE_GPU=1 makes that a failure, for machines that are meant to have one.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "qkvjit/device_context.h"
#include "qkvjit/error.h"

namespace {

constexpr int kSkipped = 77;

/// Null where device 0 can be used, else the reason.
std::string reason_to_skip() {
  try {
    const qkvjit::DeviceContext context(0);
    const qkvjit::DeviceInfo& info = context.info();
    std::printf("GPU 0: %s, sm_%u, driver %d.%d\n", info.name.c_str(), info.sm(), info.driver_version / 1000,
                info.driver_version % 1000 / 10);
    return {};
  } catch (const qkvjit::LibraryUnavailable& error) {
    return error.what();
  } catch (const qkvjit::UnsupportedDevice& error) {
    return error.what();
  }
}

}  // namespace

int main(int argc, char** argv) {
  setenv("QKVJIT_CACHE_DIR", "", 1);  // these kernels are compiled, whatever lies on this machine's disk
  doctest::Context doctest_context(argc, argv);
  const char* required = std::getenv("QKVJIT_REQUIRE_GPU");
  for (int i = 1; i < argc; ++i) {
    // Listing needs no GPU.
    if (std::strncmp(argv[i], "--list", 6) == 0 || std::strncmp(argv[i], "--count", 7) == 0)
      return doctest_context.run();
  }
  if (const std::string reason = reason_to_skip(); !reason.empty()) {
    const bool fail = required != nullptr && std::strcmp(required, "0") != 0;
    std::printf("*** %s THE GPU SUITES: %s\n", fail ? "CANNOT RUN" : "SKIPPED", reason.c_str());
    return fail ? EXIT_FAILURE : kSkipped;
  }
  return doctest_context.run();
}
