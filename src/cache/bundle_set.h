// SPDX-License-Identifier: Apache-2.0
// The bundles of CacheOptions::bundles: looked into before anything is compiled. Nothing here throws: a bundle that
// cannot be used is one warning, and what it would have had is compiled. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cache/artifact_key.h"
#include "cache/bundle.h"
#include "qkvjit/kernel_cache.h"
#include "support/rate_limit.h"

namespace qkvjit {

/// What this build with that NVRTC would put into a bundle.
BundleProducer producer_of(const NvrtcTable& nvrtc);

/// The one of `stored` that differs from `needed` in the fewest fields; null where there is none.
const ArtifactKey* nearest_key(const std::vector<ArtifactKey>& stored, const ArtifactKey& needed);

/// "target: sm_80 is stored, sm_90 is needed; tile.block_m: …".
std::string difference_text(const ArtifactKey& has, const ArtifactKey& needs);

class BundleSet {
 public:
  explicit BundleSet(std::vector<std::string> paths) : paths_(std::move(paths)) {}

  [[nodiscard]] bool empty() const noexcept { return paths_.empty(); }
  /// The kernel of `spec`, from the first bundle that has it.
  std::optional<CompiledKernel> load(const Specialization& spec, const NvrtcTable& nvrtc) noexcept;
  [[nodiscard]] std::uint64_t rejected() const noexcept { return rejected_.load(std::memory_order_relaxed); }

 private:
  void open_all(const NvrtcTable& nvrtc);
  void reject(const std::string& text);
  std::optional<CompiledKernel> load_from(const Bundle& bundle, const ArtifactKey& key, const Specialization& spec);
  void explain_miss(const ArtifactKey& key);

  std::vector<std::string> paths_;
  std::once_flag opened_;
  std::vector<Bundle> bundles_;
  std::atomic<std::uint64_t> rejected_{0};
  RateLimit warnings_, explanations_;
};

}  // namespace qkvjit
