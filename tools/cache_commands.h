// SPDX-License-Identifier: Apache-2.0
// The subcommands of qkvjit-cache. Each writes to the standard output, its progress to the standard error, and returns
// the exit code. They throw what the library throws.
#pragma once

#include <string>
#include <vector>

namespace qkvjit::tools {

struct CacheArguments {
  std::string bundle, problems, output;
  std::vector<std::string> arches;
  unsigned threads = 0;
  int multiprocessors = 0;  ///< 0: the usual number
  bool json = false;
};

int export_bundle(const CacheArguments& args);
int list_bundle(const CacheArguments& args);
int stat_bundle(const CacheArguments& args);
int verify_bundle(const CacheArguments& args);
int explain_bundle(const CacheArguments& args);

}  // namespace qkvjit::tools
