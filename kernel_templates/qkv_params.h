// SPDX-License-Identifier: Apache-2.0
// The one kernel argument, shared by the kernels and src/launch. Index 0 is Q, 1 is K, 2 is V.
#pragma once

namespace qkvjit {

struct QkvParams {
  const void* x;           // [m, K]
  const void* weights[3];  // packed words, k8n [K/8, N] or nk8 [N, K/8]
  const void* scales[3];   // [K/group, N]
  void* outputs[3];        // [m, N]
  unsigned long long m;    // tokens
};

}  // namespace qkvjit
