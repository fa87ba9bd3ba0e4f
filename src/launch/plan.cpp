// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <mutex>
#include <vector>

#include "compile/name_expression.h"
#include "launch/launch.h"
#include "qkvjit/error.h"
#include "qkvjit/qkv_plan.h"
#include "qkvjit/select.h"

namespace qkvjit {
namespace {

constexpr std::uint64_t kMaxGridX = 0x7fffffff;  // CUDA programming guide: maximum x-dimension of a grid

/// What a launch needs to know of a specialisation, ready to use.
struct LaunchShape {
  unsigned column_tiles = 0;
  unsigned block_m = 0;
  unsigned threads = 0;
  unsigned smem = 0;
  unsigned cluster = 1;
  unsigned cluster_k = 1;
  unsigned x_box_tokens = 0;  ///< prefill: tokens that one copy of x brings; else 0
  unsigned k = 0;
  unsigned multiprocessors = 1;
  bool dependent = false;  ///< launched while the kernel ahead still runs, where the caller's promise allows it

  LaunchShape(const Specialization& spec, const DeviceInfo& info, bool launch_dependent)
      : column_tiles(qkvjit::column_tiles(spec)),
        block_m(spec.tile.block_m),
        threads(threads_per_block(spec.tile)),
        smem(smem_bytes(spec)),
        cluster(spec.tile.cluster_k * spec.tile.cluster_n),
        cluster_k(spec.tile.cluster_k),
        x_box_tokens(spec.pipeline == Pipeline::prefill ? spec.tile.block_m / spec.tile.cluster_n : 0),
        k(spec.k),
        multiprocessors(static_cast<unsigned>(info.multiprocessors)),
        dependent(launch_dependent && waits_for_grids_ahead(spec)) {}
};

bool all_aligned(const QkvTensors& t) {
  std::uintptr_t bits = 0;
  for (const TensorView* view :
       {&t.x, &t.w_q_packed, &t.w_k_packed, &t.w_v_packed, &t.scales_q, &t.scales_k, &t.scales_v, &t.q, &t.k, &t.v}) {
    bits |= reinterpret_cast<std::uintptr_t>(view->data);
  }
  return bits % 16 == 0;
}

[[noreturn]] void throw_grid_too_large(std::uint64_t m, std::uint64_t blocks) {
  throw InvalidProblem(fmt::format("qkv: x: got M = {}, which needs {} blocks; a grid has at most {}; split x along M",
                                   m, blocks, kMaxGridX));
}

/// x [m, k] f16 as boxes of 64 k and `box_tokens` tokens in rows of 128 swizzled bytes, zeros beyond m.
TensorMap map_of_x(const DriverTable& driver, const void* x, std::uint64_t m, std::uint64_t k, unsigned box_tokens) {
  const cuuint64_t extents[] = {k, m};
  const cuuint64_t strides[] = {k * 2};  // bytes, of all but the first
  const cuuint32_t box[] = {kPackedK, box_tokens};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  check(driver,
        driver.cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(x), extents, strides,
                                      box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled (x)");
  static_assert(sizeof(CUtensorMap) == sizeof(TensorMap) && alignof(CUtensorMap) <= alignof(TensorMap));
  return std::bit_cast<TensorMap>(map);
}

/// The context must be current.
void launch(const DriverTable& driver, CUfunction function, const LaunchShape& shape, const QkvTensors& tensors,
            std::uint64_t m, CUstream stream) {
  std::uint64_t blocks = (m + shape.block_m - 1) / shape.block_m * shape.column_tiles * shape.cluster_k;
  const bool stays = shape.x_box_tokens != 0 && shape.cluster_k == 1;  // its blocks walk the tiles
  if (stays) {
    blocks = std::min<std::uint64_t>(blocks, shape.multiprocessors / shape.cluster * shape.cluster);
  } else if (shape.dependent && shape.x_box_tokens == 0) {
    // As many blocks on every multiprocessor; see is_idle_block in the kernels. Beyond a few it no longer matters.
    constexpr std::uint64_t kMostPadded = 8;
    const std::uint64_t per_multiprocessor = (blocks + shape.multiprocessors - 1) / shape.multiprocessors;
    if (per_multiprocessor <= kMostPadded) {
      blocks = per_multiprocessor * shape.multiprocessors / shape.cluster * shape.cluster;
    }
  }
  if (blocks > kMaxGridX) throw_grid_too_large(m, blocks);
  QkvParams params{tensors.x.data,
                   {tensors.w_q_packed.data, tensors.w_k_packed.data, tensors.w_v_packed.data},
                   {tensors.scales_q.data, tensors.scales_k.data, tensors.scales_v.data},
                   {tensors.q.data, tensors.k.data, tensors.v.data},
                   m,
                   shape.dependent};
  CUlaunchAttribute attributes[2];
  std::size_t count = 0;
  if (shape.cluster > 1) {
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim = {shape.cluster, 1, 1};
  }
  if (shape.dependent) {
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  const LaunchGrid grid{static_cast<unsigned>(blocks), shape.threads, shape.smem};
  if (shape.x_box_tokens != 0) {
    PrefillParams prefill{map_of_x(driver, tensors.x.data, m, shape.k, shape.x_box_tokens), params};
    launch_blocks(driver, function, prefill, grid, {attributes, count}, stream);
  } else {
    launch_blocks(driver, function, params, grid, {attributes, count}, stream);
  }
}

/// A row of the selection and, once bound, its kernel.
struct Row {
  Row(const SelectedRow& row, const DeviceInfo& info)
      : max_m(row.max_m), spec(row.spec), shape(row.spec, info, row.dependent_launch) {}

  std::uint64_t max_m;
  Specialization spec;
  LaunchShape shape;
  std::atomic<const Kernel*> kernel{nullptr};  // null until bound; then as long-lived as `owner`
  std::shared_ptr<const Kernel> owner;
};

/// Rows hold atomics and cannot move, so they live behind pointers.
using Rows = std::vector<std::unique_ptr<Row>>;

Rows make_rows(const std::vector<SelectedRow>& selected, const DeviceInfo& info, std::uint64_t max_m) {
  Rows rows;
  for (const SelectedRow& row : selected) {
    rows.push_back(std::make_unique<Row>(row, info));
    if (row.max_m >= max_m) break;
  }
  return rows;
}

Row& find_row(const Rows& rows, std::uint64_t m) {
  std::size_t i = 0;
  while (i + 1 < rows.size() && rows[i]->max_m < m) ++i;
  return *rows[i];
}

}  // namespace

struct QkvPlan::Impl {
  Impl(KernelCache& plan_cache, const DeviceContext& plan_context, const QkvProblem& plan_problem,
       const PlanOptions& plan_options)
      : cache(&plan_cache), context(plan_context), problem(plan_problem), options(plan_options) {
    const DeviceInfo& info = context.info();
    validate(problem);
    const Target target = cache->target_for(info);
    const auto select = [&](bool is_aligned) {
      return select_rows(problem, info, target, is_aligned, options.weights_are_constant, options.tuning);
    };
    unaligned = make_rows(select(false), info, options.max_m);
    std::vector<SelectedRow> rows = select(true);
    // Where some row of a tensor is no multiple of 16 bytes both lists are the same, and one is enough.
    if (rows.front().spec.aligned) aligned = make_rows(rows, info, options.max_m);
    options.tuning = nullptr;  // the rows are ours now
  }

  KernelCache* cache;
  DeviceContext context;
  QkvProblem problem;
  PlanOptions options;
  Rows aligned;  // empty where the problem has only unaligned rows
  Rows unaligned;
  std::mutex bind_mutex;

  [[nodiscard]] const Rows& rows(bool is_aligned) const { return is_aligned && !aligned.empty() ? aligned : unaligned; }

  void bind(Row& row, std::shared_ptr<const Kernel> kernel) {
    const std::lock_guard lock(bind_mutex);
    if (row.owner != nullptr) return;  // another thread was faster; both got the same kernel
    row.owner = std::move(kernel);
    row.kernel.store(row.owner.get(), std::memory_order_release);
  }

  const Kernel& bind_for(Row& row, CUstream stream) {
    std::shared_ptr<const Kernel> kernel = cache->find(context, row.spec);
    if (kernel == nullptr) {
      if (context.is_capturing(stream)) {
        throw CaptureWouldLoad(fmt::format(
            "qkv: the stream is capturing and the kernel is not loaded yet ({}); call QkvPlan::prepare(), or bind "
            "eagerly, or run the call once before the capture begins",
            describe(row.spec)));
      }
      kernel = cache->get(context, row.spec);
    }
    bind(row, std::move(kernel));
    return *row.kernel.load(std::memory_order_acquire);
  }

  void bind_all() {
    std::vector<Row*> missing;
    std::vector<Specialization> specs;
    for (const Rows* list : {&aligned, &unaligned}) {
      for (const auto& row : *list) {
        if (row->kernel.load(std::memory_order_acquire) != nullptr) continue;
        missing.push_back(row.get());
        specs.push_back(row->spec);
      }
    }
    auto kernels = cache->get_all(context, specs);
    for (std::size_t i = 0; i < missing.size(); ++i) bind(*missing[i], std::move(kernels[i]));
  }
};

QkvPlan::QkvPlan(KernelCache& cache, const DeviceContext& context, const QkvProblem& problem,
                 const PlanOptions& options)
    : impl_(std::make_unique<Impl>(cache, context, problem, options)) {
  if (options.binding == Binding::eager) prepare();
}

QkvPlan::~QkvPlan() = default;
QkvPlan::QkvPlan(QkvPlan&&) noexcept = default;
QkvPlan& QkvPlan::operator=(QkvPlan&&) noexcept = default;

void QkvPlan::prepare() { impl_->bind_all(); }

void QkvPlan::operator()(const QkvTensors& tensors, CUstream stream, const LaunchOptions& options) const {
  Impl& plan = *impl_;
  const std::uint64_t m = validate(plan.problem, tensors, plan.context.info().ordinal);
  if (m > plan.options.max_m) {
    throw InvalidProblem(fmt::format("qkv: x: got M = {}, but the plan was bound for M <= {}; raise PlanOptions::max_m",
                                     m, plan.options.max_m));
  }
  if (m == 0) return;
  Row& row = find_row(plan.rows(all_aligned(tensors)), m);
  const Kernel* kernel = row.kernel.load(std::memory_order_acquire);
  if (kernel == nullptr) kernel = &plan.bind_for(row, stream);

  DeviceState& state = *plan.context.state();
  const ContextScope scope(state);
  if (options.producer != nullptr) state.join(options.producer, stream);
  launch(*state.driver, kernel->function(), row.shape, tensors, m, stream);
  if (options.consumer != nullptr) state.join(stream, options.consumer);
}

void QkvPlan::operator()(const PackedWeights& packed, const QkvTensors& tensors, CUstream stream,
                         const LaunchOptions& options) const {
  (*this)(with_packed_weights(impl_->problem, tensors, packed, impl_->context.info().ordinal), stream, options);
}

std::size_t QkvPlan::workspace_bytes(std::uint64_t /*max_m*/) const noexcept { return 0; }

const QkvProblem& QkvPlan::problem() const noexcept { return impl_->problem; }

const Specialization& QkvPlan::row(std::uint64_t m, bool aligned) const {
  return find_row(impl_->rows(aligned), m).spec;
}

void launch_kernel(const Kernel& kernel, const DeviceContext& context, const QkvTensors& tensors, CUstream stream,
                   bool weights_are_constant) {
  const Specialization& spec = kernel.spec();
  const QkvProblem problem{.n_q = spec.n_q,
                           .n_k = spec.n_k,
                           .n_v = spec.n_v,
                           .k = spec.k,
                           .group_size = spec.group_size,
                           .layout = spec.layout,
                           .activation_dtype = spec.activation_dtype,
                           .scale_dtype = spec.scale_dtype};
  const std::uint64_t m = validate(problem, tensors, context.info().ordinal);
  if (spec.aligned && !all_aligned(tensors)) {
    throw InvalidProblem(
        "launch_kernel: a base pointer is not 16-byte aligned, which this kernel needs; use one with aligned = false");
  }
  if (m == 0) return;
  const ContextScope scope(*context.state());
  launch(*context.state()->driver, kernel.function(), LaunchShape(spec, context.info(), weights_are_constant), tensors,
         m, stream);
}

}  // namespace qkvjit
