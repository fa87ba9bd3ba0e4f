// SPDX-License-Identifier: Apache-2.0
// What every launch of a kernel with QkvParams has in common.
#pragma once

#include <span>

#include "cuda/device_state.h"
#include "kernel_templates/qkv_params.h"

namespace qkvjit {

struct LaunchGrid {
  unsigned blocks = 0;
  unsigned threads = 0;
  unsigned smem_bytes = 0;
};

/// The context must be current. Throws DriverError.
template <typename Params>
void launch_blocks(const DriverTable& driver, CUfunction function, Params& params, const LaunchGrid& grid,
                   std::span<CUlaunchAttribute> attributes, CUstream stream) {
  void* arguments[] = {&params};
  CUlaunchConfig config{};
  config.gridDimX = grid.blocks;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = grid.threads;
  config.sharedMemBytes = grid.smem_bytes;
  config.hStream = stream;
  config.attrs = attributes.data();
  config.numAttrs = static_cast<unsigned>(attributes.size());
  check(driver, driver.cuLaunchKernelEx(&config, function, arguments, nullptr), "cuLaunchKernelEx");
}

}  // namespace qkvjit
