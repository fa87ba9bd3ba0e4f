// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/kernel_cache.h"

#include <fmt/format.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>

#include "cache/artifact_entry.h"
#include "cache/bundle_set.h"
#include "cache/disk_cache.h"
#include "cache/events.h"
#include "cache/prepare.h"
#include "cache/single_flight_map.h"
#include "compile/compiler.h"
#include "compile/name_expression.h"
#include "cuda/device_state.h"
#include "cuda/fork_guard.h"
#include "cuda/nvrtc.h"
#include "qkvjit/error.h"
#include "qkvjit/remote_cache.h"
#include "qkvjit/select.h"
#include "support/log.h"
#include "support/parallel.h"
#include "support/profiler_range.h"
#include "support/rate_limit.h"
#include "support/stopwatch.h"

namespace qkvjit {
namespace {

/// A module belongs to a context; the context's id is never reused, its address may be.
struct LoadedKey {
  std::uint64_t context_id = 0;
  Specialization spec;
  bool operator==(const LoadedKey&) const = default;
};

struct LoadedKeyHash {
  std::size_t operator()(const LoadedKey& key) const noexcept {
    return SpecializationHash{}(key.spec) ^ static_cast<std::size_t>(key.context_id * 0x9e3779b97f4a7c15u);
  }
};

class LoadedKernel final : public Kernel {
 public:
  LoadedKernel(std::shared_ptr<const CompiledKernel> compiled, CUfunction function, bool from_ptx, UniqueModule module)
      : Kernel(std::move(compiled), function, from_ptx), module_(std::move(module)) {}

 private:
  UniqueModule module_;
};

std::size_t artifact_bytes(const CompiledKernel& kernel) {
  return sizeof(kernel) + kernel.lowered_name.size() + kernel.ptx.size() + kernel.cubin.size() + kernel.log.size();
}

/// FreezePolicy, and neither.
enum class Frozen : std::uint8_t { no, warn, refuse };

}  // namespace

struct KernelCache::Impl {
  Impl* kept_before = nullptr;  ///< of those that a forked child keeps
  explicit Impl(CacheOptions given) : options(std::move(given)) {}

  CacheOptions options;
  BundleSet bundles{options.bundles};
  DiskCache disk{{options.directory, options.max_disk_bytes, options.lock_timeout}};
  const unsigned made_in = fork_generation();
  SingleFlightMap<Specialization, CompiledKernel, SpecializationHash> compiled{artifact_bytes};
  SingleFlightMap<LoadedKey, Kernel, LoadedKeyHash> loaded{[](const Kernel&) { return std::size_t{1}; }};
  std::atomic<Frozen> frozen{Frozen::no};
  RateLimit frozen_warnings, limit_warnings;

  mutable std::mutex mutex;  // of the two below
  std::shared_ptr<const NvrtcTable> nvrtc;
  CacheStats stats;
  std::atomic<std::uint64_t> memory_hits{0};

  std::once_flag plan_memo_once;
  std::unique_ptr<PlanMemo> plan_memo;  // its plans hold kernels: destroyed before the maps
  PrepareJobs jobs;                     // use all of the above

  /// A lock that another thread of the parent held at the fork stays locked in the child, so this comes before any.
  void require_own_process() const {
    if (made_in != fork_generation()) throw_forked_process("KernelCache");
  }

  void count(std::uint64_t CacheStats::*counter, std::uint64_t by = 1) {
    if (by == 0) return;
    const std::lock_guard lock(mutex);
    stats.*counter += by;
  }

  /// NVRTC is opened when it is first needed: a process that only finds kernels never pays for it. `driver_version`
  /// limits its major; 0 where there is no driver.
  std::shared_ptr<const NvrtcTable> nvrtc_for(int driver_version) {
    const std::lock_guard lock(mutex);
    if (nvrtc == nullptr) nvrtc = open_nvrtc(driver_version / 1000);
    return nvrtc;
  }

  /// Before a compile. Throws CacheFrozen.
  void require_not_frozen(const Specialization& spec, EventList& events) {
    const Frozen state = frozen.load(std::memory_order_relaxed);
    if (state == Frozen::no) return;
    if (state == Frozen::warn) {
      count(&CacheStats::frozen_compiles);
      if (const auto held_back = frozen_warnings.try_pass()) {
        log::line(log::Level::warn, "the cache is frozen, yet a kernel is compiled: {} ({} more like it before)",
                  describe(spec), *held_back);
      }
      return;
    }
    count(&CacheStats::frozen_refusals);
    std::string text = fmt::format(
        "the cache is frozen and has no kernel for {}; add its problem to prepare() before freeze(), or call "
        "unfreeze()",
        describe(spec));
    events.add(CacheEventKind::compile_refused, spec, 0, text);
    throw CacheFrozen(text);
  }

