// SPDX-License-Identifier: Apache-2.0
// The names of a cache folder's files, and what is done to one of them.
#pragma once

#include <string>

namespace qkvjit {

inline constexpr const char* kEntrySuffix = ".qkve";
inline constexpr const char* kTemporarySuffix = ".tmp";
inline constexpr const char* kLockFile = "locks";

/// Now is its last use. The time of access would not do: most systems are mounted without.
void mark_used(int folder, const std::string& name) noexcept;

/// Removes what lies in the entry's place, whatever it is; a folder that is not empty gets another name.
bool remove_entry(int folder, const std::string& name);

}  // namespace qkvjit
