// SPDX-License-Identifier: Apache-2.0
// KernelCache: from a Specialization to a loaded kernel, compiled at the first call and found afterwards.
// Thread-safe. One compile a key however many threads ask; a failed compile reaches every waiter and is
// forgotten. The caller owns the cache. Kernels and eagerly bound plans may outlive it; lazily bound ones may not.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qkvjit/device_context.h"
#include "qkvjit/specialization.h"

namespace qkvjit {

/// What NVRTC made of one specialisation. Independent of any context.
struct CompiledKernel {
  Specialization spec;
  std::string lowered_name;  ///< the kernel's symbol in the PTX and the cubin
  std::string ptx;
  std::vector<char> cubin;
  std::string log;            ///< NVRTC's and ptxas's own words
  std::string nvrtc_version;  ///< "13.0"
  std::vector<std::string> options;
  double compile_ms = 0;
  // Read from `log`:
  unsigned registers = 0;
  unsigned spill_bytes = 0;  ///< stores and loads together
  unsigned static_smem_bytes = 0;
};

/// A kernel loaded into one context. Immutable; keeps its module and context alive.
class Kernel {
 public:
  virtual ~Kernel() = default;
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  [[nodiscard]] const Specialization& spec() const noexcept { return compiled_->spec; }
  [[nodiscard]] const CompiledKernel& compiled() const noexcept { return *compiled_; }
  [[nodiscard]] CUfunction function() const noexcept { return function_; }
  /// True where the driver compiled the PTX, false where NVRTC's cubin was loaded.
  [[nodiscard]] bool loaded_from_ptx() const noexcept { return from_ptx_; }

 protected:
  Kernel(std::shared_ptr<const CompiledKernel> compiled, CUfunction function, bool from_ptx)
      : compiled_(std::move(compiled)), function_(function), from_ptx_(from_ptx) {}

 private:
  std::shared_ptr<const CompiledKernel> compiled_;
  CUfunction function_;
  bool from_ptx_;
};

enum class LoadFrom : std::uint8_t { cubin, ptx };

struct CacheOptions {
  LoadFrom load = LoadFrom::cubin;  ///< ptx: hand the PTX to the driver even where there is a cubin
};

struct CacheStats {
  std::uint64_t memory_hits = 0;
  std::uint64_t compiles = 0;
  std::uint64_t compile_failures = 0;
  std::uint64_t loads = 0;
  double compile_ms = 0;
  double load_ms = 0;
};

struct NvrtcTable;  // src/cuda/nvrtc.h; tests inject their own

/// What the launch layer keeps with a cache (the plans of qkv_project_int4); of no use to others.
class PlanMemo {
 public:
  virtual ~PlanMemo() = default;
};

class KernelCache {
 public:
  explicit KernelCache(CacheOptions options = {});
  KernelCache(CacheOptions options, std::shared_ptr<const NvrtcTable> nvrtc);
  ~KernelCache();
  KernelCache(const KernelCache&) = delete;  // plans and kernels refer to it by identity
  KernelCache& operator=(const KernelCache&) = delete;

  /// The kernel for `spec` in `context`; compiles and loads it at the first call.
  /// Throws LibraryUnavailable, CompileError, DriverError.
  std::shared_ptr<const Kernel> get(const DeviceContext& context, const Specialization& spec);

  /// As get(), for many; what is missing is compiled on up to `threads` threads (0: as many as the machine has).
  std::vector<std::shared_ptr<const Kernel>> get_all(const DeviceContext& context,
                                                     std::span<const Specialization> specs, unsigned threads = 0);

  /// The kernel if it is loaded already, else null. Never compiles.
  [[nodiscard]] std::shared_ptr<const Kernel> find(const DeviceContext& context, const Specialization& spec) const;

  /// Compiles without a context or a GPU; the artifact is shared with later get() calls.
  std::shared_ptr<const CompiledKernel> compile(const Specialization& spec);

  /// The target to generate code for on `info`'s GPU with this cache's NVRTC.
  [[nodiscard]] Target target_for(const DeviceInfo& info) const;

  [[nodiscard]] CacheStats stats() const;

  /// The cache's memo, made by `make` at the first call.
  PlanMemo& plan_memo(std::unique_ptr<PlanMemo> (*make)());

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkvjit
