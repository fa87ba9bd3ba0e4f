// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/tensor.h"

#include <algorithm>

namespace qkvjit {

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f32:
      return "f32";
    case DType::u32:
      return "u32";
  }
  return "an unknown type";
}

const char* to_string(MemoryKind kind) noexcept {
  switch (kind) {
    case MemoryKind::host:
      return "host";
    case MemoryKind::host_pinned:
      return "host_pinned";
    case MemoryKind::managed:
      return "managed";
    case MemoryKind::cuda:
      return "cuda";
  }
  return "unknown";
}

std::string shape_text(const TensorView& view) {
  // A view is made by callers: its rank may be anything.
  const int rank = std::clamp(view.rank, 0, static_cast<int>(kMaxRank));
  std::string text = "[";
  for (int i = 0; i < rank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(view.shape[static_cast<std::size_t>(i)]);
  }
  return text + "]";
}

}  // namespace qkvjit
