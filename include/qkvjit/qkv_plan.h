// SPDX-License-Identifier: Apache-2.0
// QkvPlan: a problem bound to a cache and a context once, then launched many times. The launch does shape
// arithmetic and cuLaunchKernelEx; no lock, hash, allocation, environment read or driver query. A plan may be
// launched from many threads at once. Keep it alive as long as any CUDA graph that captured its launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "qkvjit/kernel_cache.h"
#include "qkvjit/prepack.h"
#include "qkvjit/qkv_problem.h"

namespace qkvjit {

class TuningTable;  // qkvjit/tuning_table.h

enum class Binding : std::uint8_t {
  eager,  ///< the constructor compiles and loads every row, the unaligned ones included
  lazy,   ///< a row is compiled and loaded when a launch first needs it
};

struct PlanOptions {
  Binding binding = Binding::eager;
  /// Largest M that will be launched; rows beyond it are not bound. A larger M is refused.
  std::uint64_t max_m = ~std::uint64_t{0};
  /// A promise: no kernel ahead of a launch in its stream writes the weights or scales that the launch reads. Launches
  /// are then dependent ones (programmatic dependent launch, sm_90 and newer): they start while the kernel ahead still
  /// runs, fetch weights, and wait for it before they touch x or the outputs. Without it a launch starts when the
  /// kernel ahead has finished. After prepack() the next launch waits for it all the same.
  bool weights_are_constant = false;
  /// What tune() found, or null. Read by the constructor alone, which takes its rows over: it need not live longer.
  /// A table of other hardware, or without this problem, changes nothing (select_rows()).
  const TuningTable* tuning = nullptr;
};

/// Streams other than the launch stream that made the inputs or use the outputs: an event join before and
/// after. Null means the launch stream; to name the legacy default stream pass CU_STREAM_LEGACY.
struct LaunchOptions {
  CUstream producer = nullptr;
  CUstream consumer = nullptr;
};

class QkvPlan {
 public:
  /// Throws what validate(), KernelCache::get() and select_rows() throw.
  QkvPlan(KernelCache& cache, const DeviceContext& context, const QkvProblem& problem, const PlanOptions& options = {});
  ~QkvPlan();
  QkvPlan(QkvPlan&&) noexcept;
  QkvPlan& operator=(QkvPlan&&) noexcept;

  /// Launches on `stream`; stream-ordered, never synchronises, allocates or sets memory. M = 0 launches nothing.
  /// Throws InvalidProblem or DeviceMismatch before anything is launched, DriverError from the launch, and
  /// CaptureWouldLoad where a lazily bound row is missing while `stream` captures.
  void operator()(const QkvTensors& tensors, CUstream stream, const LaunchOptions& options = {}) const;

  /// The same with weights that prepack() made; `tensors`'s own are not looked at. The problem's layout must be
  /// prepacked. Throws what with_packed_weights() throws as well.
  void operator()(const PackedWeights& packed, const QkvTensors& tensors, CUstream stream,
                  const LaunchOptions& options = {}) const;

  /// Binds every row now.
  void prepare();

  /// Bytes of scratch that a launch of up to `max_m` tokens may use; no row uses any today.
  [[nodiscard]] std::size_t workspace_bytes(std::uint64_t max_m) const noexcept;

  [[nodiscard]] const QkvProblem& problem() const noexcept;
  /// The row that serves `m` tokens.
  [[nodiscard]] const Specialization& row(std::uint64_t m, bool aligned = true) const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

/// One pre-built launch of a kernel of any tile: used by tests and benches to run tiles that selection does not pick.
/// Throws as QkvPlan does.
/// `weights_are_constant` is PlanOptions's promise.
void launch_kernel(const Kernel& kernel, const DeviceContext& context, const QkvTensors& tensors, CUstream stream,
                   bool weights_are_constant = false);

}  // namespace qkvjit
