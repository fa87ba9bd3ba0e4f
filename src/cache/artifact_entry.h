// SPDX-License-Identifier: Apache-2.0
// A compiled kernel as the bytes of a cache entry: magic "QKVENTRY", u32 format version, the key's text, lowered name,
// PTX, cubin, log, options, NVRTC version, figures, and the SHA-256 of all before it. Pure; bounds-checked.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "cache/artifact_key.h"
#include "qkvjit/kernel_cache.h"

namespace qkvjit {

std::string encode_entry(const ArtifactKey& key, const CompiledKernel& kernel);

/// Why an entry is not taken: "checksum", "key", …
struct EntryFault {
  std::string reason;
};

/// The kernel of `spec`, whose key is `key`; a fault where the bytes are damaged or of another key.
std::variant<CompiledKernel, EntryFault> decode_entry(std::string_view bytes, const ArtifactKey& key,
                                                      const Specialization& spec);

/// The key that an entry says it has, after its checksum was compared.
std::variant<ArtifactKey, EntryFault> entry_key(std::string_view bytes);

}  // namespace qkvjit
