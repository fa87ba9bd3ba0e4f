// SPDX-License-Identifier: Apache-2.0
// What qkvjit-cache looks into: a bundle, or the folder that processes share. Entries are read and checked one by one.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/artifact_key.h"
#include "cache/bundle.h"
#include "cache/disk_cache.h"

namespace qkvjit::tools {

/// The folder of `directory`, or the default one where it is empty. Throws Error with the reason where it cannot be
/// used.
std::unique_ptr<DiskCache> open_directory(const std::string& directory);

struct StoredEntry {
  std::string name;  ///< 64 hex digits
  std::uint64_t bytes = 0;
  std::optional<std::chrono::system_clock::time_point> last_use;  ///< in the folder
  std::optional<ArtifactKey> key;
  std::string fault;  ///< empty where the entry is good
};

/// An entry of a bundle: the bundle's checksum, the entry's own, and that it lies under the name of its key. Its bytes
/// go to `bytes` where that is not null.
StoredEntry examine(const Bundle& bundle, const Bundle::Item& item, std::string* bytes = nullptr);

/// All entries of the bundle `path`; where `path` is empty, of the folder, the least recently used first.
std::vector<StoredEntry> read_entries(const std::string& path, const std::string& directory);

}  // namespace qkvjit::tools