  std::shared_ptr<const CompiledKernel> make_artifact(const Specialization& spec, int driver_version,
                                                      EventList& events) {
    const ProfilerRange range([&] { return "compile " + kernel_label(spec); });
    const Stopwatch watch;
    try {
      auto kernel = std::make_shared<const CompiledKernel>(compile_kernel(*nvrtc_for(driver_version), spec));
      events.add(CacheEventKind::compiled, spec, kernel->compile_ms);
      const std::lock_guard lock(mutex);
      ++stats.compiles;
      stats.compile_ms += kernel->compile_ms;
      return kernel;
    } catch (...) {
      events.add(CacheEventKind::compile_failed, spec, watch.milliseconds(), current_error_text());
      count(&CacheStats::compile_failures);
      throw;
    }
  }

  std::shared_ptr<const CompiledKernel> find_in_bundles(const Specialization& spec, int driver_version) {
    if (bundles.empty()) return nullptr;
    auto stored = bundles.load(spec, *nvrtc_for(driver_version));
    if (!stored.has_value()) return nullptr;
    count(&CacheStats::bundle_hits);
    return std::make_shared<const CompiledKernel>(*std::move(stored));
  }

  /// Names the compiler, so NVRTC is opened also where the kernel is found. Nothing where neither a disk cache nor a
  /// remote one is there, or no NVRTC: then the compile says so.
  std::optional<ArtifactKey> store_key(const Specialization& spec, int driver_version) {
    if (!disk.is_usable() && options.remote == nullptr) return std::nullopt;
    try {
      ArtifactKey key = ArtifactKey::of(spec, *nvrtc_for(driver_version));
      return key.is_complete() ? std::optional(std::move(key)) : std::nullopt;
    } catch (const LibraryUnavailable&) {
      return std::nullopt;
    }
  }

  std::shared_ptr<const CompiledKernel> find_remotely(const ArtifactKey& key, const Specialization& spec) {
    if (options.remote == nullptr) return nullptr;
    const std::optional<std::string> bytes = options.remote->load(key.name());
    if (!bytes.has_value()) return nullptr;
    auto entry = decode_entry(*bytes, key, spec);
    if (const auto* fault = std::get_if<EntryFault>(&entry)) {
      count(&CacheStats::remote_rejected);
      log::line(log::Level::debug, "an entry of {} is not used: {}", options.remote->where(), fault->reason);
      return nullptr;
    }
    count(&CacheStats::remote_hits);
    return std::make_shared<const CompiledKernel>(std::get<CompiledKernel>(std::move(entry)));
  }

  std::shared_ptr<const CompiledKernel> find_stored_or_make(const Specialization& spec, int driver_version,
                                                            EventList& events) {
    const auto key = store_key(spec, driver_version);
    if (!key.has_value()) {
      require_not_frozen(spec, events);
      return make_artifact(spec, driver_version, events);
    }
    const auto find = [&](bool is_second_look) {
      auto stored = disk.load(*key, spec, is_second_look);
      return stored.has_value() ? std::make_shared<const CompiledKernel>(*std::move(stored)) : nullptr;
    };
    if (auto stored = find(false)) return stored;
    if (auto stored = find_remotely(*key, spec)) {
      disk.store(*key, *stored);
      return stored;
    }
    require_not_frozen(spec, events);
    const KeyLock lock = disk.lock(*key);
    if (auto stored = find(true)) return stored;  // another process was quicker
    auto made = make_artifact(spec, driver_version, events);
    disk.store(*key, *made);
    if (options.remote != nullptr) options.remote->store(key->name(), encode_entry(*key, *made));
    return made;
  }

  std::shared_ptr<const CompiledKernel> compile(const Specialization& spec, int driver_version, EventList& events) {
    if (auto found = compiled.find(spec)) return found;
    return get_counted(compiled, spec, spec, Keep::while_used, events, [&] {
      if (auto stored = find_in_bundles(spec, driver_version)) return stored;
      return find_stored_or_make(spec, driver_version, events);
    });
  }

  std::shared_ptr<const Kernel> get(const DeviceContext& context, const Specialization& spec, Keep keep) {
    require_own_process();
    const LoadedKey key{context.state()->id, spec};
    if (auto found = loaded.find(key, keep)) {
      memory_hits.fetch_add(1, std::memory_order_relaxed);
      if (log::enabled(log::Level::trace)) log::write(log::Level::trace, "found " + kernel_label(spec));
      return found;
    }
    return with_events(options.on_event, [&](EventList& events) {
      auto kernel = get_counted(loaded, key, spec, keep, events, [&] { return load(context, spec, events); });
      trim(events);
      return kernel;
    });
  }

