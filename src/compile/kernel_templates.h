// SPDX-License-Identifier: Apache-2.0
// The device sources, embedded at build time byte for byte (cmake/embed_templates.cmake writes the definition).
// Constant data: nothing to own, safe from any thread.
#pragma once

#include <span>
#include <string_view>

namespace qkvjit {

struct TemplateFile {
  std::string_view name;  ///< as the files include each other: "common/dequantize.cuh", "qkvjit/specialization.h"
  std::string_view text;
};

/// Every file, ascending by name.
std::span<const TemplateFile> kernel_templates() noexcept;

/// SHA-256, lower-case hex, over the names and contents; scripts/templates_digest prints the same for a tree.
std::string_view templates_digest() noexcept;

}  // namespace qkvjit
