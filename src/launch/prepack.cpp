// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/prepack.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "compile/name_expression.h"
#include "launch/launch.h"
#include "qkvjit/error.h"
#include "qkvjit/select.h"

namespace qkvjit {
namespace {

constexpr std::uint64_t kMaxGridX = 0x7fffffff;  // CUDA programming guide: maximum x-dimension of a grid
constexpr std::size_t kAlignment = 16;

using Matrices = std::array<const TensorView*, 3>;

constexpr std::array<const char*, 3> kNames{"w_q_packed", "w_k_packed", "w_v_packed"};

Matrices matrices_of(const QkvTensors& t) { return {&t.w_q_packed, &t.w_k_packed, &t.w_v_packed}; }

std::array<std::uint64_t, 3> columns_of(const QkvProblem& p) { return {p.n_q, p.n_k, p.n_v}; }

std::size_t matrix_bytes(std::uint64_t k, std::uint64_t n) {
  return (k + kPackedK - 1) / kPackedK * ((n + kPackedN - 1) / kPackedN) * kPackedBlockWords * sizeof(unsigned);
}

std::uint64_t address_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

void require_raw(const char* operation, WeightLayout layout) {
  if (layout == WeightLayout::k8n || layout == WeightLayout::nk8) return;
  throw InvalidProblem(fmt::format(
      "{}: layout: got {}, needs k8n or nk8; name the order of the raw words (prepacked ones need no packing)",
      operation, to_string(layout)));
}

/// `memory` of `bytes` must hold `needed`, be aligned, be the device's by the driver's word, and stand apart from the
/// words.
void require_memory(const DeviceContext& context, const char* operation, const char* name, const void* memory,
                    std::size_t bytes, std::size_t needed, const QkvProblem& problem, const QkvTensors& tensors) {
  if (memory == nullptr || bytes < needed) {
    throw InvalidProblem(fmt::format("{}: {}: got {} bytes at {}, needs {} bytes of device memory; allocate as much",
                                     operation, name, bytes, memory, needed));
  }
  if (address_of(memory) % kAlignment != 0) {
    throw InvalidProblem(fmt::format("{}: {}: got the base {}, needs a multiple of {} bytes; align it", operation, name,
                                     memory, kAlignment));
  }
  const PointerFacts facts = context.pointer_facts(memory);
  const int ordinal = context.info().ordinal;
  if (facts.kind != MemoryKind::cuda) {
    throw InvalidProblem(fmt::format(
        "{}: {}: got {} at {}, needs memory of CUDA device {}; allocate it there (cuMemAlloc)", operation, name,
        facts.kind == MemoryKind::host ? "host memory or memory already freed" : to_string(facts.kind), memory,
        ordinal));
  }
  if (facts.ordinal != ordinal) {
    throw DeviceMismatch(fmt::format("{}: {}: got memory of CUDA device {}, needs the context's device {}", operation,
                                     name, facts.ordinal, ordinal));
  }
  if (facts.foreign_context) {
    throw InvalidProblem(
        fmt::format("{}: {}: got memory of another context on CUDA device {}, needs memory of that "
                    "device's primary context; allocate it while the primary context is current",
                    operation, name, ordinal));
  }
  const auto columns = columns_of(problem);
  const Matrices matrices = matrices_of(tensors);
  for (std::size_t i = 0; i < 3; ++i) {
    const std::uint64_t begin = address_of(matrices[i]->data), end = begin + problem.k / 2 * columns[i];
    if (std::max(begin, address_of(memory)) >= std::min(end, address_of(memory) + needed)) continue;
    throw InvalidProblem(
        fmt::format("{}: {}: got the bytes [{:#x}, {:#x}), which overlap those of {}, [{:#x}, {:#x}), "
                    "needs memory of its own; allocate it apart from the words",
                    operation, name, address_of(memory), address_of(memory) + needed, kNames[i], begin, end));
  }
}

Specialization packing_spec(Pipeline pipeline, WeightLayout raw, std::uint64_t k,
                            const std::array<std::uint64_t, 3>& columns, Target target) {
  Specialization spec;
  spec.pipeline = pipeline;
  spec.layout = raw;
  spec.n_q = static_cast<unsigned>(columns[0]);
  spec.n_k = static_cast<unsigned>(columns[1]);
  spec.n_v = static_cast<unsigned>(columns[2]);
  spec.k = static_cast<unsigned>(k);
  spec.tile = {.block_m = 1, .block_n = kPackedN, .warps_n = 4, .block_k = kPackedK};
  spec.target = target;
  return spec;
}

/// The kernel, compiled and loaded now if it must be and may be. Pinned: nobody holds it while the launch runs, or for
/// a graph that captured it.
std::shared_ptr<const Kernel> kernel_for(KernelCache& cache, const DeviceContext& context, const Specialization& spec,
                                         CUstream stream, const char* operation) {
  if (cache.find(context, spec) == nullptr && context.is_capturing(stream)) {
    throw CaptureWouldLoad(
        fmt::format("{}: the stream is capturing and the kernel is not loaded yet ({}); run it once before the capture "
                    "begins",
                    operation, describe(spec)));
  }
  return cache.pin(context, spec);
}

/// One thread block for each block of the packed matrices. The context must be current.
void launch_packing(const DeviceContext& context, const Kernel& kernel, const std::array<const void*, 3>& from,
                    const std::array<void*, 3>& to, CUstream stream) {
  const Specialization& spec = kernel.spec();
  const std::uint64_t blocks = std::uint64_t{ceil_div(spec.k, kPackedK)} * column_tiles(spec);
  if (blocks > kMaxGridX) {
    throw InvalidProblem(fmt::format("{}: got {} blocks of 64 x 64 weights, needs at most {}; pack the matrices apart",
                                     to_string(spec.pipeline), blocks, kMaxGridX));
  }
  QkvParams params{};
  for (std::size_t i = 0; i < 3; ++i) params.weights[i] = from[i], params.outputs[i] = to[i];
  const LaunchGrid grid{static_cast<unsigned>(blocks), threads_per_block(spec.tile), smem_bytes(spec)};
  launch_blocks(*context.state()->driver, kernel.function(), params, grid, {}, stream);
}

PackedWeights describe_packed(const QkvProblem& problem, const std::array<void*, 3>& data, int ordinal) {
  PackedWeights packed;
  packed.problem = problem;
  packed.problem.layout = WeightLayout::prepacked;
  packed.source = problem.layout;
  packed.data = data;
  const auto columns = columns_of(problem);
  for (std::size_t i = 0; i < 3; ++i) packed.bytes[i] = matrix_bytes(problem.k, columns[i]);
  packed.ordinal = ordinal;
  return packed;
}

void require_in_place(const QkvProblem& problem) {
  const char* operation = "prepack_in_place";
  if (problem.layout != WeightLayout::k8n) {
    throw InvalidProblem(
        fmt::format("{}: layout: got {}, needs k8n, in which 64 rows of k occupy the same bytes as when "
                    "packed; use prepack() into a buffer",
                    operation, to_string(problem.layout)));
  }
  const auto columns = columns_of(problem);
  for (std::size_t i = 0; i < 3; ++i) {
    if (columns[i] % kPackedN == 0) continue;
    throw InvalidProblem(
        fmt::format("{}: {}: got N = {}, needs a multiple of {}, for packed blocks are padded to it; "
                    "use prepack() into a buffer",
                    operation, kNames[i], columns[i], kPackedN));
  }
  if (problem.k % kPackedK != 0) {
    throw InvalidProblem(fmt::format("{}: k: got {}, needs a multiple of {}; use prepack() into a buffer", operation,
                                     problem.k, kPackedK));
  }
}

}  // namespace

TensorView PackedWeights::view(int matrix) const {
  const std::uint64_t n = columns_of(problem)[static_cast<std::size_t>(matrix)];
  return TensorView::matrix(data[static_cast<std::size_t>(matrix)], DType::u32,
                            static_cast<std::int64_t>((problem.k + kPackedK - 1) / kPackedK),
                            static_cast<std::int64_t>((n + kPackedN - 1) / kPackedN * kPackedBlockWords), ordinal);
}

std::size_t packed_bytes(const QkvProblem& problem) {
  validate(problem);
  std::size_t bytes = 0;
  for (const std::uint64_t n : columns_of(problem)) bytes += matrix_bytes(problem.k, n);
  return bytes;
}

PackedWeights prepack(KernelCache& cache, const DeviceContext& context, const QkvProblem& problem,
                      const QkvTensors& tensors, void* buffer, std::size_t buffer_bytes, CUstream stream) {
  const char* operation = "prepack";
  require_raw(operation, problem.layout);
  validate_weights(operation, problem, tensors, context.info().ordinal);
  require_memory(context, operation, "buffer", buffer, buffer_bytes, packed_bytes(problem), problem, tensors);

  const auto columns = columns_of(problem);
  const Matrices matrices = matrices_of(tensors);
  std::array<const void*, 3> from{};
  std::array<void*, 3> to{};
  char* at = static_cast<char*>(buffer);
  for (std::size_t i = 0; i < 3; ++i) {
    from[i] = matrices[i]->data;
    to[i] = at;
    at += matrix_bytes(problem.k, columns[i]);
  }
  const auto kernel =
      kernel_for(cache, context,
                 packing_spec(Pipeline::prepack, problem.layout, problem.k, columns, cache.target_for(context.info())),
                 stream, operation);
  const ContextScope scope(*context.state());
  launch_packing(context, *kernel, from, to, stream);
  return describe_packed(problem, to, context.info().ordinal);
}

std::size_t prepack_scratch_bytes(const QkvProblem& problem) {
  validate(problem);
  require_in_place(problem);
  return std::max({problem.n_q, problem.n_k, problem.n_v}) * kPackedK / 2;
}

PackedWeights prepack_in_place(KernelCache& cache, const DeviceContext& context, const QkvProblem& problem,
                               const QkvTensors& tensors, void* scratch, std::size_t scratch_bytes, CUstream stream) {
  const char* operation = "prepack_in_place";
  require_raw(operation, problem.layout);
  validate_weights(operation, problem, tensors, context.info().ordinal);
  require_memory(context, operation, "scratch", scratch, scratch_bytes, prepack_scratch_bytes(problem), problem,
                 tensors);

  const auto columns = columns_of(problem);
  const Matrices matrices = matrices_of(tensors);
  std::array<void*, 3> data{};
  std::array<std::shared_ptr<const Kernel>, 3> kernels;
  for (std::size_t i = 0; i < 3; ++i) {
    data[i] = matrices[i]->data;
    if (address_of(data[i]) % kAlignment != 0) {
      throw InvalidProblem(
          fmt::format("{}: {}: got the base {}, needs a multiple of {} bytes; use prepack() into a "
                      "buffer",
                      operation, kNames[i], data[i], kAlignment));
    }
    // One matrix of one slab: [8, N] raw words, a row of blocks.
    kernels[i] = kernel_for(
        cache, context,
        packing_spec(Pipeline::prepack, problem.layout, kPackedK, {columns[i], 0, 0}, cache.target_for(context.info())),
        stream, operation);
  }
  // Everything that can fail has been done: from here on words are overwritten.
  const ContextScope scope(*context.state());
  const DriverTable& driver = *context.state()->driver;
  for (std::uint64_t slab = 0; slab < problem.k / kPackedK; ++slab) {
    for (std::size_t i = 0; i < 3; ++i) {
      const std::size_t bytes = columns[i] * kPackedK / 2;
      char* words = static_cast<char*>(data[i]) + slab * bytes;
      check(driver,
            driver.cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(scratch), reinterpret_cast<CUdeviceptr>(words),
                                     bytes, stream),
            "cuMemcpyDtoDAsync");
      launch_packing(context, *kernels[i], {scratch, nullptr, nullptr}, {words, nullptr, nullptr}, stream);
    }
  }
  return describe_packed(problem, data, context.info().ordinal);
}

