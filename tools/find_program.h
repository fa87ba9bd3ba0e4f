// SPDX-License-Identifier: Apache-2.0
// Finding and running a helper program of the CUDA toolkit, without a shell. Not thread-safe; for tools only.
#pragma once

#include <string>
#include <vector>

namespace qkvjit::tools {

/// The path of `name` on PATH, in $CUDA_HOME/bin, $CUDA_PATH/bin, /usr/local/cuda*/bin or the nvidia wheels of
/// $VIRTUAL_ENV; empty where it is in none.
std::string find_program(const std::string& name);

/// What the program writes to its standard output. Throws Error with its exit code where that is not 0.
std::string run_program(const std::vector<std::string>& command);

/// A private empty file under $TMPDIR (or /tmp), removed in the destructor.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& suffix);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;  // one owner
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace qkvjit::tools
