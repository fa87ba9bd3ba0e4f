// SPDX-License-Identifier: Apache-2.0
// NVRTC, the run-time compiler, as a table of functions. Needs no GPU and no driver. Several versions may be
// installed: the newest whose major the driver can load (`max_major`) is taken. Immutable and free to share
// between threads; the library stays open for the life of the process.
#pragma once

#include <nvrtc.h>

#include <memory>
#include <string>
#include <vector>

#include "qkvjit/error.h"

namespace qkvjit {

#define QKVJIT_NVRTC_FUNCTIONS(X) \
  X(nvrtcVersion)                 \
  X(nvrtcGetErrorString)          \
  X(nvrtcGetNumSupportedArchs)    \
  X(nvrtcGetSupportedArchs)       \
  X(nvrtcCreateProgram)           \
  X(nvrtcDestroyProgram)          \
  X(nvrtcAddNameExpression)       \
  X(nvrtcCompileProgram)          \
  X(nvrtcGetLoweredName)          \
  X(nvrtcGetPTXSize)              \
  X(nvrtcGetPTX)                  \
  X(nvrtcGetCUBINSize)            \
  X(nvrtcGetCUBIN)                \
  X(nvrtcGetProgramLogSize)       \
  X(nvrtcGetProgramLog)

struct NvrtcTable {
#define QKVJIT_MEMBER(name) decltype(&::name) name = nullptr;
  QKVJIT_NVRTC_FUNCTIONS(QKVJIT_MEMBER)
#undef QKVJIT_MEMBER
  int major = 0;
  int minor = 0;
  std::string path;               ///< the file that was loaded
  std::string build;              ///< "13.0.88" where it is known already; else it is looked for in the file
  std::vector<unsigned> targets;  ///< compute capabilities it generates code for, ascending
};

/// Opens the newest NVRTC whose major is at most `max_major` (0: any; pass the driver's major to load cubins on
/// it, for an NVRTC newer than the driver writes cubins that the driver refuses). Looks, in this order:
///   $QKVJIT_NVRTC (a file: it alone, and it must load), the loader's own path, $CUDA_HOME, $CUDA_PATH,
///   /usr/local/cuda*, and the nvidia wheels of $VIRTUAL_ENV.
/// Throws LibraryUnavailable: what was tried, why each was refused, and what to install.
std::shared_ptr<const NvrtcTable> open_nvrtc(int max_major = 0);

/// The oldest NVRTC that is taken: it reads C++20 class-type template parameters.
inline constexpr int kNvrtcFloorMajor = 12;
inline constexpr int kNvrtcFloorMinor = 3;

}  // namespace qkvjit
