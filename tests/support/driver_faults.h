// SPDX-License-Identifier: Apache-2.0
// A scenario run once whole and then once for every driver call in it, that call failing: the exception must be the
// right one, nothing may leak, and the thread must find its contexts and its capture mode as it left them.
#pragma once

#include <doctest/doctest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "support/fake_driver.h"
#include "support/fake_nvrtc.h"

namespace fake {

/// Calls that give something back: there is nobody to throw to, and what they did not give back stays.
inline bool gives_back(const std::string& function, int nth) {
  static const std::set<std::string> kFunctions{"cuCtxPopCurrent", "cuModuleUnload", "cuEventDestroy", "cuMemFreeAsync",
                                                "cuDevicePrimaryCtxRelease"};
  // A scope's second exchange gives the thread's own mode back.
  return kFunctions.contains(function) || (function == "cuThreadExchangeStreamCaptureMode" && nth % 2 == 0);
}

/// `scenario(begin_teardown)` builds, works, calls begin_teardown() and destroys all it built, on one thread. `base` is
/// the stack of contexts that the thread has: none, or one of GPU 1's.
template <typename Scenario>
void fail_each_call(bool bound_to_other_gpu, Scenario scenario) {
  std::vector<CUcontext> base;
  const auto begin = [&] {
    reset({Gpu{}, Gpu{.name = "Fake RTX 4090", .sm_major = 8, .sm_minor = 9}});
    reset_nvrtc();
    if (bound_to_other_gpu) push_context(make_context(1));
    base = context_stack();
  };
  begin();
  std::size_t work_calls = 0;
  scenario([&] { work_calls = call_log().size(); });
  const std::vector<std::string> log = call_log();
  REQUIRE(work_calls > 0);
  REQUIRE(misuses().empty());
  REQUIRE(alive() == Alive{});
  REQUIRE(context_stack() == base);

  std::map<std::string, int> seen;
  int struck = 0;
  for (std::size_t i = 0; i < log.size(); ++i) {
    const int nth = ++seen[log[i]];
    CAPTURE(log[i]);
    CAPTURE(nth);
    begin();
    fail(log[i], nth, CUDA_ERROR_UNKNOWN);
    bool threw = false;
    try {
      scenario([] {});
    } catch (const qkvjit::DriverError& error) {
      threw = true;
      CHECK(error.code() == CUDA_ERROR_UNKNOWN);
      CHECK(std::string(error.what()).find(log[i]) != std::string::npos);
      CHECK(std::string(error.what()).find("CUDA_ERROR_UNKNOWN (999)") != std::string::npos);
    }
    CHECK(clear_faults());
    CHECK(misuses().empty());
    const bool must_throw = i < work_calls && !gives_back(log[i], nth);
    CHECK(threw == must_throw);
    if (must_throw) {
      CHECK(alive() == Alive{});
      CHECK(context_stack() == base);
      CHECK(capture_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL);
    }
    CHECK(nvrtc_programs == 0);
    ++struck;
  }
  MESSAGE("driver calls made to fail, one at a time: " << struck);
}

}  // namespace fake
