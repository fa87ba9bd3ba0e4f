// SPDX-License-Identifier: Apache-2.0
// The tensors of a problem in the fake driver's memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "qkvjit/qkv_problem.h"
#include "qkvjit/tensor.h"
#include "support/fake_driver.h"

namespace fake {

/// Tensors of the fake driver's memory, `shift` bytes behind a page's begin.
inline qkvjit::QkvTensors tensors_of(const qkvjit::QkvProblem& p, std::int64_t m, std::size_t shift = 0,
                                     int ordinal = 0) {
  using namespace qkvjit;
  const auto matrix = [&](DType dtype, std::int64_t rows, std::int64_t columns) {
    const std::size_t bytes = static_cast<std::size_t>(rows * columns) * element_bytes(dtype) + shift;
    char* const data = static_cast<char*>(make_memory(ordinal, std::max<std::size_t>(bytes, 1)));
    return TensorView::matrix(data + shift, dtype, rows, columns, ordinal);
  };
  const auto k = static_cast<std::int64_t>(p.k);
  const auto weights = [&](std::uint64_t n) {
    const auto columns = static_cast<std::int64_t>(n);
    return p.layout == WeightLayout::k8n ? matrix(DType::u32, k / 8, columns) : matrix(DType::u32, columns, k / 8);
  };
  const auto scales = [&](std::uint64_t n) { return matrix(DType::f16, k / 128, static_cast<std::int64_t>(n)); };
  const auto output = [&](std::uint64_t n) { return matrix(DType::f16, m, static_cast<std::int64_t>(n)); };
  qkvjit::QkvTensors t;
  t.x = matrix(DType::f16, m, k);
  t.w_q_packed = weights(p.n_q);
  t.w_k_packed = weights(p.n_k);
  t.w_v_packed = weights(p.n_v);
  t.scales_q = scales(p.n_q);
  t.scales_k = scales(p.n_k);
  t.scales_v = scales(p.n_v);
  t.q = output(p.n_q);
  t.k = output(p.n_k);
  t.v = output(p.n_v);
  return t;
}

}  // namespace fake
