// SPDX-License-Identifier: Apache-2.0
// What KernelCache::prepare() and prepare_async() take and give: kernels for whole problems, made before the first
// launch needs them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "qkvjit/specialization.h"

namespace qkvjit {

class TuningTable;  // qkvjit/tuning_table.h

enum class PreparePhase : std::uint8_t {
  compile,  ///< begins; not for a kernel that is compiled already
  load,     ///< begins
  ready,    ///< the kernel can be launched
  failed,   ///< it cannot; the others go on
};
const char* to_string(PreparePhase phase) noexcept;

struct PrepareProgress {
  PreparePhase phase = PreparePhase::compile;
  Specialization spec;
  std::string kernel;     ///< "qkv_decode m16n64_w1x1x8_s4_b2 sm_90"
  double elapsed_ms = 0;  ///< since the call began
  std::size_t done = 0;   ///< kernels that are ready or failed, this one included
  std::size_t total = 0;
};

struct PrepareOptions {
  unsigned threads = 0;  ///< 0: as many as the machine has
  /// Largest M that will be launched; rows beyond it are not prepared. As PlanOptions::max_m.
  std::uint64_t max_m = ~std::uint64_t{0};
  /// Kernels for plans with this value of PlanOptions::weights_are_constant alone; qkv_project_int4 makes no such
  /// promise. Left out, those for both.
  std::optional<bool> weights_are_constant = {};
  /// Rows of this table as well as the built-in ones, or null. Read by the call itself: it need not live longer.
  const TuningTable* tuning = nullptr;
  /// Called by the threads that work, several at once, with no lock held; may call the cache, but not destroy it. What
  /// it throws is logged and dropped.
  std::function<void(const PrepareProgress&)> progress = {};
};

struct PrepareReport {
  std::size_t kernels = 0;         ///< that the problems need, each counted once
  std::size_t already_loaded = 0;  ///< of those
  std::size_t skipped = 0;         ///< left out after a cancel
  bool cancelled = false;
  double elapsed_ms = 0;
};

/// The work that prepare_async() began. A handle: copies are of the same work, and letting go of all of them neither
/// waits nor stops it. It may outlive the cache.
class PrepareTask {
 public:
  /// Waits until the work has ended. Throws what prepare() throws.
  PrepareReport get() const;
  /// Waits at most so long; whether the work has ended. Throws ForkedProcess, as get() does, for there it never will.
  [[nodiscard]] bool wait_for(std::chrono::milliseconds timeout) const;
  [[nodiscard]] bool is_done() const { return wait_for(std::chrono::milliseconds(0)); }
  /// Kernels not begun yet are left out. Does not wait: a compile that runs runs to its end.
  void cancel() const noexcept;

  struct State;
  explicit PrepareTask(std::shared_ptr<State> state) noexcept : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};

}  // namespace qkvjit
