// SPDX-License-Identifier: Apache-2.0
// The CUDA driver as a table of functions, opened at run time so that the library starts on a machine with
// neither a GPU nor a driver. Members carry the driver's own names: cuda.h renames many of them to a versioned
// symbol (cuMemAlloc is cuMemAlloc_v2), and does so here and at every use alike. Immutable and free to share
// between threads; the library stays open for the life of the process.
#pragma once

#include <cuda.h>

#include <memory>
#include <string_view>

#include "qkvjit/error.h"

namespace qkvjit {

/// Functions every supported driver (12.0 and newer) has.
#define QKVJIT_DRIVER_FUNCTIONS(X)               \
  X(cuInit)                                      \
  X(cuDriverGetVersion)                          \
  X(cuGetErrorName)                              \
  X(cuGetErrorString)                            \
  X(cuDeviceGet)                                 \
  X(cuDeviceGetCount)                            \
  X(cuDeviceGetName)                             \
  X(cuDeviceGetAttribute)                        \
  X(cuDeviceTotalMem)                            \
  X(cuDevicePrimaryCtxRetain)                    \
  X(cuDevicePrimaryCtxRelease)                   \
  X(cuCtxGetCurrent)                             \
  X(cuCtxPushCurrent)                            \
  X(cuCtxPopCurrent)                             \
  X(cuCtxSynchronize)                            \
  X(cuModuleLoadData)                            \
  X(cuModuleLoadDataEx)                          \
  X(cuModuleUnload)                              \
  X(cuModuleGetFunction)                         \
  X(cuFuncSetAttribute)                          \
  X(cuFuncGetAttribute)                          \
  X(cuLaunchKernel)                              \
  X(cuLaunchKernelEx)                            \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
  X(cuStreamCreate)                              \
  X(cuStreamDestroy)                             \
  X(cuStreamSynchronize)                         \
  X(cuStreamWaitEvent)                           \
  X(cuStreamGetCtx)                              \
  X(cuStreamIsCapturing)                         \
  X(cuStreamBeginCapture)                        \
  X(cuStreamEndCapture)                          \
  X(cuThreadExchangeStreamCaptureMode)           \
  X(cuGraphInstantiate)                          \
  X(cuGraphLaunch)                               \
  X(cuGraphDestroy)                              \
  X(cuGraphExecDestroy)                          \
  X(cuEventCreate)                               \
  X(cuEventRecord)                               \
  X(cuEventDestroy)                              \
  X(cuEventSynchronize)                          \
  X(cuEventElapsedTime)                          \
  X(cuMemGetInfo)                                \
  X(cuMemAlloc)                                  \
  X(cuMemFree)                                   \
  X(cuMemAllocAsync)                             \
  X(cuMemFreeAsync)                              \
  X(cuMemAllocManaged)                           \
  X(cuMemHostAlloc)                              \
  X(cuMemFreeHost)                               \
  X(cuMemcpyHtoD)                                \
  X(cuMemcpyDtoH)                                \
  X(cuMemcpyDtoDAsync)                           \
  X(cuMemcpyHtoDAsync)                           \
  X(cuMemcpyDtoHAsync)                           \
  X(cuMemsetD8)                                  \
  X(cuMemsetD8Async)                             \
  X(cuMemsetD16Async)                            \
  X(cuTensorMapEncodeTiled)                      \
  X(cuPointerGetAttribute)                       \
  X(cuPointerGetAttributes)

/// Functions that may be null. cuCtxCreate and the two beside it serve tests, which need a second context.
#define QKVJIT_OPTIONAL_DRIVER_FUNCTIONS(X) \
  X(cuCtxCreate)                            \
  X(cuCtxDestroy)                           \
  X(cuDevicePrimaryCtxReset)

struct DriverTable {
#define QKVJIT_MEMBER(name) decltype(&::name) name = nullptr;
  QKVJIT_DRIVER_FUNCTIONS(QKVJIT_MEMBER)
  QKVJIT_OPTIONAL_DRIVER_FUNCTIONS(QKVJIT_MEMBER)
#undef QKVJIT_MEMBER
  /// Null below driver 12.4. Spelled out, for cuda.h of 12.0 to 12.3 lacks it.
  CUresult(CUDAAPI* cuFuncLoad)(CUfunction) = nullptr;
};

/// Opens the driver and initialises it. Throws LibraryUnavailable, in one sentence that says what is missing.
std::shared_ptr<const DriverTable> open_driver();

[[noreturn]] void throw_driver_error(const DriverTable& driver, CUresult code, std::string_view call);

/// Throws DriverError unless `code` is CUDA_SUCCESS. `call` names the call and, where it helps, its arguments.
inline void check(const DriverTable& driver, CUresult code, std::string_view call) {
  if (code != CUDA_SUCCESS) throw_driver_error(driver, code, call);
}

}  // namespace qkvjit
