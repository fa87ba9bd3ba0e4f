// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/kernel_cache.h"

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "compile/compiler.h"
#include "compile/name_expression.h"
#include "cuda/device_state.h"
#include "cuda/nvrtc.h"
#include "qkvjit/error.h"
#include "qkvjit/select.h"

namespace qkvjit {
namespace {

/// A map from key to value in which each value is made once: the first to ask makes it, the others wait for it. A
/// failure reaches everyone who waits, and is forgotten. Values are found without the writer's lock.
template <typename Key, typename Value, typename Hash>
class SingleFlightMap {
 public:
  std::optional<Value> find(const Key& key) const {
    const std::shared_lock lock(mutex_);
    const auto it = ready_.find(key);
    return it == ready_.end() ? std::nullopt : std::optional<Value>(it->second);
  }

  template <typename Make>
  Value get(const Key& key, Make&& make) {
    std::promise<Value> promise;
    std::shared_future<Value> flight;
    {
      const std::unique_lock lock(mutex_);
      if (const auto it = ready_.find(key); it != ready_.end()) return it->second;
      const auto [it, is_mine] = flights_.try_emplace(key);
      if (is_mine) {
        it->second = promise.get_future().share();
      } else {
        flight = it->second;
      }
    }
    if (flight.valid()) return flight.get();

    // No lock is held while making: other keys go on, and `make` may use the cache.
    try {
      Value value = make();
      {
        const std::unique_lock lock(mutex_);
        ready_.emplace(key, value);
        flights_.erase(key);
      }
      promise.set_value(value);
      return value;
    } catch (...) {
      {
        const std::unique_lock lock(mutex_);
        flights_.erase(key);
      }
      promise.set_exception(std::current_exception());
      throw;
    }
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, Value, Hash> ready_;
  std::unordered_map<Key, std::shared_future<Value>, Hash> flights_;
};

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

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

struct KernelCache::Impl {
  CacheOptions options;
  SingleFlightMap<Specialization, std::shared_ptr<const CompiledKernel>, SpecializationHash> compiled;
  SingleFlightMap<LoadedKey, std::shared_ptr<const Kernel>, LoadedKeyHash> loaded;

  mutable std::mutex mutex;  // of the two below
  std::shared_ptr<const NvrtcTable> nvrtc;
  CacheStats stats;
  std::atomic<std::uint64_t> memory_hits{0};

  std::once_flag plan_memo_once;
  std::unique_ptr<PlanMemo> plan_memo;  // destroyed first: its plans hold kernels

  /// NVRTC is opened when it is first needed: a process that only finds kernels never pays for it. `driver_version`
  /// limits its major; 0 where there is no driver.
  std::shared_ptr<const NvrtcTable> nvrtc_for(int driver_version) {
    const std::lock_guard lock(mutex);
    if (nvrtc == nullptr) nvrtc = open_nvrtc(driver_version / 1000);
    return nvrtc;
  }

  std::shared_ptr<const CompiledKernel> compile(const Specialization& spec, int driver_version) {
    if (auto found = compiled.find(spec)) return *found;
    return compiled.get(spec, [&] {
      const std::shared_ptr<const NvrtcTable> table = nvrtc_for(driver_version);
      try {
        auto kernel = std::make_shared<const CompiledKernel>(compile_kernel(*table, spec));
        const std::lock_guard lock(mutex);
        ++stats.compiles;
        stats.compile_ms += kernel->compile_ms;
        return kernel;
      } catch (...) {
        const std::lock_guard lock(mutex);
        ++stats.compile_failures;
        throw;
      }
    });
  }

  std::shared_ptr<const Kernel> load(const DeviceContext& context, const Specialization& spec) {
    const std::shared_ptr<DeviceState>& state = context.state();
    const std::shared_ptr<const CompiledKernel> artifact = compile(spec, context.info().driver_version);
    const auto start = std::chrono::steady_clock::now();
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

    auto kernel = std::make_shared<const LoadedKernel>(artifact, function, from_ptx, std::move(module));
    const std::lock_guard lock(mutex);
    ++stats.loads;
    stats.load_ms += milliseconds_since(start);
    return kernel;
  }
};

KernelCache::KernelCache(CacheOptions options) : KernelCache(options, nullptr) {}

KernelCache::KernelCache(CacheOptions options, std::shared_ptr<const NvrtcTable> nvrtc)
    : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  impl_->nvrtc = std::move(nvrtc);
}

KernelCache::~KernelCache() = default;

std::shared_ptr<const Kernel> KernelCache::get(const DeviceContext& context, const Specialization& spec) {
  const LoadedKey key{context.state()->id, spec};
  if (auto found = impl_->loaded.find(key)) {
    impl_->memory_hits.fetch_add(1, std::memory_order_relaxed);
    return *std::move(found);
  }
  return impl_->loaded.get(key, [&] { return impl_->load(context, spec); });
}

std::vector<std::shared_ptr<const Kernel>> KernelCache::get_all(const DeviceContext& context,
                                                                std::span<const Specialization> specs,
                                                                unsigned threads) {
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::shared_ptr<const Kernel>> kernels(specs.size());
  std::exception_ptr failure;
  std::mutex failure_mutex;
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < specs.size(); i = next++) {
      try {
        kernels[i] = get(context, specs[i]);
      } catch (...) {
        const std::lock_guard lock(failure_mutex);
        if (failure == nullptr) failure = std::current_exception();
      }
    }
  };
  {
    std::vector<std::jthread> workers;
    for (std::size_t i = 1; i < std::min<std::size_t>(threads, specs.size()); ++i) workers.emplace_back(work);
    work();
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  return kernels;
}

std::shared_ptr<const Kernel> KernelCache::find(const DeviceContext& context, const Specialization& spec) const {
  return impl_->loaded.find({context.state()->id, spec}).value_or(nullptr);
}

std::shared_ptr<const CompiledKernel> KernelCache::compile(const Specialization& spec) {
  return impl_->compile(spec, 0);
}

Target KernelCache::target_for(const DeviceInfo& info) const {
  return choose_target(info.sm(), impl_->nvrtc_for(info.driver_version)->targets).target;
}

CacheStats KernelCache::stats() const {
  const std::lock_guard lock(impl_->mutex);
  CacheStats stats = impl_->stats;
  stats.memory_hits = impl_->memory_hits.load(std::memory_order_relaxed);
  return stats;
}

PlanMemo& KernelCache::plan_memo(std::unique_ptr<PlanMemo> (*make)()) {
  std::call_once(impl_->plan_memo_once, [&] { impl_->plan_memo = make(); });
  return *impl_->plan_memo;
}

}  // namespace qkvjit
