// SPDX-License-Identifier: Apache-2.0
#include "cache_store.h"

#include <fmt/format.h>

#include <utility>

#include "cache/artifact_entry.h"
#include "qkvjit/error.h"

namespace qkvjit::tools {
namespace {

void check(StoredEntry& entry, std::string_view bytes) {
  auto key = entry_key(bytes);
  if (const auto* fault = std::get_if<EntryFault>(&key)) {
    entry.fault = fmt::format("entry {} is refused: {}", entry.name, fault->reason);
    return;
  }
  entry.key = std::get<ArtifactKey>(std::move(key));
  if (entry.key->name() != entry.name) entry.fault = fmt::format("entry {} is of another key", entry.name);
}

}  // namespace

std::unique_ptr<DiskCache> open_directory(const std::string& directory) {
  DiskCache::Options options;
  if (!directory.empty()) options.directory = directory;
  auto disk = std::make_unique<DiskCache>(options);
  if (!disk->is_usable()) {
    throw Error(fmt::format("the folder cannot be used: {}; name another with --dir", disk->refusal()));
  }
  return disk;
}

StoredEntry examine(const Bundle& bundle, const Bundle::Item& item, std::string* bytes) {
  StoredEntry entry{to_hex(item.key), item.length, {}, {}, {}};
  try {
    std::string content = bundle.read(item);
    check(entry, content);
    if (bytes != nullptr) *bytes = std::move(content);
  } catch (const Error& error) {
    entry.fault = error.what();
  }
  return entry;
}

std::vector<StoredEntry> read_entries(const std::string& path, const std::string& directory) {
  std::vector<StoredEntry> entries;
  if (!path.empty()) {
    const Bundle bundle = Bundle::open(path);
    for (const Bundle::Item& item : bundle.items()) entries.push_back(examine(bundle, item));
    return entries;
  }
  const auto disk = open_directory(directory);
  for (const DiskCache::Entry& found : disk->list()) {
    const auto bytes = disk->read(found.name);
    if (!bytes.has_value()) continue;  // gone meanwhile
    StoredEntry& entry = entries.emplace_back(StoredEntry{found.name, found.bytes, found.last_use, {}, {}});
    check(entry, *bytes);
  }
  return entries;
}

}  // namespace qkvjit::tools
