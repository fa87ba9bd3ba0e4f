// SPDX-License-Identifier: Apache-2.0
#include "support/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <system_error>
#include <utility>

namespace qkvjit {

std::string error_text(int code) { return std::generic_category().message(code); }

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    close_now();
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

bool FileDescriptor::close_now() noexcept {
  return descriptor_ < 0 || file_calls.close(std::exchange(descriptor_, -1)) == 0;
}

std::string read_exactly(int descriptor, std::uint64_t offset, char* bytes, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t count = pread(descriptor, bytes + done, size - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return error_text(errno);
    if (count == 0) return fmt::format("the file ends after {} of {} bytes", done, size);
    done += static_cast<std::size_t>(count);
  }
  return {};
}

AtomicFile::AtomicFile(const char* kind, const std::string& path, int directory, mode_t mode)
    : kind_(kind), path_(path), directory_(directory) {
  std::random_device random;
  do {
    temporary_ = fmt::format("{}.{}-{:08x}.tmp", path, getpid(), random());
    file_ = FileDescriptor(
        file_calls.create(directory, temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode));
  } while (file_.get() < 0 && errno == EEXIST);
  if (file_.get() < 0) fail("; name a file in a folder that exists and is yours");
}

AtomicFile::~AtomicFile() {
  if (!committed_) unlinkat(directory_, temporary_.c_str(), 0);
}

void AtomicFile::fail(const char* remedy) const {
  const int code = errno;
  throw FileError(fmt::format("{} '{}': cannot be written: {}{}", kind_, path_, error_text(code), remedy), code);
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = file_calls.write(file_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail();
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void AtomicFile::commit() {
  if (file_calls.fsync(file_.get()) != 0 || !file_.close_now() ||
      file_calls.rename(directory_, temporary_.c_str(), directory_, path_.c_str()) != 0) {
    fail();
  }
  committed_ = true;
}

}  // namespace qkvjit