  /// map.get(), with waits for other threads counted and reported.
  template <typename Map, typename Key, typename Make>
  typename Map::Value get_counted(Map& map, const Key& key, const Specialization& spec, Keep keep, EventList& events,
                                  Make&& make) {
    const Stopwatch watch;
    auto result = map.get(key, keep, std::forward<Make>(make));
    if (result.waited) {
      count(&CacheStats::waits);
      events.add(CacheEventKind::waited, spec, watch.milliseconds());
    }
    return std::move(result.value);
  }

  std::shared_ptr<const Kernel> load(const DeviceContext& context, const Specialization& spec, EventList& events) {
    const std::shared_ptr<const CompiledKernel> artifact = compile(spec, context.info().driver_version, events);
    const ProfilerRange range([&] { return "load " + kernel_label(spec); });
    const Stopwatch watch;
    try {
      auto kernel = load_artifact(context, artifact);
      const double milliseconds = watch.milliseconds();
      log::line(log::Level::debug, "loaded {} from {} on device {} in {:.1f} ms", kernel_label(spec),
                kernel->loaded_from_ptx() ? "PTX" : "cubin", context.info().ordinal, milliseconds);
      events.add(CacheEventKind::loaded, spec, milliseconds);
      const std::lock_guard lock(mutex);
      ++stats.loads;
      stats.load_ms += milliseconds;
      return kernel;
    } catch (...) {
      events.add(CacheEventKind::load_failed, spec, watch.milliseconds(), current_error_text());
      count(&CacheStats::load_failures);
      throw;
    }
  }

  std::shared_ptr<const Kernel> load_artifact(const DeviceContext& context,
                                              const std::shared_ptr<const CompiledKernel>& artifact) const {
    const std::shared_ptr<DeviceState>& state = context.state();
    const Specialization& spec = artifact->spec;
    const DriverTable& driver = *state->driver;
    const bool from_ptx =
        options.load == LoadFrom::ptx || artifact->cubin.empty() || !cubin_runs_on(spec.target, context.info().sm());

    const ContextScope scope(*state);
    const RelaxedCapture relaxed(driver);  // another thread's capture lives on
    const void* image = from_ptx ? static_cast<const void*>(artifact->ptx.c_str()) : artifact->cubin.data();
    CUmodule raw = nullptr;
    check(driver, driver.cuModuleLoadData(&raw, image),
          from_ptx ? "cuModuleLoadData (PTX)" : "cuModuleLoadData (cubin)");
    UniqueModule module(state, raw);
    CUfunction function = nullptr;
    check(driver, driver.cuModuleGetFunction(&function, module.get(), artifact->lowered_name.c_str()),
          "cuModuleGetFunction");
    check(driver,
          driver.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                    static_cast<int>(smem_bytes(spec))),
          "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)");
    if (waits_for_grids_ahead(spec)) {
      // Blocks of two launches share a multiprocessor, so all of its memory that can be shared should be.
      check(driver, driver.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            "cuFuncSetAttribute(PREFERRED_SHARED_MEMORY_CARVEOUT)");
    }
    // Without this a lazily loading driver would do the work inside the first launch.
    if (driver.cuFuncLoad != nullptr) check(driver, driver.cuFuncLoad(function), "cuFuncLoad");

    return std::make_shared<const LoadedKernel>(artifact, function, from_ptx, std::move(module));
  }

  /// Keeps to the limits. Modules first: what they were made of is then used by nobody.
  void trim(EventList& events) {
    std::vector<std::shared_ptr<const Kernel>> kernels = loaded.take_surplus(options.max_modules);
    for (std::shared_ptr<const Kernel>& kernel : kernels) {
      const Specialization spec = kernel->spec();
      const Stopwatch watch;
      kernel.reset();  // unloads
      events.add(CacheEventKind::module_evicted, spec, watch.milliseconds());
      log::line(log::Level::debug, "unloaded {}", kernel_label(spec));
    }
    count(&CacheStats::module_evictions, kernels.size());
    // A few more are no news: other threads hold what they have just got.
    if (options.max_modules != 0 && loaded.cost() > options.max_modules + options.max_modules / 4 &&
        limit_warnings.try_pass()) {
      log::line(log::Level::warn,
                "{} kernels are loaded and all in use or pinned, max_modules is {}: raise it, or let go of plans",
                loaded.cost(), options.max_modules);
    }
    const auto artifacts = compiled.take_surplus(options.max_artifact_bytes);
    for (const auto& artifact : artifacts) events.add(CacheEventKind::artifact_evicted, artifact->spec, 0);
    count(&CacheStats::artifact_evictions, artifacts.size());
  }

