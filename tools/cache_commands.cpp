// SPDX-License-Identifier: Apache-2.0
#include "cache_commands.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "cache/artifact_entry.h"
#include "cache/bundle_set.h"
#include "compile/compiler.h"
#include "cuda/nvrtc.h"
#include "problem_list.h"
#include "qkvjit/error.h"
#include "support/parallel.h"

namespace qkvjit::tools {
namespace {

using Json = nlohmann::ordered_json;

std::vector<Specialization> specializations_of(const CacheArguments& args) {
  std::vector<Target> targets;
  for (const std::string& arch : args.arches) targets.push_back(parse_target(arch));
  return specializations_for(read_problem_list(args.problems), targets, args.multiprocessors);
}

void print(const Json& json) { std::cout << json.dump(2, ' ', true, Json::error_handler_t::replace) << '\n'; }

/// "qkv_decode m16n64_w1x1x8_s4_b2 sm_90", for progress.
std::string label(const Specialization& spec) {
  return fmt::format("qkv_{} {} {}", to_string(spec.pipeline), tile_name(spec.tile), to_string(spec.target));
}

/// Compiles on several threads and says so as it goes: in place on a terminal, a line a kernel elsewhere. The first
/// failure stops what has not begun.
class ParallelCompile {
 public:
  ParallelCompile(const NvrtcTable& nvrtc, const std::vector<Specialization>& specs) : nvrtc_(nvrtc), specs_(specs) {}

  std::vector<BundleEntry> run(unsigned threads) {
    std::vector<BundleEntry> entries(specs_.size());
    for_each_parallel(specs_.size(), threads, [&](std::size_t i) {
      if (has_failed()) return;
      try {
        const ArtifactKey key = ArtifactKey::of(specs_[i], nvrtc_);
        entries[i] = {key.digest(), encode_entry(key, compile_kernel(nvrtc_, specs_[i]))};
        report(specs_[i]);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (failure_ == nullptr) failure_ = std::current_exception();
      }
    });
    if (is_terminal_) std::cerr << "\x1b[2K" << std::flush;
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    return entries;
  }

 private:
  bool has_failed() {
    const std::lock_guard lock(mutex_);
    return failure_ != nullptr;
  }
  void report(const Specialization& spec) {
    const std::lock_guard lock(mutex_);
    std::cerr << fmt::format("{}[{}/{}] {}{}", is_terminal_ ? "\x1b[2K" : "", ++done_, specs_.size(), label(spec),
                             is_terminal_ ? "\r" : "\n")
              << std::flush;
  }

