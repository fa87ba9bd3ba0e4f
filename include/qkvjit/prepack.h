// SPDX-License-Identifier: Apache-2.0
// prepack(): a one-time, device-side re-ordering of the weight words into WeightLayout::prepacked (see kPackedK for the
// layout), the order in which the kernels read fastest. Scales stay as they are. PackedWeights is a plain value on the
// host that names the result: keep it beside the memory, and hand both to the launch, which checks it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "qkvjit/kernel_cache.h"
#include "qkvjit/qkv_problem.h"

namespace qkvjit {

/// Version of the prepacked layout; a change of the order of words or nibbles changes it.
inline constexpr std::uint32_t kPackedVersion = 1;

/// What prepack() made and where. Owns nothing: the memory is the caller's.
struct PackedWeights {
  std::uint32_t version = kPackedVersion;
  QkvProblem problem;                       ///< what it was made for, with layout = prepacked
  WeightLayout source = WeightLayout::k8n;  ///< the order of the words it was made from
  std::array<void*, 3> data{};              ///< the blocks of Q, K and V, each 16-byte aligned
  std::array<std::size_t, 3> bytes{};       ///< ceil(K/64) * ceil(N/64) * 2048 each
  int ordinal = 0;                          ///< the CUDA device that holds them

  /// The blocks of matrix 0 (Q), 1 (K) or 2 (V) as u32 [ceil(K/64), 512*ceil(N/64)].
  [[nodiscard]] TensorView view(int matrix) const;
};

/// Bytes of the buffer that prepack() fills for `problem` (any layout): the blocks of Q, K and V one after the other.
/// Throws InvalidProblem (see validate).
std::size_t packed_bytes(const QkvProblem& problem);

/// Re-orders the raw words of `tensors` (k8n or nk8, as `problem.layout` says; x, scales and outputs are not looked
/// at) into `buffer`, on `stream`. `buffer` is device memory, also by the driver's word, of at least
/// packed_bytes(problem), 16-byte aligned, apart from the words. Stream-ordered and capturable; allocates nothing. The
/// next launch on that stream sees the result. Throws InvalidProblem, DeviceMismatch, CaptureWouldLoad or what
/// KernelCache::get() throws.
PackedWeights prepack(KernelCache& cache, const DeviceContext& context, const QkvProblem& problem,
                      const QkvTensors& tensors, void* buffer, std::size_t buffer_bytes, CUstream stream);

/// As above, but over the words themselves, which are lost. k8n with K and every N a multiple of 64 only: there 64 rows
/// of k occupy the same bytes in both orders. `scratch`: device memory of at least prepack_scratch_bytes(problem),
/// 16-byte aligned, free again once the stream has passed.
PackedWeights prepack_in_place(KernelCache& cache, const DeviceContext& context, const QkvProblem& problem,
                               const QkvTensors& tensors, void* scratch, std::size_t scratch_bytes, CUstream stream);

/// 64 k of the widest matrix: 32 * max(N) bytes. Throws InvalidProblem where prepack_in_place() would.
std::size_t prepack_scratch_bytes(const QkvProblem& problem);

/// The raw words back, bit for bit, into the w_*_packed of `tensors`, in the order `layout` (k8n or nk8).
void unpack(KernelCache& cache, const DeviceContext& context, const PackedWeights& packed, const QkvTensors& tensors,
            WeightLayout layout, CUstream stream);

/// `tensors` with its three weights replaced by the packed ones. Throws InvalidProblem where `packed` is of another
/// version or does not fit `problem` (layout prepacked; shape, group, types), DeviceMismatch where it is on another
/// device than `ordinal`.
QkvTensors with_packed_weights(const QkvProblem& problem, QkvTensors tensors, const PackedWeights& packed, int ordinal);

}  // namespace qkvjit