void unpack(KernelCache& cache, const DeviceContext& context, const PackedWeights& packed, const QkvTensors& tensors,
            WeightLayout layout, CUstream stream) {
  const char* operation = "unpack";
  require_raw(operation, layout);
  QkvProblem raw = packed.problem;
  raw.layout = layout;
  validate_weights(operation, raw, tensors, context.info().ordinal);
  const QkvTensors blocks = with_packed_weights(packed.problem, tensors, packed, context.info().ordinal);
  for (std::size_t i = 0; i < 3; ++i) {
    require_memory(context, operation, kNames[i], packed.data[i], packed.bytes[i],
                   matrix_bytes(raw.k, columns_of(raw)[i]), raw, tensors);
  }
  const auto kernel = kernel_for(
      cache, context, packing_spec(Pipeline::unpack, layout, raw.k, columns_of(raw), cache.target_for(context.info())),
      stream, operation);
  std::array<const void*, 3> from{};
  std::array<void*, 3> to{};
  for (std::size_t i = 0; i < 3; ++i) {
    from[i] = matrices_of(blocks)[i]->data;
    to[i] = matrices_of(tensors)[i]->data;
  }
  const ContextScope scope(*context.state());
  launch_packing(context, *kernel, from, to, stream);
}

QkvTensors with_packed_weights(const QkvProblem& problem, QkvTensors tensors, const PackedWeights& packed,
                               int ordinal) {
  if (packed.version != kPackedVersion) {
    throw InvalidProblem(fmt::format("PackedWeights: version: got {}, needs {}; prepack the raw words again",
                                     packed.version, kPackedVersion));
  }
  QkvProblem wanted = problem;
  wanted.layout = WeightLayout::prepacked;
  if (packed.problem != wanted) {
    const QkvProblem& got = packed.problem;
    throw InvalidProblem(fmt::format(
        "PackedWeights: shape: got N = {}/{}/{}, K = {}, group {}, needs N = {}/{}/{}, K = {}, group {} and the same "
        "types; prepack the weights of this problem",
        got.n_q, got.n_k, got.n_v, got.k, got.group_size, wanted.n_q, wanted.n_k, wanted.n_v, wanted.k,
        wanted.group_size));
  }
  if (packed.ordinal != ordinal) {
    throw DeviceMismatch(
        fmt::format("PackedWeights: device: got CUDA device {}, needs device {}, the context's; prepack on that device",
                    packed.ordinal, ordinal));
  }
  tensors.w_q_packed = packed.view(0);
  tensors.w_k_packed = packed.view(1);
  tensors.w_v_packed = packed.view(2);
  return tensors;
}

}  // namespace qkvjit
