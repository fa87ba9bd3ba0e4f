// SPDX-License-Identifier: Apache-2.0
// The subcommands of qkvjit-cache. Each writes to the standard output, its progress to the standard error, and returns
// the exit code. They throw what the library throws.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace qkvjit::tools {

struct CacheArguments {
  std::string bundle;     ///< empty: the folder
  std::string directory;  ///< empty: the default folder
  std::string problems, output;
  std::vector<std::string> arches;
  std::uint64_t max_bytes = 0;
  unsigned threads = 0;
  int multiprocessors = 0;  ///< 0: the usual number
  int device = 0;
  bool json = false;
};

// cache_commands.cpp
int list_entries(const CacheArguments& args);
int show_totals(const CacheArguments& args);
int verify_entries(const CacheArguments& args);
int explain_misses(const CacheArguments& args);
int trim_folder(const CacheArguments& args);
int clear_folder(const CacheArguments& args);
int import_bundle(const CacheArguments& args);

// cache_make.cpp
int export_bundle(const CacheArguments& args);
int warm_folder(const CacheArguments& args);

void print_json(const nlohmann::ordered_json& json);

}  // namespace qkvjit::tools
