// SPDX-License-Identifier: Apache-2.0
#include "cache/bundle_set.h"

#include <fmt/format.h>

#include <exception>
#include <utility>

#include "cache/artifact_entry.h"
#include "compile/kernel_templates.h"
#include "cuda/nvrtc.h"
#include "qkvjit/error.h"
#include "qkvjit/qkvjit.h"
#include "support/log.h"

namespace qkvjit {

BundleProducer producer_of(const NvrtcTable& nvrtc) {
  return {version(), std::string(templates_digest()), nvrtc_build(nvrtc)};
}

const ArtifactKey* nearest_key(const std::vector<ArtifactKey>& stored, const ArtifactKey& needed) {
  const ArtifactKey* nearest = nullptr;
  std::size_t fewest = 0;
  for (const ArtifactKey& key : stored) {
    const std::size_t count = differences(key, needed).size();
    if (nearest != nullptr && count >= fewest) continue;
    nearest = &key;
    fewest = count;
  }
  return nearest;
}

std::string difference_text(const ArtifactKey& has, const ArtifactKey& needs) {
  std::string text;
  for (const FieldDifference& field : differences(has, needs)) {
    text += fmt::format("{}{}: {} is stored, {} is needed", text.empty() ? "" : "; ", field.name,
                        field.has.empty() ? "nothing" : field.has, field.needs.empty() ? "nothing" : field.needs);
  }
  return text;
}

std::optional<CompiledKernel> BundleSet::load(const Specialization& spec, const NvrtcTable& nvrtc) noexcept {
  if (paths_.empty()) return std::nullopt;
  try {
    std::call_once(opened_, [&] { open_all(nvrtc); });
    const ArtifactKey key = ArtifactKey::of(spec, nvrtc);
    for (const Bundle& bundle : bundles_) {
      if (auto kernel = load_from(bundle, key, spec)) return kernel;
    }
    explain_miss(key);
  } catch (const std::exception& failure) {
    reject(failure.what());
  }
  return std::nullopt;
}

void BundleSet::open_all(const NvrtcTable& nvrtc) {
  for (const std::string& path : paths_) {
    try {
      Bundle bundle = Bundle::open(path);
      // No key of it can match: said once, and it is not looked into again.
      if (const std::string mismatch = producer_mismatch(bundle.producer(), producer_of(nvrtc)); !mismatch.empty()) {
        rejected_.fetch_add(1, std::memory_order_relaxed);
        log::line(log::Level::warn, "bundle '{}' is not used: {}; export it again with this build and NVRTC", path,
                  mismatch);
        continue;
      }
      bundles_.push_back(std::move(bundle));
    } catch (const Error& failure) {
      rejected_.fetch_add(1, std::memory_order_relaxed);
      log::line(log::Level::warn, "{}; it is not used", failure.what());
    }
  }
}

void BundleSet::reject(const std::string& text) {
  rejected_.fetch_add(1, std::memory_order_relaxed);
  if (const auto held_back = warnings_.try_pass()) {
    log::line(log::Level::warn, "{}; the kernel is compiled instead ({} more like it before)", text, *held_back);
  }
}

std::optional<CompiledKernel> BundleSet::load_from(const Bundle& bundle, const ArtifactKey& key,
                                                   const Specialization& spec) {
  const Bundle::Item* item = bundle.find(key.digest());
  if (item == nullptr) return std::nullopt;
  try {
    auto decoded = decode_entry(bundle.read(*item), key, spec);
    if (auto* kernel = std::get_if<CompiledKernel>(&decoded)) return std::move(*kernel);
    reject(fmt::format("bundle '{}': entry {} is refused: {}", bundle.path(), key.name(),
                       std::get<EntryFault>(decoded).reason));
  } catch (const Error& failure) {
    reject(failure.what());
  }
  return std::nullopt;
}

void BundleSet::explain_miss(const ArtifactKey& key) {
  if (bundles_.empty() || !log::enabled(log::Level::info)) return;  // reads every entry
  const auto held_back = explanations_.try_pass();
  if (!held_back.has_value()) return;
  for (const Bundle& bundle : bundles_) {
    std::vector<ArtifactKey> stored;
    for (const Bundle::Item& item : bundle.items()) {
      auto found = entry_key(bundle.read(item));
      if (auto* good = std::get_if<ArtifactKey>(&found)) stored.push_back(std::move(*good));
    }
    const ArtifactKey* nearest = nearest_key(stored, key);
    log::line(log::Level::info, "bundle '{}' has no kernel for {}: {}", bundle.path(), key.name(),
              nearest != nullptr ? difference_text(*nearest, key) : "it is empty");
  }
}

}  // namespace qkvjit
