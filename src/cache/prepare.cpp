// SPDX-License-Identifier: Apache-2.0
#include "cache/prepare.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <string>
#include <utility>

#include "cache/events.h"
#include "compile/name_expression.h"
#include "cuda/fork_guard.h"
#include "qkvjit/error.h"
#include "support/log.h"
#include "support/parallel.h"
#include "support/stopwatch.h"

namespace qkvjit {

struct PrepareTask::State {
  const unsigned made_in = fork_generation();  // a thread of the parent does not run in its child
  std::atomic<bool> is_cancelled{false};
  mutable std::mutex mutex;  // of all below
  mutable std::condition_variable ended;
  bool is_done = false;
  PrepareReport report;
  std::exception_ptr failure;
};

namespace {

struct Failure {
  std::string kernel;
  std::string text;
  std::exception_ptr cause;
};

/// The first line of what a kernel's failure says: a compile error has hundreds.
Failure describe_failure(const Specialization& spec) {
  std::string text = current_error_text();
  text.resize(std::min(text.find('\n'), text.size()));
  return {kernel_label(spec), std::move(text), std::current_exception()};
}

[[noreturn]] void throw_failures(std::vector<Failure> failures, std::size_t total) {
  std::string text =
      fmt::format("prepare: {} of {} kernels could not be made, the others are ready; causes() has each error in full:",
                  failures.size(), total);
  std::vector<std::exception_ptr> causes;
  for (Failure& failure : failures) {
    text += fmt::format("\n  {}: {}", failure.kernel, failure.text);
    causes.push_back(std::move(failure.cause));
  }
  throw PrepareFailed(text, std::move(causes));
}

/// One call of prepare(), or the work of one task.
class Preparation {
 public:
  Preparation(KernelCache& cache, const DeviceContext& context, std::vector<Specialization> specs,
              const PrepareOptions& options, const std::atomic<bool>* is_cancelled)
      : cache_(cache), context_(context), specs_(std::move(specs)), options_(options), is_cancelled_(is_cancelled) {}

  PrepareReport run() {
    for_each_parallel(specs_.size(), options_.threads, [&](std::size_t i) { make(specs_[i]); });
    if (!failures_.empty()) throw_failures(std::move(failures_), specs_.size());
    return {.kernels = specs_.size(),
            .already_loaded = already_loaded_,
            .skipped = skipped_,
            .cancelled = cancelled(),
            .elapsed_ms = watch_.milliseconds()};
  }

 private:
  [[nodiscard]] bool cancelled() const {
    return is_cancelled_ != nullptr && is_cancelled_->load(std::memory_order_relaxed);
  }

  void make(const Specialization& spec) {
    if (cancelled()) {
      ++skipped_;
      return;
    }
    PreparePhase end = PreparePhase::ready;
    try {
      if (cache_.find(context_, spec) != nullptr) {
        ++already_loaded_;
      } else {
        if (!cache_.is_compiled(spec)) {
          tell(PreparePhase::compile, spec, done_);
          cache_.compile(spec);
        }
        tell(PreparePhase::load, spec, done_);
      }
      cache_.pin(context_, spec);
    } catch (...) {
      end = PreparePhase::failed;
      Failure failure = describe_failure(spec);
      const std::lock_guard lock(mutex_);
      failures_.push_back(std::move(failure));
    }
    tell(end, spec, ++done_);
  }

  void tell(PreparePhase phase, const Specialization& spec, std::size_t done) const {
    if (!options_.progress) return;
    try {
      options_.progress({phase, spec, kernel_label(spec), watch_.milliseconds(), done, specs_.size()});
    } catch (...) {
      log::line(log::Level::warn, "prepare: the progress callback threw: {}", current_error_text());
    }
  }

  KernelCache& cache_;
  const DeviceContext& context_;
  const std::vector<Specialization> specs_;
  const PrepareOptions& options_;
  const std::atomic<bool>* is_cancelled_;  // null where nobody can cancel
  const Stopwatch watch_;
  std::atomic<std::size_t> done_{0};
  std::atomic<std::size_t> already_loaded_{0};
  std::atomic<std::size_t> skipped_{0};
  std::mutex mutex_;  // of the list below
  std::vector<Failure> failures_;
};

}  // namespace

const char* to_string(PreparePhase phase) noexcept {
  switch (phase) {
    case PreparePhase::compile:
      return "compile";
    case PreparePhase::load:
      return "load";
    case PreparePhase::ready:
      return "ready";
    case PreparePhase::failed:
      return "failed";
  }
  return "unknown";
}

bool PrepareTask::wait_for(std::chrono::milliseconds timeout) const {
  if (state_->made_in != fork_generation()) throw_forked_process("PrepareTask");
  std::unique_lock lock(state_->mutex);
  timeout = std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(1000));  // a longer one would overflow
  return state_->ended.wait_for(lock, timeout, [&] { return state_->is_done; });
}

PrepareReport PrepareTask::get() const {
  while (!wait_for(std::chrono::hours(1))) {
  }
  const std::lock_guard lock(state_->mutex);
  if (state_->failure != nullptr) std::rethrow_exception(state_->failure);
  return state_->report;
}

void PrepareTask::cancel() const noexcept { state_->is_cancelled.store(true, std::memory_order_relaxed); }

PrepareReport prepare_now(KernelCache& cache, const DeviceContext& context, std::vector<Specialization> specs,
                          const PrepareOptions& options) {
  return Preparation(cache, context, std::move(specs), options, nullptr).run();
}

PrepareTask PrepareJobs::start(KernelCache& cache, const DeviceContext& context, std::vector<Specialization> specs,
                               PrepareOptions options) {
  auto state = std::make_shared<PrepareTask::State>();
  const std::lock_guard lock(mutex_);
  std::erase_if(jobs_, [](const Job& job) {
    const std::lock_guard job_lock(job.state->mutex);
    return job.state->is_done;
  });
  jobs_.push_back(
      {state, std::jthread([&cache, context, specs = std::move(specs), options = std::move(options), state]() mutable {
         PrepareReport report;
         std::exception_ptr failure;
         try {
           report = Preparation(cache, context, std::move(specs), options, &state->is_cancelled).run();
         } catch (...) {
           failure = std::current_exception();
         }
         const std::lock_guard end_lock(state->mutex);
         state->report = report;
         state->failure = std::move(failure);
         state->is_done = true;
         state->ended.notify_all();
       })});
  return PrepareTask(std::move(state));
}

void PrepareJobs::stop() noexcept {
  std::list<Job> jobs;
  {
    const std::lock_guard lock(mutex_);
    jobs.swap(jobs_);
  }
  for (const Job& job : jobs) PrepareTask(job.state).cancel();
  jobs.clear();  // joins
}

}  // namespace qkvjit
