// SPDX-License-Identifier: Apache-2.0
// START HERE. Q = x*Wq, K = x*Wk, V = x*Wv with INT4 weights and 16-bit activations, one launch.
//
//   qkvjit::DeviceContext context(0);
//   qkvjit::KernelCache cache;
//   qkvjit::qkv_project_int4(cache, context, tensors, stream);
//
// The first call of a shape compiles a kernel for it (NVRTC); later calls look it up and launch. For the
// fastest calls bind a QkvPlan once. The caller owns context and cache; both are thread-safe.
#pragma once

#include "qkvjit/device_context.h"
#include "qkvjit/error.h"
#include "qkvjit/kernel_cache.h"
#include "qkvjit/prepack.h"
#include "qkvjit/qkv_plan.h"
#include "qkvjit/qkv_problem.h"
#include "qkvjit/quantize.h"
#include "qkvjit/select.h"
#include "qkvjit/specialization.h"
#include "qkvjit/tensor.h"
#include "qkvjit/tuning_table.h"

namespace qkvjit {

/// The strict form. Seven inputs, three outputs, f16 activations, group 128, N_q = N_k = N_v, K % 128 == 0.
/// Also asks the driver about each pointer and the stream. Refusals come in the order documented at
/// validate_qkv_project_int4, before anything is compiled, allocated or launched. Stream-ordered.
///
/// A trap: KAIO documents its weights as [K/8, N] but reads them as [N, K/8]. Its buffers are WeightLayout::nk8.
void qkv_project_int4(KernelCache& cache, const DeviceContext& context, const QkvTensors& tensors, CUstream stream,
                      WeightLayout layout = WeightLayout::k8n, const LaunchOptions& options = {});

/// Device memory allocated and freed in stream order (cuMemAllocAsync). Move-only.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  /// Throws DriverError. `bytes` may be 0.
  DeviceBuffer(const DeviceContext& context, std::size_t bytes, CUstream stream);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::shared_ptr<DeviceState> state_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  CUstream stream_ = nullptr;
};

/// Owned outputs, each f16 [M, N]; freed on the stream that made them.
struct QkvOutputs {
  DeviceBuffer q_buffer, k_buffer, v_buffer;
  TensorView q, k, v;
};

/// As above, but allocates the outputs in stream order; `tensors.q`, `.k` and `.v` are ignored.
[[nodiscard]] QkvOutputs qkv_project_int4_alloc(KernelCache& cache, const DeviceContext& context, QkvTensors tensors,
                                                CUstream stream, WeightLayout layout = WeightLayout::k8n,
                                                const LaunchOptions& options = {});

/// The library's version, "0.1.0".
const char* version() noexcept;

}  // namespace qkvjit
