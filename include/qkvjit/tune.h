// SPDX-License-Identifier: Apache-2.0
// tune(): times every tile that can serve a problem on the GPU present, M by M, and keeps the fastest as a TuningTable
// for PlanOptions::tuning. A call for tools and installation, not for serving: it compiles every candidate, waits for
// the GPU, allocates device memory where none is lent, and takes seconds to minutes.
//
//   TuningTable table = tune(cache, context, problem, {.ms = {1, 16, 512}});
//   table.save("h200.tuning.json");
//   QkvPlan plan(cache, context, problem, {.tuning = &table});
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "qkvjit/kernel_cache.h"
#include "qkvjit/qkv_problem.h"
#include "qkvjit/select.h"
#include "qkvjit/tuning_table.h"

namespace qkvjit {

/// The token counts that tune() takes where it is given none: 1 to 8192, the denser the smaller.
const std::vector<std::uint64_t>& default_tuning_sweep();

/// The times of one candidate at one M: microseconds a launch, over the batches.
struct TunedTimes {
  SelectedRow candidate;
  double median_us = 0, min_us = 0, max_us = 0;
};

/// What was found at one M, in the fixed order of candidate_specializations(); those that were no match from the first
/// launch are left out.
struct TuneProgress {
  std::uint64_t m = 0;
  bool weights_are_constant = false;
  std::span<const TunedTimes> times;
  std::size_t winner = 0;  ///< index into `times`
};

struct TuneOptions {
  /// Token counts, in any order; empty: default_tuning_sweep(). Each makes a row that serves every M down to the one
  /// before, so list the small ones too, or they are served by a tile for many tokens.
  std::vector<std::uint64_t> ms{};
  /// With the promise (dependent and ordinary launches) or without it (ordinary ones alone); not set: both, apart.
  std::optional<bool> weights_are_constant{};
  /// Device memory lent for operands, at least tune_memory_bytes(), 16-byte aligned; overwritten, and used on a stream
  /// of tune()'s own, so nothing queued may still use it. Null: allocated and freed (DeviceBuffer).
  void* memory = nullptr;
  std::size_t memory_bytes = 0;
  unsigned batches = 7;  ///< timed replays of each candidate's graph, in shuffled order; the median counts
  /// Rest before the warm replay and before the timed one where there are more than 64 tokens: such work is limited by
  /// power, and the candidate measured before must not count.
  unsigned rest_ms = 15;
  /// Called after each M; false ends tune() with what there is.
  std::function<bool(const TuneProgress&)> progress{};
};

/// Bytes of operands that tune() uses for `problem` on `info`'s GPU: x and the outputs of the largest M, and weights
/// and scales as often as it takes to exceed its L2 cache fourfold (2 to 256 times), so that launches in turn find none
/// of theirs there. Throws InvalidProblem.
std::size_t tune_memory_bytes(const QkvProblem& problem, const DeviceInfo& info, const TuneOptions& options = {});

/// Which of `times` to keep: the one with the smallest median or, where others are as good as that, the first of them.
/// As good is a median within 1 %, or each one's median within the other's range. So noise does not decide between
/// equals. `times` must not be empty.
std::size_t tuning_winner(std::span<const TunedTimes> times);

/// Tunes `problem` on the context's GPU. Results are not verified: that is what the test suites do.
/// Throws InvalidProblem, UnsupportedDevice, and what KernelCache::get() and a launch throw.
TuningTable tune(KernelCache& cache, const DeviceContext& context, const QkvProblem& problem,
                 const TuneOptions& options = {});

}  // namespace qkvjit
