// SPDX-License-Identifier: Apache-2.0
// The subcommands that look into a bundle or the folder, and those that change the folder.
#include "cache_commands.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <unordered_set>

#include "cache/bundle_set.h"
#include "cache_store.h"
#include "compile/kernel_templates.h"
#include "compile/name_expression.h"
#include "cuda/nvrtc.h"
#include "problem_list.h"
#include "qkvjit/error.h"

namespace qkvjit::tools {
namespace {

using Json = nlohmann::ordered_json;

std::string kernel_of(const ArtifactKey& key) {
  return fmt::format("K = {}, N = {}+{}+{}, {}, {}, {}", key.field("k"), key.field("n_q"), key.field("n_k"),
                     key.field("n_v"), key.field("layout"), key.field("pipeline"),
                     key.field("aligned") == "true" ? "aligned" : "any");
}

/// "2026-01-31T12:00:00Z"
std::string time_text(std::chrono::system_clock::time_point time) {
  return fmt::format("{:%FT%T}Z", fmt::gmtime(std::chrono::system_clock::to_time_t(time)));
}

Json entry_json(const StoredEntry& entry) {
  Json fields = Json::object();
  if (entry.key.has_value()) {
    for (const auto& [name, value] : entry.key->fields()) fields[name] = value;
  }
  Json json = {{"name", entry.name}, {"bytes", entry.bytes}, {"fields", fields}};
  if (entry.last_use.has_value()) json["last_use"] = time_text(*entry.last_use);
  if (!entry.fault.empty()) json["fault"] = entry.fault;
  return json;
}

void print_removed(const CacheArguments& args, const DiskCache::Removed& removed) {
  if (args.json) {
    print_json({{"removed", removed.entries}, {"removed_bytes", removed.bytes}});
  } else {
    fmt::print("{} entries removed, {} bytes\n", removed.entries, removed.bytes);
  }
}

}  // namespace

void print_json(const Json& json) { std::cout << json.dump(2, ' ', true, Json::error_handler_t::replace) << '\n'; }

int list_entries(const CacheArguments& args) {
  Json json = Json::array();
  for (const StoredEntry& entry : read_entries(args.bundle, args.directory)) {
    if (args.json) {
      json.push_back(entry_json(entry));
      continue;
    }
    fmt::print("{:.16} {:>9} {:<8} {}{}\n", entry.name, entry.bytes,
               entry.key.has_value() ? entry.key->field("target") : "-",
               entry.last_use.has_value() ? time_text(*entry.last_use) + " " : "",
               entry.fault.empty() ? kernel_of(*entry.key) : entry.fault);
  }
  if (args.json) print_json(json);
  return 0;
}

int show_totals(const CacheArguments& args) {
  Json json;
  std::uint64_t bytes = 0;
  if (!args.bundle.empty()) {
    const Bundle bundle = Bundle::open(args.bundle);
    for (const Bundle::Item& item : bundle.items()) bytes += item.length;
    json = {{"bundle", args.bundle},
            {"entries", bundle.items().size()},
            {"bytes", bytes},
            {"qkvjit", bundle.producer().qkvjit_version},
            {"templates", bundle.producer().templates_digest},
            {"nvrtc", bundle.producer().nvrtc_version}};
  } else {
    const auto disk = open_directory(args.directory);
    const std::vector<DiskCache::Entry> entries = disk->list();
    for (const DiskCache::Entry& entry : entries) bytes += entry.bytes;
    json = {{"directory", disk->directory().string()}, {"entries", entries.size()}, {"bytes", bytes}};
    if (!entries.empty()) {
      json["oldest_use"] = time_text(entries.front().last_use);
      json["newest_use"] = time_text(entries.back().last_use);
    }
  }
  if (args.json) {
    print_json(json);
  } else {
    for (const auto& [name, value] : json.items()) {
      fmt::print("{:<12} {}\n", name, value.is_string() ? value.get<std::string>() : value.dump());
    }
  }
  return 0;
}

int verify_entries(const CacheArguments& args) {
  Json faults = Json::array();
  std::size_t good = 0;
  const auto add = [&](const std::string& name, const std::string& fault) {
    if (!args.json) fmt::print("{}\n", fault);
    faults.push_back({{"name", name}, {"fault", fault}});
  };
  if (args.bundle.empty()) {
    const DiskCache::Verified verified = open_directory(args.directory)->verify();
    good = verified.good;
    for (const auto& [name, reason] : verified.bad) add(name, fmt::format("entry {} was removed: {}", name, reason));
  } else {
    for (const StoredEntry& entry : read_entries(args.bundle, {})) {
      if (entry.fault.empty()) {
        ++good;
      } else {
        add(entry.name, entry.fault);
      }
    }
  }
  if (args.json) {
    print_json({{"good", good}, {"bad", faults.size()}, {"faults", faults}});
  } else {
    fmt::print("{} good, {} bad\n", good, faults.size());
  }
  return faults.empty() ? 0 : 1;
}

int explain_misses(const CacheArguments& args) {
  const std::vector<Specialization> specs = read_specializations(args.problems, args.arches, args.multiprocessors);
  const std::shared_ptr<const NvrtcTable> nvrtc = open_nvrtc();
  const std::string mismatch =
      args.bundle.empty() ? "" : producer_mismatch(Bundle::open(args.bundle).producer(), producer_of(*nvrtc));
  std::vector<ArtifactKey> stored;
  std::unordered_set<std::string> names;
  for (StoredEntry& entry : read_entries(args.bundle, args.directory)) {
    if (!entry.fault.empty()) continue;
    names.insert(entry.name);
    stored.push_back(*std::move(entry.key));
  }
  if (!args.json && !mismatch.empty()) fmt::print("{}\n", mismatch);
  Json missing = Json::array();
  for (const Specialization& spec : specs) {
    const ArtifactKey needed = ArtifactKey::of(spec, *nvrtc);
    if (names.contains(needed.name())) continue;
    const ArtifactKey* nearest = nearest_key(stored, needed);
    Json differing = Json::array();
    if (nearest != nullptr) {
      for (const auto& [name, has, needs] : differences(*nearest, needed)) {
        differing.push_back({{"field", name}, {"stored", has}, {"needed", needs}});
      }
    }
    if (!args.json) {
      fmt::print("missing {}: {}\n", kernel_label(spec),
                 nearest != nullptr ? difference_text(*nearest, needed) : "nothing is stored");
    }
    missing.push_back({{"kernel", kernel_label(spec)},
                       {"name", needed.name()},
                       {"nearest", nearest != nullptr ? nearest->name() : ""},
                       {"differences", differing}});
  }
  if (args.json) {
    print_json({{"needed", specs.size()}, {"mismatch", mismatch}, {"missing", missing}});
  } else {
    fmt::print("{} of {} kernels are there\n", specs.size() - missing.size(), specs.size());
  }
  return missing.empty() ? 0 : 1;
}

int trim_folder(const CacheArguments& args) {
  print_removed(args, open_directory(args.directory)->trim(args.max_bytes));
  return 0;
}

int clear_folder(const CacheArguments& args) {
  print_removed(args, open_directory(args.directory)->clear());
  return 0;
}

int import_bundle(const CacheArguments& args) {
  const Bundle bundle = Bundle::open(args.bundle);
  const auto disk = open_directory(args.directory);
  const BundleProducer here{{}, std::string(templates_digest()), {}};
  if (const std::string mismatch = producer_mismatch(bundle.producer(), here); !mismatch.empty()) {
    std::cerr << fmt::format("qkvjit-cache: {}; this build will not find these kernels\n", mismatch);
  }
  std::size_t stored = 0, failed = 0;
  Json faults = Json::array();
  for (const Bundle::Item& item : bundle.items()) {
    std::string bytes;
    const StoredEntry entry = examine(bundle, item, &bytes);
    if (!entry.fault.empty()) {
      std::cerr << fmt::format("qkvjit-cache: {}; it is left out\n", entry.fault);
      faults.push_back({{"name", entry.name}, {"fault", entry.fault}});
    } else if (disk->write(entry.name, bytes)) {
      ++stored;
    } else {
      ++failed;  // the log says why
    }
  }
  if (args.json) {
    print_json({{"directory", disk->directory().string()},
                {"stored", stored},
                {"not_written", failed},
                {"bad", faults.size()},
                {"faults", faults}});
  } else {
    fmt::print("{}: {} entries stored, {} not written, {} bad\n", disk->directory().string(), stored, failed,
               faults.size());
  }
  return failed == 0 && faults.empty() ? 0 : 1;
}

}  // namespace qkvjit::tools
