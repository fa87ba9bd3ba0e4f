// SPDX-License-Identifier: Apache-2.0
// KernelCache: from a Specialization to a loaded kernel, compiled at the first call and found afterwards.
// Thread-safe. One compile a key however many threads ask; a failed compile reaches every waiter and is
// forgotten. A limit on loaded kernels unloads the least recently used. The caller owns the cache. Kernels and eagerly
// bound plans may outlive it; lazily bound ones may not.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qkvjit/device_context.h"
#include "qkvjit/prepare.h"
#include "qkvjit/qkv_problem.h"
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

class RemoteStore;  // remote_cache.h

enum class LoadFrom : std::uint8_t { cubin, ptx };

enum class CacheEventKind : std::uint8_t {
  compiled,
  compile_failed,
  compile_refused,  ///< by freeze()
  loaded,
  load_failed,
  waited,            ///< for another thread that made the same kernel
  module_evicted,    ///< a kernel was unloaded for max_modules
  artifact_evicted,  ///< a compiled kernel was dropped for max_artifact_bytes
};
const char* to_string(CacheEventKind kind) noexcept;

struct CacheEvent {
  CacheEventKind kind = CacheEventKind::compiled;
  Specialization spec;
  std::string kernel;       ///< "qkv_decode m16n64_w1x1x8_s4_b2 sm_90"
  std::string key;          ///< every field of `spec`, as text
  double milliseconds = 0;  ///< what it took
  std::string error;        ///< what() of a failure
};

struct CacheOptions {
  LoadFrom load = LoadFrom::cubin;  ///< ptx: hand the PTX to the driver even where there is a cubin
  /// Beyond so many loaded kernels (of all contexts together) the least recently used ones are unloaded; 0: no limit.
  /// Those that a plan or a handle holds, that were pinned or prepared, or that a call without a plan has launched
  /// stay, for a graph may have captured them; where all stay there are more, and a warning.
  std::size_t max_modules = 1024;
  /// As max_modules, for compiled kernels that no loaded one uses; 0: no limit.
  std::size_t max_artifact_bytes = std::size_t{256} << 20;
  /// Bundles that qkvjit-cache export wrote: read where they lie, before anything is compiled. One that cannot be read,
  /// or is of other templates or another NVRTC, is left out with a warning that says what differs.
  std::vector<std::string> bundles = {};
  /// The folder of compiled kernels that processes share; nullopt: $QKVJIT_CACHE_DIR, else $XDG_CACHE_HOME/qkvjit, else
  /// $HOME/.cache/qkvjit; an empty path: none, kernels are kept in memory only. It must be the user's alone (it is made
  /// with mode 0700), else it is not used, with a warning. Its failures are misses: no call fails for them.
  std::optional<std::filesystem::path> directory = std::nullopt;
  /// Beyond so many bytes in the folder the least recently used kernels are removed; 0: no limit.
  std::uint64_t max_disk_bytes = std::uint64_t{1} << 30;
  /// How long to wait for another process that compiles the same kernel, before it is compiled here too.
  std::chrono::milliseconds lock_timeout{10'000};
  /// A cache that a fleet shares (make_remote_store in remote_cache.h): asked after the folder and before compiling, at
  /// most for its deadline, and given what was compiled here. What it brings is verified and kept in the folder.
  std::shared_ptr<RemoteStore> remote = {};
  /// Called on the thread whose call it is of, several at once, with no lock held; may call the cache, but not destroy
  /// it. What it throws is logged and dropped. Hits have no event.
  std::function<void(const CacheEvent&)> on_event = {};
};

/// What a compile does after KernelCache::freeze().
enum class FreezePolicy : std::uint8_t {
  warn,    ///< happens, with a warning (a few a minute at most)
  refuse,  ///< throws CacheFrozen
};

/// Of CacheOptions::directory.
struct DiskStats {
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  std::uint64_t rejected = 0;                             ///< bad entries, which were removed
  std::map<std::string, std::uint64_t> rejected_reasons;  ///< "checksum", "key", "too short", …
  std::uint64_t stores = 0;
  std::uint64_t errors = 0;         ///< failures of the file system, full disks too
  std::uint64_t evictions = 0;      ///< by this cache, for max_disk_bytes
  std::uint64_t lock_timeouts = 0;  ///< compiles that did not wait longer for another process's
  double ms = 0;                    ///< spent reading and writing
  double lock_wait_ms = 0;          ///< spent waiting for other processes
};

struct CacheStats {
  std::uint64_t memory_hits = 0;
  std::uint64_t bundle_hits = 0;      ///< kernels that a bundle had
  std::uint64_t remote_hits = 0;      ///< kernels that the remote store had; RemoteStore::stats() tells the rest
  std::uint64_t remote_rejected = 0;  ///< entries of the remote store that were damaged or of another key
  std::uint64_t bundle_rejected = 0;  ///< bundles and entries of them that could not be used
  std::uint64_t compiles = 0;
  std::uint64_t compile_failures = 0;
  std::uint64_t loads = 0;
  std::uint64_t load_failures = 0;
  std::uint64_t waits = 0;  ///< calls that waited for another thread that made the same kernel
  std::uint64_t module_evictions = 0;
  std::uint64_t artifact_evictions = 0;
  std::uint64_t frozen_compiles = 0;  ///< warned of
  std::uint64_t frozen_refusals = 0;  ///< that threw CacheFrozen
  double compile_ms = 0;
  double load_ms = 0;
  DiskStats disk;
  std::size_t modules = 0;         ///< loaded now
  std::size_t artifact_bytes = 0;  ///< of all compiled kernels in the cache now
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

