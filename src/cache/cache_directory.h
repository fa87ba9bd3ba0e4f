// SPDX-License-Identifier: Apache-2.0
// Where the disk cache lies, and whether that folder can be trusted: code is loaded from it. Linux only.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "support/file.h"

namespace qkvjit {

/// $QKVJIT_CACHE_DIR (set to nothing: no disk cache), else $XDG_CACHE_HOME/qkvjit, else $HOME/.cache/qkvjit; empty
/// where none is set. The latter two count only where they are absolute.
std::filesystem::path default_cache_directory();

struct CacheDirectory {
  FileDescriptor descriptor;  ///< open, or -1
  std::string refusal;        ///< why not: "'/path' …; what to do"
};

/// Opens `path`, made with mode 0700 where it is absent, parents too. Refuses a folder that someone else owns or that
/// group or others may write to, and a symlink on the way that is neither ours nor root's.
CacheDirectory open_cache_directory(const std::filesystem::path& path);

}  // namespace qkvjit
