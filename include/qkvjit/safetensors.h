// SPDX-License-Identifier: Apache-2.0
// Reads and writes safetensors files: eight bytes of header length, a JSON header, the tensors' bytes. SafetensorsFile
// maps the file read-only and owns the mapping; its tensors are views into it, valid as long as the file object (or
// the one it was moved to) lives. Everything the header says is checked before it is used, so hostile files throw.
// Immutable, free to share between threads. Another process that shortens a mapped file kills its readers (SIGBUS).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace qkvjit {

/// Non-owning. `bytes` is little-endian, row-major, contiguous, and of no particular alignment.
struct StoredTensor {
  std::string name;
  std::string dtype;  ///< as the format spells it: "F16", "I32", …
  std::vector<std::uint64_t> shape;
  std::span<const std::byte> bytes;

  /// "[16, 384]", for messages.
  [[nodiscard]] std::string shape_text() const;
  /// A copy as elements of type T; bytes behind the last whole element are left out.
  template <typename T>
  [[nodiscard]] std::vector<T> copy() const {
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
};

class SafetensorsFile {
 public:
  /// Maps and checks `path`. Throws InvalidProblem, naming the file, the tensor and the reason: not a readable regular
  /// file, cut short, a header that is no such JSON, a name twice, an unknown dtype, a shape that overflows or does not
  /// fit its bytes, offsets out of the file, tensors that overlap, bytes that belong to no tensor.
  explicit SafetensorsFile(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// In the order of their bytes.
  [[nodiscard]] const std::vector<StoredTensor>& tensors() const noexcept { return tensors_; }
  /// The strings under "__metadata__".
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }
  /// Null where there is none of that name.
  [[nodiscard]] const StoredTensor* find(const std::string& name) const noexcept;
  /// Throws InvalidProblem with the names nearest to it where there is none.
  [[nodiscard]] const StoredTensor& at(const std::string& name) const;

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(void* address) const noexcept;
  };

  std::string path_;
  std::unique_ptr<void, Unmap> mapping_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// Bytes of one element of a dtype as the format spells it; 0 for one that is not known.
std::size_t stored_element_bytes(const std::string& dtype) noexcept;

/// Writes `tensors` to a temporary sibling of `path`, then renames it, so that a reader never sees half a file; what
/// was there is replaced. Each tensor starts at a multiple of its element. Throws InvalidProblem: a name twice or
/// reserved, an unknown dtype, bytes that do not fit the shape, or a path that cannot be written.
void write_safetensors(const std::string& path, std::span<const StoredTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace qkvjit
