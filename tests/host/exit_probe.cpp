// SPDX-License-Identifier: Apache-2.0
// A process that ends with caches alive in the way its argument names; what it prints and its exit code are the test.
// Driver and NVRTC are fakes.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "qkvjit/qkvjit.h"
#include "support/fake_driver.h"
#include "support/fake_nvrtc.h"

namespace {

using namespace qkvjit;

const QkvProblem kProblem{.n_q = 64, .n_k = 8, .n_v = 24, .k = 128};

/// A context, a cache, kernels and a plan; and work that goes on where `is_busy`.
struct Service {
  explicit Service(bool is_busy) : context(0, fake::table()), cache({}, fake::nvrtc()) {
    plan = std::make_unique<QkvPlan>(cache, context, kProblem);
    if (!is_busy) return;
    fake::nvrtc_milliseconds = 50;
    std::vector<QkvProblem> problems(20, kProblem);
    for (std::size_t i = 0; i < problems.size(); ++i) problems[i].n_q = 128 + 8 * i;
    task = std::make_unique<PrepareTask>(cache.prepare_async(context, problems, {.threads = 2}));
  }
  DeviceContext context;
  KernelCache cache;
  std::unique_ptr<QkvPlan> plan;
  std::unique_ptr<PrepareTask> task;
};

/// Where CUDA is alive no more when the process ends.
void end_driver_at_exit() {
  std::atexit([] { fake::shut_down(); });
}

void say(const char* text) {
  std::printf("%s\n", text);
  std::fflush(stdout);
}

template <typename Work>
void expect_forked(const char* what, Work work) {
  try {
    work();
    std::printf("%s did not throw\n", what);
  } catch (const ForkedProcess&) {
    std::printf("%s: ForkedProcess\n", what);
  } catch (const std::exception& error) {
    std::printf("%s: another error: %s\n", what, error.what());
  }
  std::fflush(stdout);
}

/// In the child of a process that has used the driver, while threads of the parent hold locks.
int fork_and_report(Service& service) {
  const CUstream stream = fake::make_stream(service.context.handle());
  const int calls_before = static_cast<int>(fake::call_log().size());
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a hang ends as a signal
    const Specialization spec = service.plan->row(1);
    expect_forked("get", [&] { service.cache.get(service.context, spec); });
    expect_forked("find", [&] { static_cast<void>(service.cache.find(service.context, spec)); });
    expect_forked("compile", [&] { service.cache.compile(spec); });
    expect_forked("stats", [&] { static_cast<void>(service.cache.stats()); });
    expect_forked("prepare", [&] { static_cast<void>(service.cache.prepare(service.context, {&kProblem, 1})); });
    expect_forked("context", [] { const DeviceContext other(0, fake::table()); });
    expect_forked("stream", [&] { static_cast<void>(service.context.is_capturing(stream)); });
    if (service.task != nullptr) expect_forked("task", [&] { service.task->get(); });
    // Compiling needs no driver: a cache of the child's own may.
    KernelCache own({}, fake::nvrtc());
    if (own.compile(spec) != nullptr) say("own compile");
    if (service.task == nullptr && static_cast<int>(fake::call_log().size()) != calls_before) say("driver was called");
    std::exit(0);  // destroys the statics, the service among them
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) say("the child did not end well");
  service.cache.get(service.context, service.plan->row(1));  // the parent goes on
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view how = argc > 1 ? argv[1] : "";
  fake::reset();
  if (how == "static" || how == "static_busy") {
    static const Service service(how == "static_busy");
  } else if (how == "static_driver_gone") {
    static const Service service(false);
    end_driver_at_exit();  // registered later, so it runs before the static is destroyed
  } else if (how == "thread_local") {
    std::jthread([] { thread_local const Service service(false); }).join();
    thread_local const Service of_main(false);
  } else if (how == "leaked" || how == "leaked_busy") {
    // Reachable to the end, so that a leak checker has nothing to say.
    static const Service* volatile leaked = new Service(how == "leaked_busy");
    static_cast<void>(leaked);
  } else if (how == "fork" || how == "fork_busy") {
    static Service service(how == "fork_busy");
    return fork_and_report(service);
  } else if (how == "fork_before") {
    // A parent that has not touched the driver may compile and fork; the child then may use it.
    static KernelCache cache({}, fake::nvrtc());
    const pid_t child = fork();
    if (child == 0) {
      const DeviceContext context(0, fake::table());
      const QkvPlan plan(cache, context, kProblem);
      say("child ready");
      std::exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) say("the child did not end well");
  } else {
    return 2;
  }
  return 0;
}
