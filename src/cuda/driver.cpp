// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <string>

#include "cuda/fork_guard.h"

namespace qkvjit {
namespace {

// Two levels, so that cuda.h's own renaming (cuMemAlloc → cuMemAlloc_v2) happens before the text is made.
#define QKVJIT_TEXT_OF(name) #name
#define QKVJIT_TEXT(name) QKVJIT_TEXT_OF(name)

constexpr const char* kInstall = "install an NVIDIA driver for CUDA 12.0 or newer (525.60 or newer)";
constexpr int kDriverFloor = 12000;

void* open_library() {
  // WSL keeps its driver where the loader does not always look.
  for (const char* name : {"libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  throw LibraryUnavailable(fmt::format(
      "the CUDA driver library libcuda.so.1 cannot be loaded (also tried /usr/lib/wsl/lib): {}.", kInstall));
}

void* find_symbol(void* library, const char* name) {
  if (void* symbol = dlsym(library, name)) return symbol;
  // CUDA 13's cuda.h asks for _v2, which drivers before 12.8 lack; the signature is the same, and so are the results
  // for the events that this library takes.
  if (std::string_view(name) == "cuEventElapsedTime_v2") return dlsym(library, "cuEventElapsedTime");
  return nullptr;
}

template <typename Function>
void load(void* library, const char* name, Function& function, bool required) {
  function = reinterpret_cast<Function>(find_symbol(library, name));
  if (function == nullptr && required) {
    throw LibraryUnavailable(
        fmt::format("the installed CUDA driver is too old, for it has no function {}: {}.", name, kInstall));
  }
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::string describe(const DriverTable& driver, CUresult code) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName != nullptr) driver.cuGetErrorName(code, &name);
  if (driver.cuGetErrorString != nullptr) driver.cuGetErrorString(code, &text);
  return fmt::format("{} ({}): {}", name != nullptr ? name : "unknown error", static_cast<int>(code),
                     text != nullptr ? text : "no description");
}

}  // namespace

std::shared_ptr<const DriverTable> open_driver() {
  if (is_forked_child()) throw_forked_process("opening the CUDA driver");
  // Never closed: kernels, the driver's own threads and exit handlers may run until the process ends.
  void* library = open_library();
  auto driver = std::make_shared<DriverTable>();
#define QKVJIT_LOAD(name) load(library, QKVJIT_TEXT(name), driver->name, true);
  QKVJIT_DRIVER_FUNCTIONS(QKVJIT_LOAD)
#undef QKVJIT_LOAD
#define QKVJIT_LOAD(name) load(library, QKVJIT_TEXT(name), driver->name, false);
  QKVJIT_OPTIONAL_DRIVER_FUNCTIONS(QKVJIT_LOAD)
#undef QKVJIT_LOAD
  load(library, "cuFuncLoad", driver->cuFuncLoad, false);

  const CUresult code = driver->cuInit(0);
  if (code == CUDA_ERROR_STUB_LIBRARY) {
    throw LibraryUnavailable(fmt::format(
        "libcuda.so.1 is the CUDA toolkit's stub library, which can only be linked against: take its folder out of "
        "LD_LIBRARY_PATH and {}.",
        kInstall));
  }
  if (code == CUDA_ERROR_NO_DEVICE) {
    throw LibraryUnavailable(
        "the CUDA driver is installed but sees no GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, "
        "that a GPU is passed through.");
  }
  if (code != CUDA_SUCCESS) {
    throw LibraryUnavailable(fmt::format("the CUDA driver does not start, cuInit gave {}.", describe(*driver, code)));
  }
  int version = 0;
  check(*driver, driver->cuDriverGetVersion(&version), "cuDriverGetVersion");
  if (version < kDriverFloor) {
    throw LibraryUnavailable(
        fmt::format("the installed CUDA driver is for CUDA {}: {}.", version_text(version), kInstall));
  }
  return driver;
}

void throw_driver_error(const DriverTable& driver, CUresult code, std::string_view call) {
  throw DriverError(fmt::format("{} failed with {}", call, describe(driver, code)), static_cast<int>(code));
}

}  // namespace qkvjit
