// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "cuda/device_state.h"
#include "qkvjit/qkvjit.h"

namespace qkvjit {
namespace {

struct MemoKey {
  std::uint64_t context_id = 0;
  QkvProblem problem;
  bool operator==(const MemoKey&) const = default;
};

struct MemoKeyHash {
  std::size_t operator()(const MemoKey& key) const noexcept {
    // The strict form fixes everything but these.
    std::uint64_t hash = key.context_id;
    for (const std::uint64_t value : {key.problem.n_q, key.problem.k, static_cast<std::uint64_t>(key.problem.layout)}) {
      hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return static_cast<std::size_t>(hash);
  }
};

/// The lazily bound plan of every shape that the strict form has seen; they stay for the cache's life.
class ProjectMemo final : public PlanMemo {
 public:
  const QkvPlan& plan(KernelCache& cache, const DeviceContext& context, const QkvProblem& problem) {
    const MemoKey key{context.state()->id, problem};
    {
      const std::shared_lock lock(mutex_);
      if (const auto it = plans_.find(key); it != plans_.end()) return *it->second;
    }
    auto plan = std::make_unique<QkvPlan>(cache, context, problem, PlanOptions{.binding = Binding::lazy});
    const std::unique_lock lock(mutex_);
    return *plans_.try_emplace(key, std::move(plan)).first->second;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<MemoKey, std::unique_ptr<QkvPlan>, MemoKeyHash> plans_;
};

void require_own_stream(const DeviceContext& context, CUstream stream, const char* name) {
  if (!context.is_foreign_stream(stream)) return;
  throw InvalidProblem(fmt::format(
      "qkv_project_int4: {}: got a stream of another context, needs one of device {}'s primary context; create it "
      "while that context is current",
      name, context.info().ordinal));
}

/// Every refusal; returns what the tensors describe.
QkvProblem validate_call(const DeviceContext& context, const QkvTensors& tensors, CUstream stream, WeightLayout layout,
                         const LaunchOptions& options, Outputs outputs) {
  const QkvProblem problem = validate_qkv_project_int4(
      tensors, layout, context.info(), [&](const void* pointer) { return context.pointer_facts(pointer); }, outputs);
  require_own_stream(context, stream, "stream");
  if (options.producer != nullptr) require_own_stream(context, options.producer, "LaunchOptions::producer");
  if (options.consumer != nullptr) require_own_stream(context, options.consumer, "LaunchOptions::consumer");
  return problem;
}

void launch_call(KernelCache& cache, const DeviceContext& context, const QkvProblem& problem, const QkvTensors& tensors,
                 CUstream stream, const LaunchOptions& options) {
  if (tensors.x.shape[0] == 0) return;
  auto& memo = static_cast<ProjectMemo&>(
      cache.plan_memo([]() -> std::unique_ptr<PlanMemo> { return std::make_unique<ProjectMemo>(); }));
  memo.plan(cache, context, problem)(tensors, stream, options);
}

}  // namespace

void qkv_project_int4(KernelCache& cache, const DeviceContext& context, const QkvTensors& tensors, CUstream stream,
                      WeightLayout layout, const LaunchOptions& options) {
  const QkvProblem problem = validate_call(context, tensors, stream, layout, options, Outputs::given);
  launch_call(cache, context, problem, tensors, stream, options);
}

QkvOutputs qkv_project_int4_alloc(KernelCache& cache, const DeviceContext& context, QkvTensors tensors, CUstream stream,
                                  WeightLayout layout, const LaunchOptions& options) {
  const QkvProblem problem = validate_call(context, tensors, stream, layout, options, Outputs::to_be_allocated);
  const std::int64_t m = tensors.x.shape[0];
  const auto n = static_cast<std::int64_t>(problem.n_q);
  const std::size_t bytes = static_cast<std::size_t>(m) * static_cast<std::size_t>(n) * element_bytes(DType::f16);
  const int ordinal = context.info().ordinal;
  QkvOutputs outputs{DeviceBuffer(context, bytes, stream),
                     DeviceBuffer(context, bytes, stream),
                     DeviceBuffer(context, bytes, stream),
                     {},
                     {},
                     {}};
  tensors.q = outputs.q = TensorView::matrix(outputs.q_buffer.data(), DType::f16, m, n, ordinal);
  tensors.k = outputs.k = TensorView::matrix(outputs.k_buffer.data(), DType::f16, m, n, ordinal);
  tensors.v = outputs.v = TensorView::matrix(outputs.v_buffer.data(), DType::f16, m, n, ordinal);
  launch_call(cache, context, problem, tensors, stream, options);
  return outputs;
}

}  // namespace qkvjit
