// SPDX-License-Identifier: Apache-2.0
// The one kernel argument, shared by the kernels and src/launch. Index 0 is Q, 1 is K, 2 is V.
#pragma once

namespace qkvjit {

struct QkvParams {
  const void* x;           // [m, K]
  const void* weights[3];  // packed words: k8n [K/8, N], nk8 [N, K/8] or prepacked blocks
  const void* scales[3];   // [K/group, N]
  void* outputs[3];        // [m, N]
  unsigned long long m;    // tokens
  // Whether weights and scales may be read before the kernel ahead in the stream has finished (the caller's promise;
  // set where the launch is a dependent one). x and the outputs never are.
  unsigned weights_are_constant;
};

}  // namespace qkvjit
