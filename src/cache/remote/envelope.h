// SPDX-License-Identifier: Apache-2.0
// What the server keeps: the entry's bytes behind a header that proves them to belong to this name and, where there
// is a key, to have been written by someone who has it.
//
//   0  magic "qkvjit\r\n"    8  version, u32    12  proof, u32 (1: SHA-256, 2: HMAC-SHA256)    16  size, u64
//   24 the proof's 32 bytes, over the 24 bytes above, the name and the entry    56  the entry
// Numbers are little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace qkvjit::remote {

inline constexpr std::size_t kEnvelopeBytes = 56;

enum class Verdict : std::uint8_t { good, not_ours, other_proof, forged };

/// `key` empty: SHA-256 instead of HMAC-SHA256.
std::string seal(std::string_view key, std::string_view name, std::string_view entry);

/// Looks at nothing behind the header before the proof holds. `entry` points into `sealed`.
Verdict unseal(std::string_view key, std::string_view name, std::string_view sealed, std::string_view& entry);

}  // namespace qkvjit::remote
