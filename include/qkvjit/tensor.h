// SPDX-License-Identifier: Apache-2.0
// TensorView: a non-owning description of a strided tensor, as wide as DLPack's so that a wrong tensor
// can be described and refused. Plain value, no CUDA header needed, no allocation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "qkvjit/specialization.h"

namespace qkvjit {

enum class MemoryKind : std::uint8_t { host, host_pinned, managed, cuda };

/// Where a tensor lives. `ordinal` counts CUDA devices as the driver does.
struct Device {
  MemoryKind kind = MemoryKind::cuda;
  int ordinal = 0;
};

constexpr std::size_t kMaxRank = 8;

/// `data` is the storage's base; element [0, …] stands `offset_elements` behind it. Shape and strides are
/// in elements. Inputs are never written.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f16;
  int rank = 2;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};
  std::int64_t offset_elements = 0;
  Device device{};
  bool requires_grad = false;  ///< set by bindings that have autograd

  /// A contiguous row-major [rows, columns] tensor on CUDA device `ordinal`.
  static TensorView matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t columns, int ordinal = 0) {
    TensorView view;
    view.data = const_cast<void*>(data);
    view.dtype = dtype;
    view.shape[0] = rows;
    view.shape[1] = columns;
    view.strides[0] = columns;
    view.strides[1] = 1;
    view.device.ordinal = ordinal;
    return view;
  }
};

/// Bytes of one element.
constexpr std::size_t element_bytes(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16 ? 2 : 4; }

/// "f16", "bf16", "f32", "u32".
const char* to_string(DType dtype) noexcept;
const char* to_string(MemoryKind kind) noexcept;
/// "[4, 4096]", for messages.
std::string shape_text(const TensorView& view);

}  // namespace qkvjit
