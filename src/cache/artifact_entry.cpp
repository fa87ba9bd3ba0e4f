// SPDX-License-Identifier: Apache-2.0
#include "cache/artifact_entry.h"

#include <bit>
#include <cstdint>

#include "support/byte_fields.h"

namespace qkvjit {
namespace {

constexpr std::string_view kMagic = "QKVENTRY";
constexpr std::uint32_t kFormatVersion = 1;

/// What follows magic and version, without the checksum; or why not.
std::variant<ByteFields, EntryFault> open_entry(std::string_view bytes) {
  constexpr std::size_t kChecksumBytes = sizeof(Sha256);
  if (bytes.size() < kMagic.size() + sizeof kFormatVersion + kChecksumBytes) return EntryFault{"too short"};
  if (!bytes.starts_with(kMagic)) return EntryFault{"magic"};
  ByteFields fields(bytes.substr(0, bytes.size() - kChecksumBytes));
  fields.raw(kMagic.size());
  if (fields.integer<std::uint32_t>() != kFormatVersion) return EntryFault{"format version"};
  ByteFields checksum(bytes.substr(bytes.size() - kChecksumBytes));
  if (checksum.digest() != sha256(bytes.substr(0, bytes.size() - kChecksumBytes))) return EntryFault{"checksum"};
  return fields;
}

}  // namespace

std::string encode_entry(const ArtifactKey& key, const CompiledKernel& kernel) {
  std::string out(kMagic);
  out.reserve(kernel.ptx.size() + kernel.cubin.size() + kernel.log.size() + 4096);
  put(out, kFormatVersion);
  put_text(out, key.text());
  put_text(out, kernel.lowered_name);
  put_text(out, kernel.ptx);
  put_text(out, {kernel.cubin.data(), kernel.cubin.size()});
  put_text(out, kernel.log);
  put(out, static_cast<std::uint32_t>(kernel.options.size()));
  for (const std::string& option : kernel.options) put_text(out, option);
  put_text(out, kernel.nvrtc_version);
  put(out, std::bit_cast<std::uint64_t>(kernel.compile_ms));
  for (const unsigned figure : {kernel.registers, kernel.spill_bytes, kernel.static_smem_bytes}) {
    put(out, std::uint32_t{figure});
  }
  put(out, sha256(out));
  return out;
}

std::variant<CompiledKernel, EntryFault> decode_entry(std::string_view bytes, const ArtifactKey& key,
                                                      const Specialization& spec) {
  auto opened = open_entry(bytes);
  if (auto* fault = std::get_if<EntryFault>(&opened)) return *fault;
  ByteFields& fields = std::get<ByteFields>(opened);
  if (fields.text() != key.text()) return EntryFault{"key"};
  CompiledKernel kernel;
  kernel.spec = spec;
  kernel.lowered_name = fields.text();
  kernel.ptx = fields.text();
  const std::string_view cubin = fields.text();
  kernel.cubin.assign(cubin.begin(), cubin.end());
  kernel.log = fields.text();
  for (auto left = fields.integer<std::uint32_t>(); left > 0 && !fields.failed(); --left) {
    kernel.options.emplace_back(fields.text());
  }
  kernel.nvrtc_version = fields.text();
  kernel.compile_ms = std::bit_cast<double>(fields.integer<std::uint64_t>());
  for (unsigned* figure : {&kernel.registers, &kernel.spill_bytes, &kernel.static_smem_bytes}) {
    *figure = fields.integer<std::uint32_t>();
  }
  if (!fields.complete() || kernel.lowered_name.empty() || (kernel.ptx.empty() && kernel.cubin.empty())) {
    return EntryFault{"content"};
  }
  return kernel;
}

std::variant<ArtifactKey, EntryFault> entry_key(std::string_view bytes) {
  auto opened = open_entry(bytes);
  if (auto* fault = std::get_if<EntryFault>(&opened)) return *fault;
  if (auto key = ArtifactKey::parse(std::get<ByteFields>(opened).text())) return *std::move(key);
  return EntryFault{"key text"};
}

}  // namespace qkvjit
