// SPDX-License-Identifier: Apache-2.0
#include "cache/bundle.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "qkvjit/error.h"
#include "support/byte_fields.h"

namespace qkvjit {
namespace {

constexpr std::string_view kMagic = "QKVBNDL\n";
constexpr std::uint32_t kFormatVersion = 1;
constexpr std::size_t kHeaderBytes = 96;
constexpr std::size_t kHeaderChecksumAt = 64;
constexpr std::size_t kItemBytes = 80;
constexpr std::size_t kMaxProducerBytes = 4096;

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw Error(fmt::format("bundle '{}': {}", path, reason));
}

std::string producer_bytes(const BundleProducer& producer) {
  std::string out;
  for (const std::string* text : {&producer.qkvjit_version, &producer.templates_digest, &producer.nvrtc_version}) {
    put_text(out, *text);
  }
  return out;
}

BundleProducer parse_producer(const std::string& path, std::string_view bytes) {
  BundleProducer producer;
  ByteFields fields(bytes);
  for (std::string* text : {&producer.qkvjit_version, &producer.templates_digest, &producer.nvrtc_version}) {
    *text = fields.text();
  }
  if (!fields.complete()) {
    refuse(path, fmt::format("the producer's texts do not fill the {} bytes that the header says", bytes.size()));
  }
  return producer;
}

std::vector<Bundle::Item> parse_index(const std::string& path, std::string_view bytes, std::uint64_t begin,
                                      std::uint64_t end) {
  std::vector<Bundle::Item> items;
  items.reserve(bytes.size() / kItemBytes);
  std::uint64_t expected = begin;
  for (ByteFields fields(bytes); fields.left() != 0;) {
    Bundle::Item item;
    item.key = fields.digest();
    item.offset = fields.integer<std::uint64_t>();
    item.length = fields.integer<std::uint64_t>();
    item.checksum = fields.digest();
    const std::string name = to_hex(item.key);
    if (!items.empty() && !(items.back().key < item.key)) {
      refuse(path, fmt::format("entry {} follows {}; keys must ascend, each once", name, to_hex(items.back().key)));
    }
    if (item.offset != expected) {
      refuse(path, fmt::format("entry {}: its offset is {}, needs {}", name, item.offset, expected));
    }
    if (item.length > end - expected) {
      refuse(path, fmt::format("entry {}: its length is {}, but {} bytes follow", name, item.length, end - expected));
    }
    expected += item.length;
    items.push_back(item);
  }
  if (expected != end) refuse(path, fmt::format("the entries end at {}, the file at {}", expected, end));
  return items;
}

}  // namespace

std::string producer_mismatch(const BundleProducer& bundle, const BundleProducer& needed) {
  std::vector<std::string> lines;
  const auto compare = [&](const char* field, const std::string& has, const std::string& needs) {
    if (has.empty() || needs.empty() || has == needs) return;
    lines.push_back(fmt::format("{}: the bundle has {}, this build needs {}", field, has, needs));
  };
  compare("templates digest", bundle.templates_digest, needed.templates_digest);
  compare("NVRTC version", bundle.nvrtc_version, needed.nvrtc_version);
  return fmt::format("{}", fmt::join(lines, "; "));
}

void write_bundle(const std::string& path, std::vector<BundleEntry> entries, const BundleProducer& producer) {
  std::ranges::sort(entries, {}, &BundleEntry::key);
  const auto twice = std::ranges::adjacent_find(entries, {}, &BundleEntry::key);
  if (twice != entries.end()) refuse(path, fmt::format("entry {} is given twice", to_hex(twice->key)));
  const std::string produced = producer_bytes(producer);
  if (produced.size() > kMaxProducerBytes) {
    refuse(path, fmt::format("the producer's texts take {} bytes, at most {} are allowed", produced.size(),
                             kMaxProducerBytes));
  }

  std::string described = produced;  // producer and index: what the index checksum covers
  std::uint64_t offset = kHeaderBytes + produced.size() + entries.size() * kItemBytes;
  for (const BundleEntry& entry : entries) {
    put(described, entry.key);
    put(described, offset);
    put(described, static_cast<std::uint64_t>(entry.bytes.size()));
    put(described, sha256(entry.bytes));
    offset += entry.bytes.size();
  }
  std::string header(kMagic);
  put(header, kFormatVersion);
  put(header, static_cast<std::uint32_t>(produced.size()));
  put(header, static_cast<std::uint64_t>(entries.size()));
  put(header, offset);
  put(header, sha256(described));
  put(header, sha256(header));

  AtomicFile file("bundle", path);
  file.write(std::as_bytes(std::span(header)));
  file.write(std::as_bytes(std::span(described)));
  for (const BundleEntry& entry : entries) file.write(std::as_bytes(std::span(entry.bytes)));
  file.commit();
}

