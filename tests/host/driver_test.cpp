// SPDX-License-Identifier: Apache-2.0
// Opening the driver: what is said where it is missing or a stub, and what an error of it says.
#include "cuda/driver.h"

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "support/fake_driver.h"

namespace {

using namespace qkvjit;
namespace fs = std::filesystem;

/// The toolkit's stub library, or an empty path.
fs::path find_stub() {
  std::vector<fs::path> roots{"/usr/local/cuda"};
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const char* root = std::getenv(name)) roots.emplace_back(root);
  }
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/usr/local", error)) {
    if (entry.path().filename().string().starts_with("cuda")) roots.push_back(entry.path());
  }
  for (const fs::path& root : roots) {
    const fs::path stub = root / "lib64/stubs/libcuda.so";
    if (fs::exists(stub, error)) return stub;
  }
  return {};
}

/// What open_driver() throws in a process of its own, whose loader finds drivers in `folder` first.
std::string open_in_child(const fs::path& folder) {
  const std::string command = "QKVJIT_TEST_OPEN_DRIVER=1 LD_LIBRARY_PATH='" + folder.string() + "' " +
                              fs::canonical("/proc/self/exe").string() +
                              " --test-suite=driver --test-case='the child of another case' --no-intro 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::string output;
  std::array<char, 512> buffer{};
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) output += buffer.data();
  CHECK(pclose(pipe) == 0);
  const std::size_t begin = output.find("text: <");
  const std::size_t end = output.find(">:end", begin);
  REQUIRE_MESSAGE(end != std::string::npos, output);
  return output.substr(begin + 7, end - begin - 7);
}

void check_one_sentence(const std::string& text) {
  CAPTURE(text);
  CHECK(text.size() > 40);
  CHECK(text.size() < 300);
  CHECK(text.find('\n') == std::string::npos);
  CHECK(text.find(". ") == std::string::npos);
  CHECK(text.ends_with("."));
}

/// A folder of this process that goes when the test ends.
struct ScratchFolder {
  ScratchFolder() {
    std::string pattern = (fs::temp_directory_path() / "qkvjit-driver-XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  ~ScratchFolder() { fs::remove_all(path); }
  fs::path path;
};

}  // namespace

TEST_SUITE("driver") {
  TEST_CASE("the child of another case") {
    if (std::getenv("QKVJIT_TEST_OPEN_DRIVER") == nullptr) return;
    try {
      open_driver();
      std::printf("text: <none>:end\n");
    } catch (const LibraryUnavailable& error) {
      std::printf("text: <%s>:end\n", error.what());
    }
  }

  TEST_CASE("where there is no driver, one sentence says so and what to install") {
    try {
      const auto driver = open_driver();
      MESSAGE("SKIPPED: this machine has a driver");
      const bool is_whole = driver->cuLaunchKernelEx != nullptr;
      CHECK(is_whole);
    } catch (const LibraryUnavailable& error) {
      check_one_sentence(error.what());
      if (dlopen("libcuda.so.1", RTLD_NOW) == nullptr) {
        CHECK(std::string(error.what()).find("libcuda.so.1") != std::string::npos);
        CHECK(std::string(error.what()).find("install an NVIDIA driver") != std::string::npos);
      }
    }
  }

  TEST_CASE("a library of that name that is no driver is refused by name of what it lacks") {
    const ScratchFolder folder;
    Dl_info info{};
    REQUIRE(dladdr(reinterpret_cast<void*>(&std::fopen), &info) != 0);  // the C library: loads, and has no cuInit
    fs::create_symlink(fs::canonical(info.dli_fname), folder.path / "libcuda.so.1");
    const std::string text = open_in_child(folder.path);
    check_one_sentence(text);
    CHECK(text.find("has no function cuInit") != std::string::npos);
  }

  TEST_CASE("the toolkit's stub library has every function by its versioned name, and is recognised") {
    const fs::path stub = find_stub();
    if (stub.empty()) {
      MESSAGE("SKIPPED: no toolkit with a stub library on this machine");
      return;
    }
    const ScratchFolder folder;
    fs::create_symlink(stub, folder.path / "libcuda.so.1");
    const std::string text = open_in_child(folder.path);
    check_one_sentence(text);
    CHECK(text.find("stub library") != std::string::npos);
    CHECK(text.find("LD_LIBRARY_PATH") != std::string::npos);
  }

  TEST_CASE("an error says the call, the code's name, number and text") {
    fake::reset();
    const auto driver = fake::table();
    check(*driver, CUDA_SUCCESS, "cuNothing");
    try {
      check(*driver, CUDA_ERROR_OUT_OF_MEMORY, "cuMemAllocAsync(12 bytes)");
      FAIL("did not throw");
    } catch (const DriverError& error) {
      CHECK(error.code() == CUDA_ERROR_OUT_OF_MEMORY);
      CHECK(std::string(error.what()) ==
            "cuMemAllocAsync(12 bytes) failed with CUDA_ERROR_OUT_OF_MEMORY (2): what the fake driver says of it");
    }
    try {
      check(*driver, static_cast<CUresult>(1000), "cuLaunchKernelEx");
      FAIL("did not throw");
    } catch (const DriverError& error) {
      CHECK(error.code() == 1000);
      CHECK(std::string(error.what()) == "cuLaunchKernelEx failed with unknown error (1000): no description");
    }
  }
}
