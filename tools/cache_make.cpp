// SPDX-License-Identifier: Apache-2.0
// The subcommands that compile.
#include <fmt/format.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <iostream>
#include <mutex>

#include "cache/artifact_entry.h"
#include "cache/bundle_set.h"
#include "cache_commands.h"
#include "cache_store.h"
#include "compile/compiler.h"
#include "compile/name_expression.h"
#include "cuda/nvrtc.h"
#include "problem_list.h"
#include "support/parallel.h"
#include "support/stopwatch.h"

namespace qkvjit::tools {
namespace {

/// "[3/12] qkv_decode …" on the standard error: in place on a terminal, a line a kernel elsewhere. Thread-safe.
class Progress {
 public:
  explicit Progress(std::size_t total) : total_(total) {}
  ~Progress() {
    if (is_terminal_) std::cerr << "\x1b[2K" << std::flush;
  }
  Progress(const Progress&) = delete;  // owns the terminal's line
  Progress& operator=(const Progress&) = delete;

  void step(const std::string& kernel) {
    const std::lock_guard lock(mutex_);
    std::cerr << fmt::format("{}[{}/{}] {}{}", is_terminal_ ? "\x1b[2K" : "", ++done_, total_, kernel,
                             is_terminal_ ? "\r" : "\n")
              << std::flush;
  }

 private:
  const bool is_terminal_ = isatty(STDERR_FILENO) != 0;
  const std::size_t total_;
  std::mutex mutex_;
  std::size_t done_ = 0;
};

/// make(i) for each kernel, on several threads. The first failure stops what has not begun, and is thrown.
void make_all(const std::vector<Specialization>& specs, unsigned threads,
              const std::function<void(std::size_t)>& make) {
  Progress progress(specs.size());
  std::mutex mutex;
  std::exception_ptr failure;
  for_each_parallel(specs.size(), threads, [&](std::size_t i) {
    {
      const std::lock_guard lock(mutex);
      if (failure != nullptr) return;
    }
    try {
      make(i);
      progress.step(kernel_label(specs[i]));
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (failure == nullptr) failure = std::current_exception();
    }
  });
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace

int export_bundle(const CacheArguments& args) {
  const Stopwatch watch;
  const std::vector<Specialization> specs = read_specializations(args.problems, args.arches, args.multiprocessors);
  const std::shared_ptr<const NvrtcTable> nvrtc = open_nvrtc();
  std::vector<BundleEntry> entries(specs.size());
  make_all(specs, args.threads, [&](std::size_t i) {
    const ArtifactKey key = ArtifactKey::of(specs[i], *nvrtc);
    entries[i] = {key.digest(), encode_entry(key, compile_kernel(*nvrtc, specs[i]))};
  });
  std::uint64_t bytes = 0;
  for (const BundleEntry& entry : entries) bytes += entry.bytes.size();
  write_bundle(args.output, std::move(entries), producer_of(*nvrtc));
  const double seconds = watch.milliseconds() / 1000;
  if (args.json) {
    print_json({{"bundle", args.output}, {"kernels", specs.size()}, {"bytes", bytes}, {"seconds", seconds}});
  } else {
    fmt::print("{}: {} kernels, {:.1f} MB, in {:.1f} s\n", args.output, specs.size(), static_cast<double>(bytes) / 1e6,
               seconds);
  }
  return 0;
}

int warm_folder(const CacheArguments& args) {
  const Stopwatch watch;
  const std::string folder = open_directory(args.directory)->directory().string();
  CacheOptions options;
  options.directory = folder;
  KernelCache cache(options);
  std::size_t kernels = 0;
  if (args.arches.empty()) {
    const DeviceContext context(args.device);
    const std::vector<QkvProblem> problems = read_problem_list(args.problems);
    PrepareOptions how;
    how.threads = args.threads;
    std::once_flag begun;
    std::optional<Progress> progress;
    how.progress = [&](const PrepareProgress& step) {
      std::call_once(begun, [&] { progress.emplace(step.total); });
      if (step.phase == PreparePhase::ready) progress->step(step.kernel);
    };
    kernels = cache.prepare(context, problems, how).kernels;
  } else {
    const std::vector<Specialization> specs = read_specializations(args.problems, args.arches, args.multiprocessors);
    make_all(specs, args.threads, [&](std::size_t i) { (void)cache.compile(specs[i]); });
    kernels = specs.size();
  }
  const CacheStats stats = cache.stats();
  const double seconds = watch.milliseconds() / 1000;
  if (args.json) {
    print_json({{"directory", folder},
                {"kernels", kernels},
                {"found", stats.disk.hits},
                {"compiled", stats.compiles},
                {"stored", stats.disk.stores},
                {"seconds", seconds}});
  } else {
    fmt::print("{}: {} kernels, {} were there, {} compiled, {} stored, in {:.1f} s\n", folder, kernels, stats.disk.hits,
               stats.compiles, stats.disk.stores, seconds);
  }
  // A cache problem failed no compile, but here the folder is the purpose.
  return stats.disk.stores == stats.compiles ? 0 : 1;
}

}  // namespace qkvjit::tools
