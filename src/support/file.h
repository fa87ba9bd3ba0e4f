// SPDX-License-Identifier: Apache-2.0
// Files: a descriptor with an owner, reads that are whole or fail, and writing that a reader never sees half done.
#pragma once

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "qkvjit/error.h"

namespace qkvjit {

/// The system calls that write a file. Tests put their own here, before any other thread runs, to fail or die in one.
struct FileCalls {
  int (*create)(int directory, const char* name, int flags, mode_t mode) =
      [](int directory, const char* name, int flags, mode_t mode) { return ::openat(directory, name, flags, mode); };
  ssize_t (*write)(int descriptor, const void* bytes, std::size_t size) = ::write;
  int (*fsync)(int descriptor) = ::fsync;
  int (*close)(int descriptor) = ::close;
  int (*rename)(int from_directory, const char* from, int to_directory, const char* to) = ::renameat;
};
inline FileCalls file_calls;

/// A file that could not be written.
class FileError : public Error {
 public:
  FileError(const std::string& text, int code) : Error(text), code_(code) {}
  [[nodiscard]] int code() const noexcept { return code_; }  ///< errno

 private:
  int code_;
};

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
/// Every failure throws FileError: "`kind` '/path': cannot be written: …".
class AtomicFile {
 public:
  /// `path` may be relative to an open `directory`. The umask is taken off `mode`.
  AtomicFile(const char* kind, const std::string& path, int directory = AT_FDCWD, mode_t mode = 0666);
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
  int directory_;
  std::string temporary_;
  FileDescriptor file_;
  bool committed_ = false;
};

}  // namespace qkvjit
