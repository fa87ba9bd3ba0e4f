// SPDX-License-Identifier: Apache-2.0
// SHA-256 (libsodium's), and digests as the 64 hex digits that name cache entries. Stateless and thread-safe.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace qkvjit {

using Sha256 = std::array<unsigned char, 32>;

Sha256 sha256(std::string_view bytes);

/// Lower-case.
std::string to_hex(const Sha256& digest);
/// Nothing where `text` is not 64 lower-case hex digits.
std::optional<Sha256> parse_hex(std::string_view text);

}  // namespace qkvjit