  [[nodiscard]] std::vector<Specialization> needed(const DeviceContext& context, std::span<const QkvProblem> problems,
                                                   const PrepareOptions& how) {
    require_own_process();
    const DeviceInfo& info = context.info();
    const Target target = choose_target(info.sm(), nvrtc_for(info.driver_version)->targets).target;
    std::vector<Specialization> specs;
    std::unordered_set<Specialization, SpecializationHash> seen;
    for (const QkvProblem& problem : problems) {
      for (const Specialization& spec :
           needed_specializations(problem, info, target, how.max_m, how.weights_are_constant, how.tuning)) {
        if (seen.insert(spec).second) specs.push_back(spec);
      }
    }
    return specs;
  }
};

KernelCache::KernelCache(CacheOptions options) : KernelCache(std::move(options), nullptr) {}

KernelCache::KernelCache(CacheOptions options, std::shared_ptr<const NvrtcTable> nvrtc)
    : impl_(std::make_unique<Impl>(std::move(options))) {
  impl_->nvrtc = std::move(nvrtc);
}

KernelCache::~KernelCache() {
  if (impl_->made_in != fork_generation()) {
    // Of a parent: its threads do not run here, its locks may be held for ever, its modules are not ours to unload.
    // Kept for good, and in reach, so that a leak checker has nothing to say.
    static std::atomic<Impl*> kept{nullptr};
    Impl* const mine = impl_.release();
    mine->kept_before = kept.exchange(mine);
    return;
  }
  impl_->jobs.stop();
}

std::shared_ptr<const Kernel> KernelCache::get(const DeviceContext& context, const Specialization& spec) {
  return impl_->get(context, spec, Keep::while_used);
}

std::shared_ptr<const Kernel> KernelCache::pin(const DeviceContext& context, const Specialization& spec) {
  return impl_->get(context, spec, Keep::forever);
}

std::vector<std::shared_ptr<const Kernel>> KernelCache::get_all(const DeviceContext& context,
                                                                std::span<const Specialization> specs,
                                                                unsigned threads) {
  std::vector<std::shared_ptr<const Kernel>> kernels(specs.size());
  std::exception_ptr failure;
  std::mutex failure_mutex;
  for_each_parallel(specs.size(), threads, [&](std::size_t i) {
    try {
      kernels[i] = get(context, specs[i]);
    } catch (...) {
      const std::lock_guard lock(failure_mutex);
      if (failure == nullptr) failure = std::current_exception();
    }
  });
  if (failure != nullptr) std::rethrow_exception(failure);
  return kernels;
}

std::shared_ptr<const Kernel> KernelCache::find(const DeviceContext& context, const Specialization& spec) const {
  impl_->require_own_process();
  return impl_->loaded.find({context.state()->id, spec});
}

std::shared_ptr<const CompiledKernel> KernelCache::compile(const Specialization& spec) {
  impl_->require_own_process();
  return with_events(impl_->options.on_event, [&](EventList& events) {
    auto artifact = impl_->compile(spec, 0, events);
    impl_->trim(events);
    return artifact;
  });
}

bool KernelCache::is_compiled(const Specialization& spec) const {
  impl_->require_own_process();
  return impl_->compiled.find(spec) != nullptr;
}

PrepareReport KernelCache::prepare(const DeviceContext& context, std::span<const QkvProblem> problems,
                                   const PrepareOptions& options) {
  return prepare_now(*this, context, impl_->needed(context, problems, options), options);
}

PrepareTask KernelCache::prepare_async(const DeviceContext& context, std::span<const QkvProblem> problems,
                                       PrepareOptions options) {
  auto specs = impl_->needed(context, problems, options);
  options.tuning = nullptr;  // may be gone before the task begins
  return impl_->jobs.start(*this, context, std::move(specs), std::move(options));
}

void KernelCache::freeze(FreezePolicy policy) noexcept {
  impl_->frozen.store(policy == FreezePolicy::warn ? Frozen::warn : Frozen::refuse, std::memory_order_relaxed);
}

void KernelCache::unfreeze() noexcept { impl_->frozen.store(Frozen::no, std::memory_order_relaxed); }

Target KernelCache::target_for(const DeviceInfo& info) const {
  impl_->require_own_process();
  return choose_target(info.sm(), impl_->nvrtc_for(info.driver_version)->targets).target;
}

CacheStats KernelCache::stats() const {
  impl_->require_own_process();
  const std::lock_guard lock(impl_->mutex);
  CacheStats stats = impl_->stats;
  stats.memory_hits = impl_->memory_hits.load(std::memory_order_relaxed);
  stats.bundle_rejected = impl_->bundles.rejected();
  stats.disk = impl_->disk.stats();
  stats.modules = impl_->loaded.cost();
  stats.artifact_bytes = impl_->compiled.cost();
  return stats;
}

PlanMemo& KernelCache::plan_memo(std::unique_ptr<PlanMemo> (*make)()) {
  std::call_once(impl_->plan_memo_once, [&] { impl_->plan_memo = make(); });
  return *impl_->plan_memo;
}

}  // namespace qkvjit
