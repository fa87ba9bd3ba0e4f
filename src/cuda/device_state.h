// SPDX-License-Identifier: Apache-2.0
// What a DeviceContext shares with the kernels, plans and buffers made from it: the driver table, the retained
// primary context, plain facts and a pool of events. Held by shared_ptr; whoever lets go last releases the
// primary context. Thread-safe. Beside it the guards that every entry point uses: ContextScope, RelaxedCapture.
// Destructors here never throw, and a driver that is already gone is met with silence.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "cuda/fork_guard.h"
#include "qkvjit/device_context.h"

namespace qkvjit {

struct DeviceState {
  DeviceState() = default;
  ~DeviceState();
  DeviceState(const DeviceState&) = delete;  // owns one retain of the primary context
  DeviceState& operator=(const DeviceState&) = delete;

  std::shared_ptr<const DriverTable> driver;
  CUdevice device = 0;
  CUcontext context = nullptr;  ///< null until retained
  DeviceInfo info;
  std::uint64_t id = 0;  ///< unique in the process, never reused: a key for caches, where an address would not do

  /// Makes `to` wait for all work queued on `from`. Does nothing where they are equal. The context must be current.
  /// Throws DriverError.
  void join(CUstream from, CUstream to);

 private:
  CUevent take_event();
  std::mutex events_mutex_;
  std::vector<CUevent> free_events_;  ///< without timing; a wait keeps what was recorded, so reuse at once is safe
};

/// Makes the state's context current and gives the caller's back, also when unwinding. Costs one query where the
/// context is current already. `state` must outlive the scope.
class ContextScope {
 public:
  /// Throws DriverError and ForkedProcess.
  explicit ContextScope(const DeviceState& state) : driver_(*state.driver) {
    if (is_forked_child()) throw_forked_process("qkvjit");
    check(driver_, enter(state.context), "cuCtxGetCurrent and cuCtxPushCurrent of the device's primary context");
  }
  /// For destructors: see entered().
  ContextScope(const DeviceState& state, std::nothrow_t) noexcept : driver_(*state.driver) {
    entered_ = !is_forked_child() && enter(state.context) == CUDA_SUCCESS;
  }
  ~ContextScope() {
    CUcontext ours = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent(&ours);
  }
  ContextScope(const ContextScope&) = delete;  // bound to its block and thread
  ContextScope& operator=(const ContextScope&) = delete;

  [[nodiscard]] bool entered() const noexcept { return entered_; }

 private:
  CUresult enter(CUcontext context) noexcept {
    CUcontext current = nullptr;
    const CUresult code = driver_.cuCtxGetCurrent(&current);
    if (code != CUDA_SUCCESS || current == context) return code;
    const CUresult push_code = driver_.cuCtxPushCurrent(context);
    pushed_ = push_code == CUDA_SUCCESS;
    return push_code;
  }

  const DriverTable& driver_;
  bool entered_ = true;
  bool pushed_ = false;
};

/// Lets this thread load and unload modules while any thread captures a stream, without ending that capture.
class RelaxedCapture {
 public:
  /// Throws DriverError.
  explicit RelaxedCapture(const DriverTable& driver) : driver_(driver) {
    check(driver_, driver_.cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode");
    exchanged_ = true;
  }
  RelaxedCapture(const DriverTable& driver, std::nothrow_t) noexcept : driver_(driver) {
    exchanged_ = driver_.cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
  }
  ~RelaxedCapture() {
    if (exchanged_) driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;  // bound to its block and thread
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const DriverTable& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  ///< the caller's own once exchanged
  bool exchanged_ = false;
};

/// A loaded module; unloads it from its context on whatever thread lets go of it.
class UniqueModule {
 public:
  UniqueModule() = default;
  UniqueModule(std::shared_ptr<DeviceState> state, CUmodule module) noexcept
      : state_(std::move(state)), module_(module) {}
  ~UniqueModule() { reset(); }
  UniqueModule(UniqueModule&& other) noexcept
      : state_(std::move(other.state_)), module_(std::exchange(other.module_, nullptr)) {}
  UniqueModule& operator=(UniqueModule&& other) noexcept {
    if (this != &other) {
      reset();
      state_ = std::move(other.state_);
      module_ = std::exchange(other.module_, nullptr);
    }
    return *this;
  }

  [[nodiscard]] CUmodule get() const noexcept { return module_; }
  [[nodiscard]] const std::shared_ptr<DeviceState>& state() const noexcept { return state_; }
  void reset() noexcept;

 private:
  std::shared_ptr<DeviceState> state_;
  CUmodule module_ = nullptr;
};

}  // namespace qkvjit
