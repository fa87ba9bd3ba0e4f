// SPDX-License-Identifier: Apache-2.0
// Files: a descriptor with an owner, reads that are whole or fail, and writing that a reader never sees half done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace qkvjit {

/// "No such file or directory", for errno.
std::string error_text(int code);

class FileDescriptor {
 public:
  explicit FileDescriptor(int descriptor = -1) noexcept : descriptor_(descriptor) {}
  ~FileDescriptor() { close_now(); }
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  [[nodiscard]] int get() const noexcept { return descriptor_; }
  bool close_now() noexcept;  ///< false where the system reports a late write error

 private:
  int descriptor_;
};

/// Reads exactly `size` bytes at `offset` into `bytes`. Returns an empty text, or what went wrong.
std::string read_exactly(int descriptor, std::uint64_t offset, char* bytes, std::size_t size);

/// A file that comes into being at commit(): until then it is a sibling of a private name, removed by the destructor.
/// Every failure throws Error: "`kind` '/path': cannot be written: …".
class AtomicFile {
 public:
  AtomicFile(const char* kind, const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;  // owns the file
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  /// Synchronises the content to the disk, then takes the place of `path`.
  void commit();

 private:
  [[noreturn]] void fail(const char* remedy = "") const;

  const char* kind_;
  std::string path_;
  std::string temporary_;
  FileDescriptor file_;
  bool committed_ = false;
};

}  // namespace qkvjit
