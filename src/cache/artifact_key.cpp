// SPDX-License-Identifier: Apache-2.0
#include "cache/artifact_key.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
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
  std::string version = fmt::format("{}.{}", nvrtc.major, nvrtc.minor);
  const FileDescriptor file(open(nvrtc.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts {};
  if (file.get() < 0 || fstat(file.get(), &facts) != 0 || !S_ISREG(facts.st_mode) || facts.st_size == 0) return version;
  const auto size = static_cast<std::size_t>(facts.st_size);
  void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) return version;
  const std::string_view bytes(static_cast<const char*>(address), size);
  const std::string mark = fmt::format("release {}, V{}.", version, version);
  if (const std::size_t at = bytes.find(mark); at != std::string_view::npos) {
    const std::string_view rest = bytes.substr(at + mark.size(), 12);
    const std::string_view digits = rest.substr(0, rest.find_first_not_of("0123456789"));
    if (!digits.empty()) version += fmt::format(".{}", digits);
  }
  munmap(address, size);
  return version;
}

}  // namespace

std::string nvrtc_build(const NvrtcTable& nvrtc) {
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
