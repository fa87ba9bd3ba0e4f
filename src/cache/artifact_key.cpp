// SPDX-License-Identifier: Apache-2.0
#include "cache/artifact_key.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <mutex>

#include "compile/compiler.h"
#include "compile/kernel_templates.h"
#include "compile/name_expression.h"
#include "cuda/nvrtc.h"
#include "support/file.h"

namespace qkvjit {
namespace {

constexpr std::string_view kFormat = "1";

/// "release 13.0, V13.0.88" stands once in the library's read-only data.
std::string find_build(const NvrtcTable& nvrtc) {
  const std::string version = fmt::format("{}.{}", nvrtc.major, nvrtc.minor);
  const FileDescriptor file(open(nvrtc.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts {};
  if (file.get() < 0 || fstat(file.get(), &facts) != 0 || !S_ISREG(facts.st_mode) || facts.st_size == 0) return {};
  const auto size = static_cast<std::size_t>(facts.st_size);
  void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) return {};
  const std::string_view bytes(static_cast<const char*>(address), size);
  const std::string mark = fmt::format("release {}, V{}.", version, version);
  std::string build;
  if (const void* at = memmem(bytes.data(), bytes.size(), mark.data(), mark.size()); at != nullptr) {
    const std::string_view rest = bytes.substr(static_cast<const char*>(at) - bytes.data() + mark.size(), 12);
    build = rest.substr(0, rest.find_first_not_of("0123456789"));
  }
  if (build.empty()) build = to_hex(sha256(bytes));
  munmap(address, size);
  return version + "." + build;
}

/// What the line includes, with its quotes or brackets; empty where it is no include.
std::string_view included(std::string_view line) {
  const auto skip = [&](std::string_view blanks) {
    line.remove_prefix(std::min(line.find_first_not_of(blanks), line.size()));
  };
  constexpr std::string_view kWord = "include";
  skip(" \t");
  if (!line.starts_with('#')) return {};
  skip("# \t");
  if (!line.starts_with(kWord)) return {};
  line.remove_prefix(kWord.size());
  skip(" \t");
  const std::size_t end = line.empty() ? 0 : line.find_first_of("\">", 1);
  return line.substr(0, end == std::string_view::npos ? end : end + 1);
}

}  // namespace

std::string nvrtc_build(const NvrtcTable& nvrtc) {
  if (!nvrtc.build.empty()) return nvrtc.build;
  static std::mutex mutex;
  static auto* const kKnown = new std::map<std::string, std::string>;  // leaked: caches may outlive statics
  const std::lock_guard lock(mutex);
  const auto [known, is_new] = kKnown->try_emplace(fmt::format("{} {}.{}", nvrtc.path, nvrtc.major, nvrtc.minor));
  if (is_new) known->second = find_build(nvrtc);
  return known->second;
}

ArtifactKey ArtifactKey::of(const Specialization& spec, const NvrtcTable& nvrtc) {
  std::string text;
  const auto add = [&](std::string_view name, std::string_view value) {
    text += fmt::format("{} {} {}\n", name, value.size(), value);
  };
  add("format", kFormat);
  add("templates", templates_digest());
  add("artifact", "ptx+cubin");
  add("nvrtc", nvrtc_build(nvrtc));
  // The target is a field of its own, once.
  std::vector<std::string> options = compile_options(nvrtc, spec);
  std::erase(options, "--gpu-architecture=" + to_string(spec.target));
  add("options", fmt::format("{}", fmt::join(options, " ")));
  add("target", to_string(spec.target));
  for_each_field(spec, [&](std::string_view name, auto value) {
    if (!name.starts_with("target.")) add(name, field_text(value));
  });
  return *parse(text);
}

std::string unknown_include(std::span<const TemplateFile> files) {
  for (const TemplateFile& file : files) {
    for (std::string_view text = file.text; !text.empty();) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      const std::string_view name = included(text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
      if (name.empty()) continue;
      const bool is_known =
          name.size() > 2 && name.starts_with('"') && name.ends_with('"') &&
          std::ranges::find(files, name.substr(1, name.size() - 2), &TemplateFile::name) != files.end();
      if (is_known) continue;
      return fmt::format("{} includes {}, which is not embedded, so no key can tell its versions apart", file.name,
                         name);
    }
  }
  return {};
}

std::optional<ArtifactKey> ArtifactKey::parse(std::string_view text) {
  ArtifactKey key;
  key.text_ = text;
  key.digest_ = sha256(text);
  while (!text.empty()) {
    const std::size_t name_end = text.find(' ');
    if (name_end == std::string_view::npos) return std::nullopt;
    const std::size_t size_end = text.find(' ', name_end + 1);
    if (size_end == std::string_view::npos) return std::nullopt;
    std::size_t size = 0;
    const auto [end, error] = std::from_chars(text.data() + name_end + 1, text.data() + size_end, size);
    if (error != std::errc() || end != text.data() + size_end) return std::nullopt;
    const std::size_t left = text.size() - size_end - 1;
    if (size >= left || text[size_end + 1 + size] != '\n') return std::nullopt;
    key.fields_.emplace_back(text.substr(0, name_end), text.substr(size_end + 1, size));
    text.remove_prefix(size_end + 1 + size + 1);
  }
  if (key.fields_.empty()) return std::nullopt;
  return key;
}

std::string_view ArtifactKey::field(std::string_view name) const noexcept {
  const auto found = std::ranges::find(fields_, name, &Field::first);
  return found == fields_.end() ? std::string_view() : std::string_view(found->second);
}

std::vector<FieldDifference> differences(const ArtifactKey& has, const ArtifactKey& needs) {
  std::vector<FieldDifference> result;
  for (const auto& [name, value] : needs.fields()) {
    if (has.field(name) != value) result.push_back({name, std::string(has.field(name)), value});
  }
  for (const auto& [name, value] : has.fields()) {
    if (std::ranges::find(needs.fields(), name, &ArtifactKey::Field::first) == needs.fields().end()) {
      result.push_back({name, value, {}});
    }
  }
  return result;
}

}  // namespace qkvjit
