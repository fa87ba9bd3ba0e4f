// SPDX-License-Identifier: Apache-2.0
// An NVRTC that answers at once, for tests of what surrounds a compile: the "PTX" and "cubin" hold little more than
// the kernel's name, which is all that the fake driver looks for. Counters are the process's; safe from any thread.
#pragma once

#include <elf.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/nvrtc.h"

namespace fake {

inline std::atomic<int> nvrtc_compiles{0};
inline std::atomic<int> nvrtc_programs{0};      ///< created and not destroyed
inline std::atomic<int> nvrtc_failures{0};      ///< so many of the next compiles fail
inline std::atomic<int> nvrtc_milliseconds{0};  ///< what a compile takes
inline std::atomic<int> nvrtc_at_once{0};       ///< compiles that run now
inline std::atomic<int> nvrtc_most_at_once{0};

inline constexpr const char* kFailureLog = "qkv_fake.cu(7): error: identifier \"nonsense\" is undefined";
inline std::atomic<const char*> nvrtc_failure_log{kFailureLog};  ///< what a compile that fails says

inline void reset_nvrtc() {
  nvrtc_failure_log = kFailureLog;
  nvrtc_compiles = nvrtc_failures = nvrtc_milliseconds = nvrtc_at_once = nvrtc_most_at_once = 0;
}

namespace detail {

struct Program {
  std::string lowered, ptx, cubin, log;
};
inline Program& of(nvrtcProgram handle) { return *reinterpret_cast<Program*>(handle); }

inline nvrtcResult create(nvrtcProgram* handle, const char*, const char*, int, const char* const*, const char* const*) {
  ++nvrtc_programs;
  *handle = reinterpret_cast<nvrtcProgram>(new Program);
  return NVRTC_SUCCESS;
}
inline nvrtcResult destroy(nvrtcProgram* handle) {
  --nvrtc_programs;
  delete &of(*handle);
  *handle = nullptr;
  return NVRTC_SUCCESS;
}
inline nvrtcResult add_expression(nvrtcProgram handle, const char* expression) {
  of(handle).lowered =
      "_Zkernel" +
      std::string(std::string_view(expression).find("qkv_prefill") != std::string_view::npos ? "qkv_prefill" : "") +
      std::to_string(std::hash<std::string>{}(expression));
  return NVRTC_SUCCESS;
}
inline nvrtcResult compile(nvrtcProgram handle, int, const char* const*) {
  ++nvrtc_compiles;
  const int now = ++nvrtc_at_once;
  for (int most = nvrtc_most_at_once; now > most && !nvrtc_most_at_once.compare_exchange_weak(most, now);) {
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(nvrtc_milliseconds));
  --nvrtc_at_once;
  Program& program = of(handle);
  for (int left = nvrtc_failures; left > 0;) {
    if (!nvrtc_failures.compare_exchange_weak(left, left - 1)) continue;
    program.log = nvrtc_failure_log;
    return NVRTC_ERROR_COMPILATION;
  }
  program.log =
      "ptxas info    : 0 bytes gmem\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 40 registers, used 1 barriers";
  program.ptx = ".version 9.0\n.target sm_90\n.visible .entry " + program.lowered + "()\n";
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_shoff = sizeof(header) + program.lowered.size();
  program.cubin.assign(reinterpret_cast<const char*>(&header), sizeof(header));
  program.cubin += program.lowered;
  return NVRTC_SUCCESS;
}
inline nvrtcResult lowered_name(nvrtcProgram handle, const char*, const char** name) {
  *name = of(handle).lowered.c_str();
  return NVRTC_SUCCESS;
}
template <std::string Program::*kMember, std::size_t kExtra>
nvrtcResult size(nvrtcProgram handle, std::size_t* bytes) {
  *bytes = (of(handle).*kMember).size() + kExtra;
  return NVRTC_SUCCESS;
}
template <std::string Program::*kMember, std::size_t kExtra>
nvrtcResult copy(nvrtcProgram handle, char* out) {
  std::memcpy(out, (of(handle).*kMember).c_str(), (of(handle).*kMember).size() + kExtra);
  return NVRTC_SUCCESS;
}

}  // namespace detail

inline std::shared_ptr<qkvjit::NvrtcTable> nvrtc(std::vector<unsigned> targets = {80, 86, 89, 90, 100, 120}) {
  auto t = std::make_shared<qkvjit::NvrtcTable>();
  t->nvrtcVersion = [](int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
  };
  t->nvrtcGetErrorString = [](nvrtcResult code) {
    return code == NVRTC_ERROR_COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
  };
  t->nvrtcCreateProgram = detail::create;
  t->nvrtcDestroyProgram = detail::destroy;
  t->nvrtcAddNameExpression = detail::add_expression;
  t->nvrtcCompileProgram = detail::compile;
  t->nvrtcGetLoweredName = detail::lowered_name;
  t->nvrtcGetPTXSize = detail::size<&detail::Program::ptx, 1>;
  t->nvrtcGetPTX = detail::copy<&detail::Program::ptx, 1>;
  t->nvrtcGetCUBINSize = detail::size<&detail::Program::cubin, 0>;
  t->nvrtcGetCUBIN = detail::copy<&detail::Program::cubin, 0>;
  t->nvrtcGetProgramLogSize = detail::size<&detail::Program::log, 1>;
  t->nvrtcGetProgramLog = detail::copy<&detail::Program::log, 1>;
  t->major = 13;
  t->minor = 0;
  t->path = "a fake libnvrtc.so.13";
  t->build = "13.0.1";
  t->targets = std::move(targets);
  return t;
}

}  // namespace fake
