// SPDX-License-Identifier: Apache-2.0
// What tests of KernelCache share: a fresh fake driver and NVRTC, small specialisations, many threads at once.
#pragma once

#include <doctest/doctest.h>

#include <barrier>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "qkvjit/error.h"
#include "qkvjit/kernel_cache.h"
#include "support/fake_driver.h"
#include "support/fake_nvrtc.h"
#include "support/messages.h"

namespace fake {

inline constexpr int kThreads = 32;

inline qkvjit::Specialization spec_of(unsigned n = 64, unsigned sm = 90) {
  qkvjit::Specialization spec;
  spec.pipeline = qkvjit::Pipeline::simple;
  spec.n_q = n;
  spec.n_k = 8;
  spec.n_v = 24;
  spec.k = 128;
  spec.tile = {.block_m = 8, .block_n = 32, .warps_m = 8};
  spec.target.sm = sm;
  return spec;
}

inline void begin(std::vector<Gpu> gpus = {Gpu{}}) {
  reset(std::move(gpus));
  reset_nvrtc();
}

inline void check_clean() {
  CHECK(alive() == Alive{});
  CHECK(misuses().empty());
  CHECK(context_stack().empty());
  CHECK(nvrtc_programs == 0);
}

/// What one of many threads got.
struct Outcome {
  std::shared_ptr<const qkvjit::Kernel> kernel;
  std::string error;
};

/// All threads call work(index) at the same moment.
template <typename Work>
std::vector<Outcome> race(int threads, Work work) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(threads));
  std::barrier start(threads);
  std::vector<std::jthread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&, i] {
      start.arrive_and_wait();
      Outcome& outcome = outcomes[static_cast<std::size_t>(i)];
      try {
        outcome.kernel = work(i);
      } catch (const qkvjit::Error& error) {
        outcome.error = error.what();
      }
      // Workers are as the caller's own threads: they keep their (empty) stack.
      if (!context_stack().empty()) outcome.error += "left a context behind";
    });
  }
  running.clear();
  return outcomes;
}

}  // namespace fake
