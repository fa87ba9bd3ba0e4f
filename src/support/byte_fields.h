// SPDX-License-Identifier: Apache-2.0
// Binary fields, one behind the other: integers little-endian, texts behind a 32-bit length. Reading never passes the
// end: what is missing makes failed() true, and reads as zero or empty from there on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "support/sha256.h"

namespace qkvjit {

template <typename T>
void put(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(value >> (8 * i) & 255);
}

inline void put(std::string& out, const Sha256& digest) { out.append(digest.begin(), digest.end()); }

inline void put_text(std::string& out, std::string_view text) {
  put(out, static_cast<std::uint32_t>(text.size()));
  out += text;
}

class ByteFields {
 public:
  explicit ByteFields(std::string_view bytes) : bytes_(bytes) {}

  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size(); }
  [[nodiscard]] bool failed() const noexcept { return failed_; }
  /// Whether every byte was read, and no more.
  [[nodiscard]] bool complete() const noexcept { return !failed_ && bytes_.empty(); }

  std::string_view raw(std::size_t size) {
    if (failed_ || size > bytes_.size()) {
      failed_ = true;
      return {};
    }
    const std::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }
  std::string_view text() { return raw(integer<std::uint32_t>()); }
  template <typename T>
  T integer() {
    T value = 0;
    unsigned shift = 0;
    for (const char byte : raw(sizeof(T))) {
      value |= static_cast<T>(static_cast<T>(static_cast<unsigned char>(byte)) << shift);
      shift += 8;
    }
    return value;
  }
  Sha256 digest() {
    Sha256 value{};
    std::size_t at = 0;
    for (const char byte : raw(value.size())) value[at++] = static_cast<unsigned char>(byte);
    return value;
  }

 private:
  std::string_view bytes_;
  bool failed_ = false;
};

}  // namespace qkvjit
