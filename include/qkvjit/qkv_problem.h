// SPDX-License-Identifier: Apache-2.0
// What is computed, and what is refused: Q = x*Wq, K = x*Wk, V = x*Wv with 4-bit weights and one scale
// per group of k and column. All functions here are pure: they need no GPU and no driver.
#pragma once

#include <cstdint>
#include <functional>

#include "qkvjit/tensor.h"

namespace qkvjit {

struct DeviceInfo;

/// The shape a kernel is generated for. The defaults are those of qkv_project_int4. M is not part of it.
struct QkvProblem {
  std::uint64_t n_q = 0;  ///< columns of Wq and Q; any N >= 1, multiples of 8 are fast
  std::uint64_t n_k = 0;
  std::uint64_t n_v = 0;
  std::uint64_t k = 0;  ///< columns of x; a multiple of 128
  std::uint64_t group_size = 128;
  WeightLayout layout = WeightLayout::k8n;
  DType activation_dtype = DType::f16;  ///< x and the outputs
  DType scale_dtype = DType::f16;

  bool operator==(const QkvProblem&) const = default;
};

/// Seven inputs, three outputs; all row-major, contiguous, on the context's device.
///   x             activation_dtype  [M, K]
///   w_*_packed    u32               k8n: [K/8, N_*]; nk8: [N_*, K/8]; two's complement nibbles, lowest k lowest;
///                                   prepacked: [ceil(K/64), 512*ceil(N_*/64)] (PackedWeights, prepack.h)
///   scales_*      scale_dtype       [K/group_size, N_*]
///   q, k, v       activation_dtype  [M, N_*]  (written)
struct QkvTensors {
  TensorView x;
  TensorView w_q_packed, w_k_packed, w_v_packed;
  TensorView scales_q, scales_k, scales_v;
  TensorView q, k, v;
};

/// What the driver knows about a pointer. `kind` host means the driver has never seen it.
struct PointerFacts {
  MemoryKind kind = MemoryKind::host;
  int ordinal = -1;
  bool foreign_context = false;  ///< belongs to another context on the same device
};
using PointerQuery = std::function<PointerFacts(const void*)>;

/// Throws InvalidProblem where no kernel exists for `problem`, with the nearest thing that can be had.
void validate(const QkvProblem& problem);

/// Checks `tensors` against `problem` without asking a driver: gradient tracking, device kind and ordinal, rank,
/// contiguity, offset, shape, 32-bit extents, dtype, alignment, overlap, in that order. Returns M.
/// Throws InvalidProblem or DeviceMismatch. `ordinal` is the context's device.
std::uint64_t validate(const QkvProblem& problem, const QkvTensors& tensors, int ordinal);

/// Checks the three weight tensors alone, in the same order, for operations that look at nothing else. `operation`
/// begins the messages.
void validate_weights(const char* operation, const QkvProblem& problem, const QkvTensors& tensors, int ordinal);

/// Whether the output tensors exist yet. Those to be allocated after validation are not looked at.
enum class Outputs : std::uint8_t { given, to_be_allocated };

/// The seed operation's strict refusals, in the contract's order:
///   1 gradient tracking, 2 not on a CUDA device (also by `query`), 3 another device's ordinal, 4 rank,
///   contiguity, offset, 5 shapes, 6 over 32 bits, 7 dtype, 8 alignment, overlap, another context's memory,
///   9 below SM 8.0.
/// Returns the problem it describes. Throws InvalidProblem, DeviceMismatch or UnsupportedDevice.
QkvProblem validate_qkv_project_int4(const QkvTensors& tensors, WeightLayout layout, const DeviceInfo& info,
                                     const PointerQuery& query, Outputs outputs = Outputs::given);

}  // namespace qkvjit
