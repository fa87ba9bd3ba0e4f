// SPDX-License-Identifier: Apache-2.0
// The work behind KernelCache::prepare(): a list of kernels compiled, loaded and pinned side by side.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "qkvjit/kernel_cache.h"

namespace qkvjit {

/// Does the work on this thread and others. Throws PrepareFailed.
PrepareReport prepare_now(KernelCache& cache, const DeviceContext& context, std::vector<Specialization> specs,
                          const PrepareOptions& options);

/// The work that goes on in threads of its own. The cache must outlive it. Thread-safe.
class PrepareJobs {
 public:
  PrepareJobs() = default;
  ~PrepareJobs() { stop(); }
  PrepareJobs(const PrepareJobs&) = delete;  // owns threads
  PrepareJobs& operator=(const PrepareJobs&) = delete;

  PrepareTask start(KernelCache& cache, const DeviceContext& context, std::vector<Specialization> specs,
                    PrepareOptions options);
  /// Cancels all and waits for what runs.
  void stop() noexcept;

 private:
  struct Job {
    std::shared_ptr<PrepareTask::State> state;
    std::jthread thread;
  };
  std::mutex mutex_;
  std::list<Job> jobs_;
};

}  // namespace qkvjit