  const NvrtcTable& nvrtc_;
  const std::vector<Specialization>& specs_;
  const bool is_terminal_ = isatty(STDERR_FILENO) != 0;
  std::mutex mutex_;  // of the two below and the standard error
  std::size_t done_ = 0;
  std::exception_ptr failure_;
};

struct Row {
  const Bundle::Item* item = nullptr;
  std::optional<ArtifactKey> key;
  std::string fault;  ///< empty where the entry is good
};

/// Reads one entry: the bundle's checksum, the entry's own, and that it lies under the name of its key.
Row examine(const Bundle& bundle, const Bundle::Item& item) {
  Row row{&item, {}, {}};
  try {
    auto key = entry_key(bundle.read(item));
    if (const auto* fault = std::get_if<EntryFault>(&key)) {
      row.fault = fmt::format("entry {} is refused: {}", to_hex(item.key), fault->reason);
    } else {
      row.key = std::get<ArtifactKey>(std::move(key));
      if (row.key->digest() != item.key) row.fault = fmt::format("entry {} is of another key", to_hex(item.key));
    }
  } catch (const Error& error) {
    row.fault = error.what();
  }
  return row;
}

std::string kernel_of(const ArtifactKey& key) {
  return fmt::format("K = {}, N = {}+{}+{}, {}, {}, {}", key.field("k"), key.field("n_q"), key.field("n_k"),
                     key.field("n_v"), key.field("layout"), key.field("pipeline"),
                     key.field("aligned") == "true" ? "aligned" : "any");
}

Json producer_json(const BundleProducer& producer) {
  return {{"qkvjit_version", producer.qkvjit_version},
          {"templates_digest", producer.templates_digest},
          {"nvrtc_version", producer.nvrtc_version}};
}

}  // namespace

int export_bundle(const CacheArguments& args) {
  const std::vector<Specialization> specs = specializations_of(args);
  const std::shared_ptr<const NvrtcTable> nvrtc = open_nvrtc();
  const auto start = std::chrono::steady_clock::now();
  std::vector<BundleEntry> entries = ParallelCompile(*nvrtc, specs).run(args.threads);
  std::uint64_t bytes = 0;
  for (const BundleEntry& entry : entries) bytes += entry.bytes.size();
  write_bundle(args.output, std::move(entries), producer_of(*nvrtc));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (args.json) {
    print({{"bundle", args.output}, {"kernels", specs.size()}, {"bytes", bytes}, {"seconds", seconds}});
  } else {
    fmt::print("{}: {} kernels, {:.1f} MB, compiled in {:.1f} s\n", args.output, specs.size(),
               static_cast<double>(bytes) / 1e6, seconds);
  }
  return 0;
}

int list_bundle(const CacheArguments& args) {
  const Bundle bundle = Bundle::open(args.bundle);
  Json json = Json::array();
  for (const Bundle::Item& item : bundle.items()) {
    const Row row = examine(bundle, item);
    if (args.json) {
      Json fields = Json::object();
      if (row.key.has_value()) {
        for (const auto& [name, value] : row.key->fields()) fields[name] = value;
      }
      Json entry = {{"name", to_hex(item.key)}, {"bytes", item.length}, {"fields", fields}};
      if (!row.fault.empty()) entry["fault"] = row.fault;
      json.push_back(entry);
    } else {
      fmt::print("{:.16} {:>9} {:<8} {}\n", to_hex(item.key), item.length,
                 row.key.has_value() ? row.key->field("target") : "-",
                 row.fault.empty() ? kernel_of(*row.key) : row.fault);
    }
  }
  if (args.json) print(json);
  return 0;
}

int stat_bundle(const CacheArguments& args) {
  const Bundle bundle = Bundle::open(args.bundle);
  std::uint64_t bytes = 0;
  for (const Bundle::Item& item : bundle.items()) bytes += item.length;
  const BundleProducer& producer = bundle.producer();
  if (args.json) {
    print({{"bundle", args.bundle},
           {"entries", bundle.items().size()},
           {"bytes", bytes},
           {"producer", producer_json(producer)}});
  } else {
    fmt::print("entries    {}\nbytes      {}\nqkvjit     {}\ntemplates  {}\nNVRTC      {}\n", bundle.items().size(),
               bytes, producer.qkvjit_version, producer.templates_digest, producer.nvrtc_version);
  }
  return 0;
}

int verify_bundle(const CacheArguments& args) {
  const Bundle bundle = Bundle::open(args.bundle);
  Json faults = Json::array();
  for (const Bundle::Item& item : bundle.items()) {
    const Row row = examine(bundle, item);
    if (row.fault.empty()) continue;
    if (!args.json) fmt::print("{}\n", row.fault);
    faults.push_back({{"name", to_hex(item.key)}, {"fault", row.fault}});
  }
  const std::size_t bad = faults.size(), good = bundle.items().size() - bad;
  if (args.json) {
    print({{"good", good}, {"bad", bad}, {"faults", faults}});
  } else {
    fmt::print("{} good, {} bad\n", good, bad);
  }
  return bad == 0 ? 0 : 1;
}

int explain_bundle(const CacheArguments& args) {
  const Bundle bundle = Bundle::open(args.bundle);
  const std::vector<Specialization> specs = specializations_of(args);
  const std::shared_ptr<const NvrtcTable> nvrtc = open_nvrtc();
  const std::string mismatch = producer_mismatch(bundle.producer(), producer_of(*nvrtc));
  if (!args.json && !mismatch.empty()) fmt::print("{}\n", mismatch);
  Json missing = Json::array();
  for (const Specialization& spec : specs) {
    const ArtifactKey needed = ArtifactKey::of(spec, *nvrtc);
    if (bundle.find(needed.digest()) != nullptr) continue;
    const auto nearest = nearest_key(bundle, needed);
    Json differing = Json::array();
    if (nearest.has_value()) {
      for (const auto& [name, has, needs] : differences(*nearest, needed)) {
        differing.push_back({{"field", name}, {"stored", has}, {"needed", needs}});
      }
    }
    if (!args.json) {
      fmt::print("missing {}: {}\n", label(spec),
                 nearest.has_value() ? difference_text(*nearest, needed) : "the bundle is empty");
    }
    missing.push_back({{"kernel", label(spec)},
                       {"name", needed.name()},
                       {"nearest", nearest.has_value() ? nearest->name() : ""},
                       {"differences", differing}});
  }
  if (args.json) {
    print({{"needed", specs.size()}, {"mismatch", mismatch}, {"missing", missing}});
  } else {
    fmt::print("{} of {} kernels are there\n", specs.size() - missing.size(), specs.size());
  }
  return missing.empty() ? 0 : 1;
}

}  // namespace qkvjit::tools
