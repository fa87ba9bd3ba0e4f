// SPDX-License-Identifier: Apache-2.0
// How processes with caches end and fork, in a process of their own: silently, with code 0, never hanging. And what
// a profiler that such a process is told of sees.
#include <doctest/doctest.h>

#include <array>
#include <cstdio>
#include <string>

#include "support/messages.h"

namespace {

struct Ended {
  int status = -1;
  std::string output;  // both streams
};

/// `environment` is put before the command: "NAME=VALUE ".
Ended run_probe(const std::string& how, const std::string& environment = {}) {
  const std::string command = environment + "timeout 60 " QKVJIT_EXIT_PROBE " " + how + " 2>&1";
  std::FILE* const pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  Ended ended;
  std::array<char, 4096> buffer;
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) ended.output += buffer.data();
  ended.status = pclose(pipe);
  return ended;
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_SUITE("cache_exit") {
  TEST_CASE("static, thread-local and leaked caches end in silence, also busy ones and after the driver") {
    for (const char* how : {"static", "static_busy", "static_driver_gone", "thread_local", "leaked", "leaked_busy"}) {
      const Ended ended = run_probe(how);
      CHECK_MESSAGE(ended.status == 0, how);
      CHECK_MESSAGE(ended.output.empty(), how << ": " << ended.output);
    }
  }

  TEST_CASE("a child of a process that used CUDA gets ForkedProcess from everything, and does not hang") {
    const Ended idle = run_probe("fork");
    CHECK(idle.status == 0);
    CHECK(idle.output ==
          "get: ForkedProcess\nfind: ForkedProcess\ncompile: ForkedProcess\nstats: ForkedProcess\n"
          "prepare: ForkedProcess\ncontext: ForkedProcess\nstream: ForkedProcess\nown compile\n");
    const Ended busy = run_probe("fork_busy");  // threads of the parent are compiling
    CHECK(busy.status == 0);
    CHECK(has(busy.output, "task: ForkedProcess\nown compile\n"));
    CHECK(count_of(busy.output, "ForkedProcess") == 8);
    CHECK(count_of(busy.output, "\n") == 9);
  }

  TEST_CASE("a fork before the driver is first used leaves the child all it needs") {
    const Ended ended = run_probe("fork_before");
    CHECK(ended.status == 0);
    CHECK(ended.output == "child ready\n");
  }

  TEST_CASE("a profiler sees a range around each compile and each load") {
    const Ended ended = run_probe("static", "NVTX_INJECTION64_PATH=" QKVJIT_FAKE_PROFILER " ");
    CHECK(ended.status == 0);
    const std::size_t compiles = count_of(ended.output, "begin compile qkv_");
    CHECK(count_of(ended.output, "domain qkvjit\n") == 1);
    CHECK(compiles > 3);
    CHECK(count_of(ended.output, "begin load qkv_") == compiles);
    CHECK(count_of(ended.output, "end\n") == 2 * compiles);
    CHECK(has(ended.output, " sm_90"));
  }
}
