// SPDX-License-Identifier: Apache-2.0
// What names a compiled artifact: everything that its bytes depend on, as text, and the SHA-256 of that text. Nothing
// of it tells a path, a time or an environment. Immutable.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qkvjit/specialization.h"
#include "support/sha256.h"

namespace qkvjit {

struct NvrtcTable;
struct TemplateFile;

class ArtifactKey {
 public:
  using Field = std::pair<std::string, std::string>;  ///< name and value

  /// Of `spec` compiled by `nvrtc` from this build's templates.
  static ArtifactKey of(const Specialization& spec, const NvrtcTable& nvrtc);
  /// From the text of another key; nothing where it is none.
  static std::optional<ArtifactKey> parse(std::string_view text);

  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] const Sha256& digest() const noexcept { return digest_; }
  [[nodiscard]] std::string name() const { return to_hex(digest_); }
  [[nodiscard]] const std::vector<Field>& fields() const noexcept { return fields_; }
  /// The field's value; empty where there is none of that name.
  [[nodiscard]] std::string_view field(std::string_view name) const noexcept;
  /// Whether it tells compilers apart: see nvrtc_build(). What has no complete key is not stored.
  [[nodiscard]] bool is_complete() const noexcept { return !field("nvrtc").empty(); }

 private:
  ArtifactKey() = default;

  std::string text_;
  std::vector<Field> fields_;
  Sha256 digest_{};
};

/// A field that two keys do not share; empty where one has no such field.
struct FieldDifference {
  std::string name, has, needs;
};
std::vector<FieldDifference> differences(const ArtifactKey& has, const ArtifactKey& needs);

/// "13.0.88": the version with the build number, which is looked for in the library's file; where it is not found
/// there, "13.0." and the digest of the file. Empty where the file cannot be read. Read once for a file.
std::string nvrtc_build(const NvrtcTable& nvrtc);

/// "qkv_x.cu includes <y.h>, …" where a template includes what is not among `files`: its text is in no digest. Empty
/// where there is none.
std::string unknown_include(std::span<const TemplateFile> files);

}  // namespace qkvjit
