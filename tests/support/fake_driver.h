// SPDX-License-Identifier: Apache-2.0
// A CUDA driver made of plain C++ for host tests, injected as a DriverTable: one or more made-up GPUs, per-thread
// context stacks, modules, events, streams with captures, memory. It counts and logs every call, can fail any of
// them, and refuses what the real driver refuses, such as a load without a context or, unless the thread relaxed it,
// during a capture. One instance a process (function pointers have no room for more), safe from any thread.
//
//   fake::reset();                                   // one GPU of compute capability 9.0; forgets all from before
//   DeviceContext context(0, fake::table());
//   fake::fail("cuModuleLoadData", 1, CUDA_ERROR_OUT_OF_MEMORY);    // the next call of it
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver.h"
#include "kernel_templates/qkv_params.h"

namespace fake {

struct Gpu {
  std::string name = "Fake H200";
  int sm_major = 9;
  int sm_minor = 0;
  int multiprocessors = 132;
  int smem_per_block_bytes = 227 * 1024;
  int smem_per_multiprocessor_bytes = 228 * 1024;
  int driver_version = 13000;  ///< the first GPU's counts
};

/// Forgets everything. Objects made from table() before must be gone, and no other thread may be inside.
void reset(std::vector<Gpu> gpus = {Gpu{}});
std::shared_ptr<const qkvjit::DriverTable> table();

// --- Faults -------------------------------------------------------------------------------------------------------
/// The `nth` call of `function` from now on (1: the next) gives `code` and does nothing. Names as in cuda.h, without
/// version suffix: "cuEventDestroy".
void fail(std::string_view function, int nth, CUresult code);
/// Forgets planned faults; true where every one of them has struck.
bool clear_faults();
/// Every call gives CUDA_ERROR_DEINITIALIZED, as at the exit of a process.
void shut_down();
/// As cudaDeviceReset by someone else: what lived in the GPU's primary context is gone.
void reset_primary_context(int ordinal);

// --- What happened ------------------------------------------------------------------------------------------------
int calls(std::string_view function);
/// The names of all calls, in order; those of several threads interleave.
std::vector<std::string> call_log();
void clear_log();

struct Launch {
  CUfunction function = nullptr;
  unsigned grid[3] = {};
  unsigned block[3] = {};
  unsigned smem_bytes = 0;
  unsigned attributes = 0;
  unsigned cluster = 1;    ///< from the attributes
  bool dependent = false;  ///< programmatic stream serialisation
  CUstream stream = nullptr;
  CUcontext context = nullptr;  ///< current at the launch
  qkvjit::QkvParams params{};   ///< a copy of the one argument, or of the part after the map
  /// prefill: the base of x, its extents (k, m) and the tokens of a box; else zeros
  std::array<std::uint64_t, 4> map{};
};
std::vector<Launch> launches();

/// What each launch takes from now on, in microseconds, also within a replayed graph; events with timing then tell it.
/// Called under the fake driver's lock. Without it such events are a misuse, for they cost.
void set_launch_time(std::function<double(const Launch&)> time_us);

/// What is alive. All zero when nothing has leaked.
struct Alive {
  int primary_retains = 0;
  int modules = 0;
  int events = 0;
  int allocations = 0;
  int streams = 0;  ///< made by cuStreamCreate
  int graphs = 0;   ///< and executable ones
  bool operator==(const Alive&) const = default;
};
Alive alive();
/// What the real driver would not forgive: an unload in another context, a double free, an unbalanced stack, a launch
/// of an unloaded function. Empty in a correct program.
std::vector<std::string> misuses();

// --- This thread ----------------------------------------------------------------------------------------------------
/// This thread's stack, the current context last.
std::vector<CUcontext> context_stack();
/// RELAXED, GLOBAL (a thread begins so) or THREAD_LOCAL.
CUstreamCaptureMode capture_mode();

// --- Things to hand to the library ----------------------------------------------------------------------------------
/// A context of its own on that GPU, beside the primary one.
CUcontext make_context(int ordinal);
void push_context(CUcontext context);
void pop_context();

enum class Memory { device, managed, pinned, pool };  ///< pool: stream-ordered, of no context
/// `context` null: the GPU's primary context, as if someone had retained it. Lives until reset().
void* make_memory(int ordinal, std::size_t bytes, Memory kind = Memory::device, CUcontext context = nullptr);
CUstream make_stream(CUcontext context);
void begin_capture(CUstream stream, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL);
/// Ends the capture; true where it was still valid.
bool end_capture(CUstream stream);

/// The loaded image behind a function: whether it was PTX, and its text or bytes.
struct Image {
  bool is_ptx = false;
  std::string bytes;
};
Image image_of(CUfunction function);
/// The value that cuFuncSetAttribute gave, or -1.
int function_attribute(CUfunction function, CUfunction_attribute attribute);
bool is_function_loaded(CUfunction function);  ///< by cuFuncLoad

/// Waits recorded on `stream`: for each cuStreamWaitEvent the stream whose work the event stood for.
std::vector<CUstream> waits_of(CUstream stream);

}  // namespace fake