Bundle Bundle::open(const std::string& path) {
  Bundle bundle;
  bundle.path_ = path;
  // A pipe must not make it wait.
  bundle.file_ = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  const int descriptor = bundle.file_.get();
  if (descriptor < 0) refuse(path, fmt::format("cannot be opened: {}", error_text(errno)));
  struct stat facts {};
  if (fstat(descriptor, &facts) != 0) refuse(path, fmt::format("cannot be read: {}", error_text(errno)));
  if (!S_ISREG(facts.st_mode)) refuse(path, "is not a regular file");
  const auto size = static_cast<std::uint64_t>(facts.st_size);
  if (size < kHeaderBytes) refuse(path, fmt::format("has {} bytes, needs at least {}", size, kHeaderBytes));

  const auto read = [&](std::uint64_t offset, std::size_t count) {
    std::string bytes(count, '\0');
    if (const std::string error = read_exactly(descriptor, offset, bytes.data(), count); !error.empty()) {
      refuse(path, fmt::format("cannot be read: {}", error));
    }
    return bytes;
  };
  const std::string header = read(0, kHeaderBytes);
  ByteFields fields(header);
  if (fields.raw(kMagic.size()) != kMagic) refuse(path, "does not begin with \"QKVBNDL\"; this is no bundle");
  // Before the checksum: another format may keep its own elsewhere.
  const auto format_version = fields.integer<std::uint32_t>();
  if (format_version != kFormatVersion) {
    refuse(path, fmt::format("its format version is {}, this build reads {}; export it again", format_version,
                             kFormatVersion));
  }
  const std::size_t produced = fields.integer<std::uint32_t>();
  const auto count = fields.integer<std::uint64_t>();
  const auto file_bytes = fields.integer<std::uint64_t>();
  const Sha256 index_checksum = fields.digest();
  if (fields.digest() != sha256(std::string_view(header).substr(0, kHeaderChecksumAt))) {
    refuse(path, "the header does not match its checksum; the file is damaged");
  }
  if (file_bytes != size) {
    refuse(path, fmt::format("has {} bytes, needs {}; the file is cut short or was appended to", size, file_bytes));
  }
  if (produced > kMaxProducerBytes || produced > size - kHeaderBytes ||
      count > (size - kHeaderBytes - produced) / kItemBytes) {
    refuse(path, fmt::format("the header says {} bytes of producer and {} entries, which {} bytes cannot hold",
                             produced, count, size));
  }
  const std::size_t described_bytes = produced + count * kItemBytes;
  const std::string described = read(kHeaderBytes, described_bytes);
  if (sha256(described) != index_checksum) refuse(path, "the index does not match its checksum; the file is damaged");
  bundle.producer_ = parse_producer(path, std::string_view(described).substr(0, produced));
  bundle.items_ = parse_index(path, std::string_view(described).substr(produced), kHeaderBytes + described_bytes, size);
  return bundle;
}

const Bundle::Item* Bundle::find(const Sha256& key) const noexcept {
  const auto found = std::ranges::lower_bound(items_, key, {}, &Item::key);
  return found == items_.end() || found->key != key ? nullptr : &*found;
}

std::string Bundle::read(const Item& item) const {
  std::string bytes(item.length, '\0');
  if (const std::string error = read_exactly(file_.get(), item.offset, bytes.data(), bytes.size()); !error.empty()) {
    refuse(path_, fmt::format("entry {} cannot be read: {}", to_hex(item.key), error));
  }
  if (sha256(bytes) != item.checksum) {
    refuse(path_, fmt::format("entry {} does not match its checksum; the file is damaged", to_hex(item.key)));
  }
  return bytes;
}

}  // namespace qkvjit
