// SPDX-License-Identifier: Apache-2.0
// Which NVRTC is opened of those there are, and what is said where none will do.
#include "cuda/nvrtc.h"

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <regex>
#include <string>
#include <utility>

namespace {

using namespace qkvjit;
namespace fs = std::filesystem;

/// Sets or unsets a variable for a while.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    set(value);
  }
  ~ScopedVariable() { set(old_ ? old_->c_str() : nullptr); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  void set(const char* value) const {
    if (value != nullptr) {
      setenv(name_, value, 1);
    } else {
      unsetenv(name_);
    }
  }
  const char* name_;
  std::optional<std::string> old_;
};

struct ScratchFolder {
  ScratchFolder() {
    std::string pattern = (fs::temp_directory_path() / "qkvjit-nvrtc-XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  ~ScratchFolder() { fs::remove_all(path); }
  void add_file(const fs::path& file) const {
    fs::create_directories((path / file).parent_path());
    std::ofstream(path / file) << "no library";
  }
  fs::path path;
};

std::string refusal(int max_major = 0) {
  try {
    open_nvrtc(max_major);
  } catch (const LibraryUnavailable& error) {
    return error.what();
  }
  return {};
}

/// Gives `venv` the libraries that a CI build fetched, each as a wheel's folder; returns how many.
int add_wheels(const ScratchFolder& venv) {
  std::ifstream list(std::string(QKVJIT_SOURCE_DIR) + "/build/nvrtc/files");
  int count = 0;
  for (std::string file; std::getline(list, file, ';');) {
    while (!file.empty() && file.back() == '\n') file.pop_back();
    if (!fs::exists(file)) continue;
    const fs::path wheel = venv.path / "lib/python3.11/site-packages/nvidia" / ("cu" + std::to_string(count++));
    fs::create_directories(wheel);
    fs::create_directory_symlink(fs::path(file).parent_path(), wheel / "lib");
  }
  return count;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_SUITE("nvrtc") {
  TEST_CASE("the one found is whole and says what it is") {
    const auto nvrtc = open_nvrtc();
    MESSAGE("NVRTC " << nvrtc->major << "." << nvrtc->minor << " at " << nvrtc->path);
    CHECK(std::pair(nvrtc->major, nvrtc->minor) >= std::pair(kNvrtcFloorMajor, kNvrtcFloorMinor));
    CHECK(fs::exists(nvrtc->path));
    CHECK(std::ranges::is_sorted(nvrtc->targets));
    CHECK(std::ranges::find(nvrtc->targets, 80u) != nvrtc->targets.end());
    CHECK(std::ranges::find(nvrtc->targets, 90u) != nvrtc->targets.end());
    int major = 0, minor = 0;
    CHECK(nvrtc->nvrtcVersion(&major, &minor) == NVRTC_SUCCESS);
    CHECK(major == nvrtc->major);
    CHECK(minor == nvrtc->minor);
  }

  TEST_CASE("QKVJIT_NVRTC is the only one tried, and must load") {
    const std::string path = open_nvrtc()->path;
    {
      const ScopedVariable file("QKVJIT_NVRTC", path.c_str());
      CHECK(open_nvrtc()->path == path);
    }
    {
      const ScopedVariable file("QKVJIT_NVRTC", "/no/such/libnvrtc.so.13");
      const std::string text = refusal();
      CHECK(has(text, "/no/such/libnvrtc.so.13"));
      CHECK(has(text, "QKVJIT_NVRTC"));
      CHECK(std::ranges::count(text, '\n') == 1);  // the sentence, and one file tried
    }
    {
      const ScratchFolder folder;
      folder.add_file("libnvrtc.so.13");
      const ScopedVariable file("QKVJIT_NVRTC", (folder.path / "libnvrtc.so.13").c_str());
      CHECK(has(refusal(), (folder.path / "libnvrtc.so.13").string()));
    }
    {
      Dl_info info{};
      REQUIRE(dladdr(reinterpret_cast<void*>(&std::fopen), &info) != 0);
      const ScopedVariable file("QKVJIT_NVRTC", fs::canonical(info.dli_fname).c_str());
      CHECK(has(refusal(), "has no function nvrtcVersion"));
    }
    {
      const ScopedVariable file("QKVJIT_NVRTC", "");
      CHECK(open_nvrtc()->path == path);  // empty is as unset
    }
  }

  TEST_CASE("one newer than the driver is not taken, and the text says which would be") {
    const auto newest = open_nvrtc();
    CHECK(open_nvrtc(newest->major)->path == newest->path);
    CHECK(open_nvrtc(newest->major + 1)->path == newest->path);

    const ScopedVariable file("QKVJIT_NVRTC", newest->path.c_str());
    const std::string text = refusal(newest->major - 1);
    CHECK(has(text, newest->path));
    CHECK(has(text, "as the driver is for CUDA " + std::to_string(newest->major - 1)));
    if (newest->major == 13) CHECK(has(text, "nvidia-cuda-nvrtc-cu12"));
  }

  TEST_CASE("the newest that the driver can load is taken of all places") {
    const ScopedVariable file("QKVJIT_NVRTC", nullptr);
    const ScratchFolder venv;
    const int extra = add_wheels(venv);
    const ScopedVariable environment("VIRTUAL_ENV", extra > 0 ? venv.path.c_str() : std::getenv("VIRTUAL_ENV"));
    // No CUDA 11 is ever taken, so that everything tried is listed with its version.
    const std::string text = refusal(11);
    REQUIRE_FALSE(text.empty());
    for (const int max_major : {0, 12, 13}) {
      CAPTURE(max_major);
      std::pair best(0, 0);
      const std::regex version(": is (\\d+)\\.(\\d+), needs");
      for (std::sregex_iterator it(text.begin(), text.end(), version), end; it != end; ++it) {
        const std::pair found(std::stoi((*it)[1]), std::stoi((*it)[2]));
        if ((max_major == 0 || found.first <= max_major) && found > best) best = found;
      }
      if (best >= std::pair(kNvrtcFloorMajor, kNvrtcFloorMinor)) {
        const auto nvrtc = open_nvrtc(max_major);
        CHECK(std::pair(nvrtc->major, nvrtc->minor) == best);
      } else {
        CHECK(has(refusal(max_major), max_major == 12 ? "nvidia-cuda-nvrtc-cu12" : "nvidia-cuda-nvrtc"));
      }
    }
    if (extra == 0) MESSAGE("only the NVRTCs that this machine has: build/nvrtc/files adds others");
  }

  TEST_CASE("CUDA_HOME, CUDA_PATH and the wheels of VIRTUAL_ENV are searched, each file once") {
    const ScopedVariable file("QKVJIT_NVRTC", nullptr);
    const ScratchFolder home, path, venv;
    home.add_file("lib64/libnvrtc.so.13");
    fs::create_directories(home.path / "targets/x86_64-linux");
    fs::create_directory_symlink(home.path / "lib64", home.path / "targets/x86_64-linux/lib");
    path.add_file("lib64/libnvrtc.so.12");
    venv.add_file("lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
    venv.add_file("lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    venv.add_file("lib/python3.12/site-packages/nvidia/cublas/include/cublas.h");
    const ScopedVariable a("CUDA_HOME", home.path.c_str());
    const ScopedVariable b("CUDA_PATH", path.path.c_str());
    const ScopedVariable c("VIRTUAL_ENV", venv.path.c_str());
    const std::string text = refusal(11);  // no CUDA 11 is ever taken, so that everything tried is listed
    REQUIRE_FALSE(text.empty());
    for (const fs::path& expected : {home.path / "lib64/libnvrtc.so.13", path.path / "lib64/libnvrtc.so.12",
                                     venv.path / "lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
                                     venv.path / "lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"}) {
      const std::size_t first = text.find(expected.string());
      CHECK_MESSAGE(first != std::string::npos, expected.string() << " in " << text);
    }
    CHECK_FALSE(has(text, (home.path / "targets").string()));
    CHECK(has(text, "libnvrtc.so.12"));  // by the loader's own path
    // A junk file somewhere does no harm where a good one is.
    CHECK(open_nvrtc()->major >= 12);
  }
}
