// SPDX-License-Identifier: Apache-2.0
#include "cuda/nvrtc.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <utility>

namespace qkvjit {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

#if defined(__aarch64__)
constexpr const char* kTargetFolder = "sbsa-linux";
#else
constexpr const char* kTargetFolder = "x86_64-linux";
#endif

/// Files to try, each once however many links lead to it.
struct Candidates {
  std::vector<std::string> files;
  std::set<fs::path> seen;

  void add_folder(const fs::path& folder) {
    for (const char* name : kSonames) {
      std::error_code error;
      const fs::path real = fs::canonical(folder / name, error);
      if (!error && seen.insert(real).second) files.push_back(folder / name);
    }
  }
  void add_toolkit(const fs::path& root) {
    add_folder(root / "lib64");
    add_folder(root / "targets" / kTargetFolder / "lib");
  }
};

/// Subfolders of `folder` whose name begins with `prefix`, the last in the order of names first.
std::vector<fs::path> subfolders(const fs::path& folder, std::string_view prefix) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(prefix)) found.push_back(it->path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

/// Names and files to try, in the order that open_nvrtc documents.
std::vector<std::string> candidates() {
  Candidates found;
  found.files.assign(std::begin(kSonames), std::end(kSonames));
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const char* root = environment(name)) found.add_toolkit(root);
  }
  for (const fs::path& root : subfolders("/usr/local", "cuda")) found.add_toolkit(root);
  if (const char* venv = environment("VIRTUAL_ENV")) {
    for (const fs::path& python : subfolders(fs::path(venv) / "lib", "python3")) {
      // The wheels' folders: nvidia/cu13 since CUDA 13, nvidia/cuda_nvrtc before.
      for (const fs::path& wheel : subfolders(python / "site-packages" / "nvidia", "cu")) {
        found.add_folder(wheel / "lib");
      }
    }
  }
  return found.files;
}

std::string loaded_path(void* symbol, const std::string& fallback) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? std::string(info.dli_fname) : fallback;
}

/// The table of one library, whatever its version; or null and a line in `refusals`.
std::shared_ptr<NvrtcTable> load_file(const std::string& file, std::vector<std::string>& refusals) {
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: a compile may run until the end
  if (library == nullptr) {
    const char* reason = dlerror();  // begins with the file's name
    refusals.push_back(reason != nullptr ? reason : file + ": does not load");
    return nullptr;
  }
  auto table = std::make_shared<NvrtcTable>();
#define QKVJIT_LOAD(name)                                                       \
  table->name = reinterpret_cast<decltype(table->name)>(dlsym(library, #name)); \
  if (table->name == nullptr) {                                                 \
    refusals.push_back(file + ": has no function " #name);                      \
    return nullptr;                                                             \
  }
  QKVJIT_NVRTC_FUNCTIONS(QKVJIT_LOAD)
#undef QKVJIT_LOAD
  table->path = loaded_path(reinterpret_cast<void*>(table->nvrtcVersion), file);
  int count = 0;
  std::vector<int> targets;
  bool told = table->nvrtcVersion(&table->major, &table->minor) == NVRTC_SUCCESS &&
              table->nvrtcGetNumSupportedArchs(&count) == NVRTC_SUCCESS && count > 0;
  if (told) {
    targets.resize(static_cast<std::size_t>(count));
    told = table->nvrtcGetSupportedArchs(targets.data()) == NVRTC_SUCCESS;
  }
  if (!told) {
    refusals.push_back(file + ": does not tell its version and targets");
    return nullptr;
  }
  table->targets.assign(targets.begin(), targets.end());
  std::sort(table->targets.begin(), table->targets.end());
  return table;
}

/// As load_file, but null also where the version will not do.
std::shared_ptr<const NvrtcTable> open_file(const std::string& file, int max_major,
                                            std::vector<std::string>& refusals) {
  auto table = load_file(file, refusals);
  if (table == nullptr) return nullptr;
  if (std::pair(table->major, table->minor) < std::pair(kNvrtcFloorMajor, kNvrtcFloorMinor)) {
    refusals.push_back(fmt::format("{}: is {}.{}, needs {}.{} or newer", table->path, table->major, table->minor,
                                   kNvrtcFloorMajor, kNvrtcFloorMinor));
    return nullptr;
  }
  if (max_major != 0 && table->major > max_major) {
    refusals.push_back(fmt::format("{}: is {}.{}, needs {}.x or older, as the driver is for CUDA {}", table->path,
                                   table->major, table->minor, max_major, max_major));
    return nullptr;
  }
  return table;
}

[[noreturn]] void refuse(const std::vector<std::string>& refusals, int max_major) {
  throw LibraryUnavailable(fmt::format(
      "no usable NVRTC was found: install the PyPI package {} and set VIRTUAL_ENV to its environment, or a CUDA "
      "toolkit {}, or set QKVJIT_NVRTC to the file; tried:\n  {}",
      max_major == 12 ? "nvidia-cuda-nvrtc-cu12" : "nvidia-cuda-nvrtc", max_major == 12 ? "12.x" : "13.x",
      fmt::join(refusals, "\n  ")));
}

}  // namespace

std::shared_ptr<const NvrtcTable> open_nvrtc(int max_major) {
  std::vector<std::string> refusals;
  if (const char* file = environment("QKVJIT_NVRTC")) {
    auto table = open_file(file, max_major, refusals);
    if (table == nullptr) refuse(refusals, max_major);
    return table;
  }
  std::shared_ptr<const NvrtcTable> newest;
  for (const std::string& file : candidates()) {
    // A soname names the major: opening an older one could not change the choice.
    if (newest != nullptr && newest->major == 13 && file.ends_with(".12")) continue;
    const auto table = open_file(file, max_major, refusals);
    if (table == nullptr) continue;
    // Of equals the first stands: the loader's own path before the others.
    if (newest == nullptr || std::pair(table->major, table->minor) > std::pair(newest->major, newest->minor)) {
      newest = table;
    }
  }
  if (newest == nullptr) refuse(refusals, max_major);
  return newest;
}

}  // namespace qkvjit
