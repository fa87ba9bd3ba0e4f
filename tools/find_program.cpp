// SPDX-License-Identifier: Apache-2.0
#include "find_program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "qkvjit/error.h"

extern char** environ;

namespace qkvjit::tools {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> program_folders() {
  std::vector<fs::path> folders;
  if (const char* path = std::getenv("PATH")) {
    std::istringstream parts(path);
    for (std::string part; std::getline(parts, part, ':');) folders.emplace_back(part);
  }
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const char* home = std::getenv(name)) folders.push_back(fs::path(home) / "bin");
  }
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/usr/local", error)) {
    if (entry.path().filename().string().starts_with("cuda")) folders.push_back(entry.path() / "bin");
  }
  if (const char* venv = std::getenv("VIRTUAL_ENV")) {
    for (const auto& python : fs::directory_iterator(fs::path(venv) / "lib", error)) {
      for (const auto& wheel : fs::directory_iterator(python.path() / "site-packages" / "nvidia", error)) {
        folders.push_back(wheel.path() / "bin");
      }
    }
  }
  return folders;
}

}  // namespace

std::string find_program(const std::string& name) {
  for (const fs::path& folder : program_folders()) {
    const fs::path file = folder / name;
    std::error_code error;
    if (fs::is_regular_file(file, error) && access(file.c_str(), X_OK) == 0) return file;
  }
  return {};
}

std::string run_program(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  for (const std::string& part : command) arguments.push_back(const_cast<char*>(part.c_str()));
  arguments.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw Error("no pipe could be made to read a program's output");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  pid_t child = 0;
  const int spawned = posix_spawn(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string output;
  std::array<char, 65536> buffer{};
  for (ssize_t count = 0; spawned == 0 && (count = read(ends[0], buffer.data(), buffer.size())) > 0;) {
    output.append(buffer.data(), static_cast<std::size_t>(count));
  }
  close(ends[0]);
  int status = 0;
  if (spawned != 0 || waitpid(child, &status, 0) < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw Error(fmt::format("'{}' failed (status {}); its message stands above", command[0], status));
  }
  return output;
}

TemporaryFile::TemporaryFile(const std::string& suffix) {
  const char* folder = std::getenv("TMPDIR");
  path_ = fmt::format("{}/qkvjit-XXXXXX{}", folder != nullptr ? folder : "/tmp", suffix);
  const int file = mkstemps(path_.data(), static_cast<int>(suffix.size()));
  if (file < 0)
    throw Error(fmt::format("no temporary file could be made as '{}'; set TMPDIR to a folder of yours", path_));
  close(file);
}

TemporaryFile::~TemporaryFile() { unlink(path_.c_str()); }

}  // namespace qkvjit::tools
