// SPDX-License-Identifier: Apache-2.0
// From a Specialization to PTX and cubin: one NVRTC run over the embedded templates. Stateless and thread-safe;
// needs no GPU, no driver and no file of the toolkit.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/nvrtc.h"
#include "qkvjit/kernel_cache.h"

namespace qkvjit {

/// The options NVRTC gets; no paths, times or environment in them.
std::vector<std::string> compile_options(const NvrtcTable& nvrtc, const Specialization& spec);

/// Throws CompileError with the options, the NVRTC version and the whole log.
CompiledKernel compile_kernel(const NvrtcTable& nvrtc, const Specialization& spec);

/// The kernel as one self-contained CUDA file: the templates it includes, each once, and the instantiation.
std::string flattened_source(const Specialization& spec);

/// nvcc's command line for the file that flattened_source() wrote: the same PTX and cubin without NVRTC.
std::string nvcc_command(const Specialization& spec, const std::string& source_file, const std::string& output_file);

/// What ptxas says of the one kernel in NVRTC's log (--ptxas-options=-v).
struct ResourceUsage {
  unsigned registers = 0;
  unsigned spill_bytes = 0;
  unsigned static_smem_bytes = 0;
};
/// Throws CompileError where the log has no such lines.
ResourceUsage parse_resource_usage(std::string_view log);

}  // namespace qkvjit
