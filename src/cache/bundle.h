// SPDX-License-Identifier: Apache-2.0
// A bundle (.qkvb): many cache entries in one file that can be copied to another machine and is read where it lies.
//
//   header    magic "QKVBNDL\n", u32 format version, u32 bytes of producer, u64 entries, u64 bytes of the file,
//             SHA-256 of producer and index, SHA-256 of the header before it                            96 bytes
//   producer  three texts, each a u32 length and its bytes: qkvjit version, templates digest, NVRTC version
//   index     an entry each, ascending by key: key (32 bytes), u64 offset, u64 length, SHA-256            80 bytes
//   entries   as the disk cache encodes them, one behind the other, in the order of the index
//
// Integers are little-endian. Equal input makes equal bytes. The entries fill the file exactly, so that neither gaps
// nor overlaps nor bytes behind them pass.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/file.h"
#include "support/sha256.h"

namespace qkvjit {

/// What made the entries. Where a field differs from the reader's own, no key of the bundle can match.
struct BundleProducer {
  std::string qkvjit_version;
  std::string templates_digest;
  std::string nvrtc_version;

  bool operator==(const BundleProducer&) const = default;
};

/// "templates digest: the bundle has 1f…, this build needs 9c…; …", or nothing where all fields that keys depend on are
/// equal. An empty NVRTC version on either side is not compared.
std::string producer_mismatch(const BundleProducer& bundle, const BundleProducer& needed);

struct BundleEntry {
  Sha256 key{};
  std::string bytes;
};

/// Writes the file at once or not at all. Throws Error for a key given twice, or where it cannot be written.
void write_bundle(const std::string& path, std::vector<BundleEntry> entries, const BundleProducer& producer);

/// An open bundle: header and index, checked. Entries are read, and checked against their SHA-256, one by one. Reads go
/// through the descriptor, not a mapping: a file that is cut short or overwritten meanwhile makes a failed read, where
/// a mapping would end the process. Immutable; may be used from any thread.
class Bundle {
 public:
  struct Item {
    Sha256 key{};
    std::uint64_t offset = 0;
    std::uint64_t length = 0;
    Sha256 checksum{};
  };

  /// Throws Error with the field at fault, what it holds and what it needs.
  static Bundle open(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const BundleProducer& producer() const noexcept { return producer_; }
  [[nodiscard]] std::span<const Item> items() const noexcept { return items_; }  ///< ascending by key
  [[nodiscard]] const Item* find(const Sha256& key) const noexcept;

  /// The bytes of one of items(). Throws Error where they cannot be read or do not match their checksum.
  [[nodiscard]] std::string read(const Item& item) const;

 private:
  Bundle() = default;

  std::string path_;
  FileDescriptor file_;
  BundleProducer producer_;
  std::vector<Item> items_;
};

}  // namespace qkvjit