  /// The kernel for `spec` in `context`; compiles and loads it at the first call. Hold what it returns for as long as
  /// launches of it run: see CacheOptions::max_modules.
  /// Throws LibraryUnavailable, CompileError, CacheFrozen, DriverError, ForkedProcess.
  std::shared_ptr<const Kernel> get(const DeviceContext& context, const Specialization& spec);

  /// As get(), and the kernel stays loaded for the cache's life.
  std::shared_ptr<const Kernel> pin(const DeviceContext& context, const Specialization& spec);

  /// As get(), for many; what is missing is compiled on up to `threads` threads (0: as many as the machine has).
  std::vector<std::shared_ptr<const Kernel>> get_all(const DeviceContext& context,
                                                     std::span<const Specialization> specs, unsigned threads = 0);

  /// The kernel if it is loaded already, else null. Never compiles.
  [[nodiscard]] std::shared_ptr<const Kernel> find(const DeviceContext& context, const Specialization& spec) const;

  /// Compiles without a context or a GPU; the artifact is shared with later get() calls.
  std::shared_ptr<const CompiledKernel> compile(const Specialization& spec);
  /// Whether compile() would find it in memory.
  [[nodiscard]] bool is_compiled(const Specialization& spec) const;

  /// Compiles, loads and pins every kernel that plans of `problems` and qkv_project_int4 can need
  /// (needed_specializations()): afterwards no launch of them waits for a compiler, whatever M and alignment. Those of
  /// prepack() and unpack() are not among them.
  /// Throws InvalidProblem, UnsupportedDevice and LibraryUnavailable before anything is made; PrepareFailed when all is
  /// done but some could not be made.
  PrepareReport prepare(const DeviceContext& context, std::span<const QkvProblem> problems,
                        const PrepareOptions& options = {});

  /// The same in threads of its own. The cache's destructor cancels what has not begun and waits for the rest.
  /// Throws at once what prepare() throws before anything is made; the task throws the rest.
  [[nodiscard]] PrepareTask prepare_async(const DeviceContext& context, std::span<const QkvProblem> problems,
                                          PrepareOptions options = {});

  /// From now on no kernel is compiled silently. Kernels already compiled are loaded as before.
  void freeze(FreezePolicy policy = FreezePolicy::refuse) noexcept;
  void unfreeze() noexcept;

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
