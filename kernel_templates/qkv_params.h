// SPDX-License-Identifier: Apache-2.0
// The kernels' argument, shared with src/launch. Index 0 is Q, 1 is K, 2 is V.
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

/// A CUtensorMap, of which the kernels need no more than its size and place.
struct alignas(128) TensorMap {
  unsigned long long opaque[16];
};

/// What the prefill kernel takes: the same, and x as a map of boxes of 64 k (128-byte swizzle) and as many tokens as
/// one block of a cluster along N fetches.
struct PrefillParams {
  TensorMap x_map;
  QkvParams qkv;
};

}  // namespace qkvjit
