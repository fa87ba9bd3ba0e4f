// SPDX-License-Identifier: Apache-2.0
#include "support/fake_driver.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace fake {
namespace {

struct ContextFacts {
  int ordinal = 0;
  bool is_primary = false;
  bool is_alive = true;
};
struct StreamFacts {
  CUcontext context = nullptr;
  bool is_capturing = false;
  bool is_valid = true;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id capturer;
  std::vector<CUstream> waits;
  bool is_counted = false;  // by alive(): made by cuStreamCreate
  double clock_us = 0;      // what its launches have taken
  std::vector<Launch> captured;
};
struct ModuleFacts {
  CUcontext context = nullptr;
  Image image;
};
struct FunctionFacts {
  CUmodule module = nullptr;
  std::map<CUfunction_attribute, int> attributes;
  bool is_loaded = false;
  bool takes_map = false;  ///< its argument is PrefillParams
};
struct EventFacts {
  CUcontext context = nullptr;
  CUstream recorded_on = nullptr;
  bool has_timing = false;
  double time_us = 0;
};
struct MemoryFacts {
  std::size_t bytes = 0;
  int ordinal = 0;
  Memory kind = Memory::device;
  CUcontext context = nullptr;
  bool is_counted = false;  // by alive(): allocated by a driver call, not by make_memory
};
struct GpuFacts {
  Gpu gpu;
  int retains = 0;
  CUcontext primary = nullptr;
};
struct Fault {
  std::string function;
  int nth = 0;
  CUresult code = CUDA_SUCCESS;
};

struct Thread {
  std::vector<CUcontext> stack;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
};

struct World {
  std::mutex mutex;  // of all below
  std::uint64_t next_thread = 1;
  std::map<std::uint64_t, Thread> threads;
  std::uintptr_t next_handle = 0x10000;
  CUdeviceptr next_address = 0x700000000000;
  bool is_shut_down = false;
  std::vector<GpuFacts> gpus;
  std::map<CUcontext, ContextFacts> contexts;
  std::map<CUstream, StreamFacts> streams;
  std::map<CUmodule, ModuleFacts> modules;
  std::map<CUfunction, FunctionFacts> functions;
  std::map<CUevent, EventFacts> events;
  std::map<CUdeviceptr, MemoryFacts> memory;
  std::vector<Fault> faults;
  std::vector<std::string> log;
  std::map<std::string, int, std::less<>> counts;
  std::vector<Launch> launches;
  std::map<CUgraph, std::vector<Launch>> graphs;
  std::map<CUgraphExec, std::vector<Launch>> execs;
  std::function<double(const Launch&)> launch_time_us;
  std::vector<std::string> misuses;
};

World& world() {
  static World* const kWorld = new World;  // leaked: cached plans may be destroyed after static objects
  return *kWorld;
}

/// The calling thread's state; begins anew after reset(). The world's mutex is held.
Thread& this_thread() {
  // A number, which needs no destructor: statics that end after the main thread's own objects still call the driver.
  thread_local const std::uint64_t number = world().next_thread++;
  return world().threads[number];
}

template <typename Handle>
Handle new_handle() {
  return reinterpret_cast<Handle>(world().next_handle += 16);
}

/// One driver call: holds the lock, counts, and says whether to fail at once.
class Call {
 public:
  explicit Call(const char* function) : lock_(world().mutex) {
    World& w = world();
    w.log.emplace_back(function);
    ++w.counts[function];
    if (w.is_shut_down) code = CUDA_ERROR_DEINITIALIZED;
    for (Fault& fault : w.faults) {
      if (fault.function == function && --fault.nth == 0) code = fault.code;
    }
  }
  CUresult code = CUDA_SUCCESS;

 private:
  std::lock_guard<std::mutex> lock_;
};

void misuse(std::string text) { world().misuses.push_back(std::move(text)); }

CUcontext current() {
  const auto& stack = this_thread().stack;
  return stack.empty() ? nullptr : stack.back();
}

bool is_alive(CUcontext context) {
  const auto it = world().contexts.find(context);
  return it != world().contexts.end() && it->second.is_alive;
}

/// What a call gives that needs a current context.
CUresult need_context() {
  if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return is_alive(current()) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/// What a call gives that may not run during a capture, by cuThreadExchangeStreamCaptureMode's rules; a refusal
/// invalidates the captures it is for.
CUresult need_no_capture() {
  const CUstreamCaptureMode mode = this_thread().mode;
  if (mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  CUresult code = CUDA_SUCCESS;
  for (auto& [stream, facts] : world().streams) {
    if (!facts.is_capturing || facts.mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
    const bool is_mine = facts.capturer == std::this_thread::get_id();
    if (!is_mine &&
        (mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL || facts.mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)) {
      continue;
    }
    facts.is_valid = false;
    code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return code;
}

Image read_image(const void* data) {
  const char* text = static_cast<const char*>(data);
  if (std::memcmp(text, ELFMAG, SELFMAG) != 0) return {true, text};
  Elf64_Ehdr header;
  std::memcpy(&header, text, sizeof(header));
  const std::size_t size = std::max(header.e_shoff + std::size_t{header.e_shnum} * header.e_shentsize,
                                    header.e_phoff + std::size_t{header.e_phnum} * header.e_phentsize);
  return {false, std::string(text, size)};
}

CUresult unload(CUmodule module) {
  World& w = world();
  const auto it = w.modules.find(module);
  if (it == w.modules.end()) {
    misuse("cuModuleUnload of no module");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (it->second.context != current()) {
    misuse("cuModuleUnload in another context");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  std::erase_if(w.functions, [&](const auto& entry) { return entry.second.module == module; });
  w.modules.erase(it);
  return CUDA_SUCCESS;
}

/// A default stream (null, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD) is the current context's.
CUcontext context_of(CUstream stream) {
  const auto it = world().streams.find(stream);
  return it == world().streams.end() || it->second.context == nullptr ? current() : it->second.context;
}

CUcontext primary_of(GpuFacts& gpu, int ordinal) {
  if (gpu.primary == nullptr) {
    gpu.primary = new_handle<CUcontext>();
    world().contexts[gpu.primary] = {.ordinal = ordinal, .is_primary = true};
  }
  return gpu.primary;
}

CUresult allocate(CUdeviceptr* out, std::size_t bytes, Memory kind) {
  if (const CUresult code = need_context(); code != CUDA_SUCCESS) return code;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  World& w = world();
  *out = w.next_address;
  w.next_address += (bytes + 0xfff) / 0x1000 * 0x1000 + 0x1000;
  w.memory[*out] = {bytes, w.contexts[current()].ordinal, kind, kind == Memory::pool ? nullptr : current(), true};
  return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr pointer) {
  if (const CUresult code = need_context(); code != CUDA_SUCCESS) return code;
  if (world().memory.erase(pointer) == 0) {
    misuse("a free of no allocation");
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

const MemoryFacts* find_memory(CUdeviceptr pointer) {
  auto it = world().memory.upper_bound(pointer);
  if (it == world().memory.begin()) return nullptr;
  --it;
  return pointer - it->first < it->second.bytes ? &it->second : nullptr;
}

GpuFacts* find_gpu(CUdevice device) {
  auto& gpus = world().gpus;
  return device >= 0 && static_cast<std::size_t>(device) < gpus.size() ? &gpus[static_cast<std::size_t>(device)]
                                                                       : nullptr;
}

// --- The functions -------------------------------------------------------------------------------------------------

#define ENTER(name)      \
  const Call call(name); \
  if (call.code != CUDA_SUCCESS) return call.code

CUresult CUDAAPI init(unsigned) {
  ENTER("cuInit");
  return CUDA_SUCCESS;
}

CUresult CUDAAPI driver_version(int* version) {
  ENTER("cuDriverGetVersion");
  *version = world().gpus.empty() ? 13000 : world().gpus[0].gpu.driver_version;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI error_name(CUresult code, const char** name) {
  static const std::map<CUresult, const char*> kNames{
      {CUDA_SUCCESS, "CUDA_SUCCESS"},
      {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED"},
      {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
      {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
      {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN"}};
  const auto it = kNames.find(code);
  *name = it == kNames.end() ? nullptr : it->second;
  return it == kNames.end() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI error_string(CUresult code, const char** text) {
  const CUresult known = error_name(code, text);
  if (known == CUDA_SUCCESS) *text = "what the fake driver says of it";
  return known;
}

CUresult CUDAAPI device_count(int* count) {
  ENTER("cuDeviceGetCount");
  *count = static_cast<int>(world().gpus.size());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI device_get(CUdevice* device, int ordinal) {
  ENTER("cuDeviceGet");
  if (find_gpu(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI device_name(char* name, int length, CUdevice device) {
  ENTER("cuDeviceGetName");
  const std::string& text = find_gpu(device)->gpu.name;
  std::strncpy(name, text.c_str(), static_cast<std::size_t>(length));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI device_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  ENTER("cuDeviceGetAttribute");
  const Gpu& gpu = find_gpu(device)->gpu;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = gpu.sm_major;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = gpu.sm_minor;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = gpu.multiprocessors;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = gpu.smem_per_block_bytes;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = gpu.smem_per_multiprocessor_bytes;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
      *value = 65536;
      break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      *value = 60 << 20;
      break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      *value = 1980000;
      break;
    default:
      misuse("cuDeviceGetAttribute of an attribute that the fake driver has not");
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI total_memory(std::size_t* bytes, CUdevice) {
  ENTER("cuDeviceTotalMem");
  *bytes = std::size_t{141} << 30;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI primary_retain(CUcontext* context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  GpuFacts* gpu = find_gpu(device);
  if (gpu == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  ++gpu->retains;
  *context = primary_of(*gpu, device);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI primary_release(CUdevice device) {
  ENTER("cuDevicePrimaryCtxRelease");
  GpuFacts* gpu = find_gpu(device);
  if (gpu == nullptr || gpu->retains == 0) {
    misuse("cuDevicePrimaryCtxRelease without a retain");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (const CUresult code = need_no_capture(); code != CUDA_SUCCESS) return code;
  --gpu->retains;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI ctx_current(CUcontext* context) {
  ENTER("cuCtxGetCurrent");
  *context = current();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI ctx_push(CUcontext context) {
  ENTER("cuCtxPushCurrent");
  if (!is_alive(context)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  this_thread().stack.push_back(context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI ctx_pop(CUcontext* context) {
  ENTER("cuCtxPopCurrent");
  auto& stack = this_thread().stack;
  if (stack.empty()) {
    misuse("cuCtxPopCurrent of an empty stack");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (context != nullptr) *context = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI ctx_synchronize() {
  ENTER("cuCtxSynchronize");
  misuse("cuCtxSynchronize: the library never waits");
  return need_context();
}

CUresult CUDAAPI module_load(CUmodule* module, const void* image) {
  ENTER("cuModuleLoadData");
  if (const CUresult code = need_context(); code != CUDA_SUCCESS) return code;
  if (const CUresult code = need_no_capture(); code != CUDA_SUCCESS) return code;
  *module = new_handle<CUmodule>();
  world().modules[*module] = {current(), read_image(image)};
  return CUDA_SUCCESS;
}

CUresult CUDAAPI module_unload(CUmodule module) {
  ENTER("cuModuleUnload");
  if (const CUresult code = need_context(); code != CUDA_SUCCESS) return code;
  if (const CUresult code = need_no_capture(); code != CUDA_SUCCESS) return code;
  return unload(module);
}

CUresult CUDAAPI module_function(CUfunction* function, CUmodule module, const char* name) {
  ENTER("cuModuleGetFunction");
  const auto it = world().modules.find(module);
  if (it == world().modules.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (it->second.image.bytes.find(name) == std::string::npos) return CUDA_ERROR_NOT_FOUND;
  *function = new_handle<CUfunction>();
  FunctionFacts& facts = world().functions[*function];
  facts.module = module;
  facts.takes_map = std::string_view(name).find("qkv_prefill") != std::string_view::npos;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI function_set(CUfunction function, CUfunction_attribute attribute, int value) {
  ENTER("cuFuncSetAttribute");
  const auto it = world().functions.find(function);
  if (it == world().functions.end()) return CUDA_ERROR_INVALID_HANDLE;
  const int ordinal = world().contexts[world().modules[it->second.module].context].ordinal;
  if (value > find_gpu(ordinal)->gpu.smem_per_block_bytes) return CUDA_ERROR_INVALID_VALUE;
  it->second.attributes[attribute] = value;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI function_load(CUfunction function) {
  ENTER("cuFuncLoad");
  if (const CUresult code = need_no_capture(); code != CUDA_SUCCESS) return code;
  const auto it = world().functions.find(function);
  if (it == world().functions.end()) return CUDA_ERROR_INVALID_HANDLE;
  it->second.is_loaded = true;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI launch_kernel_ex(const CUlaunchConfig* config, CUfunction function, void** parameters, void**) {
  ENTER("cuLaunchKernelEx");
  World& w = world();
  if (const CUresult code = need_context(); code != CUDA_SUCCESS) return code;
  const auto it = w.functions.find(function);
  if (it == w.functions.end()) {
    misuse("a launch of no function");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (w.modules[it->second.module].context != current() || context_of(config->hStream) != current()) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  constexpr unsigned kWithoutAsking = 48 * 1024;
  const int allowed = it->second.attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES];
  if (config->sharedMemBytes > kWithoutAsking && static_cast<int>(config->sharedMemBytes) > allowed) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Launch launch{.function = function,
                .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
                .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
                .smem_bytes = config->sharedMemBytes,
                .attributes = config->numAttrs,
                .stream = config->hStream,
                .context = current()};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) launch.cluster = attribute.value.clusterDim.x;
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      launch.dependent = attribute.value.programmaticStreamSerializationAllowed != 0;
    }
  }
  if (config->gridDimX % launch.cluster != 0) return CUDA_ERROR_INVALID_VALUE;
  if (it->second.takes_map) {
    const auto& prefill = *static_cast<const qkvjit::PrefillParams*>(parameters[0]);
    std::memcpy(&launch.map, &prefill.x_map, sizeof(launch.map));
    launch.params = prefill.qkv;
  } else {
    std::memcpy(&launch.params, parameters[0], sizeof(launch.params));
  }
  w.launches.push_back(launch);
  StreamFacts& stream = w.streams[config->hStream];
  if (stream.is_capturing) {
    stream.captured.push_back(launch);
  } else if (w.launch_time_us) {
    stream.clock_us += w.launch_time_us(launch);
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI stream_create(CUstream* stream, unsigned) {
  ENTER("cuStreamCreate");
  if (const CUresult code = need_context(); code != CUDA_SUCCESS) return code;
  *stream = new_handle<CUstream>();
  world().streams[*stream].context = current();
  world().streams[*stream].is_counted = true;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI stream_destroy(CUstream stream) {
  ENTER("cuStreamDestroy");
  if (world().streams.erase(stream) == 0) {
    misuse("cuStreamDestroy of no stream");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI stream_synchronize(CUstream stream) {
  ENTER("cuStreamSynchronize");
  const auto it = world().streams.find(stream);
  if (it == world().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (!it->second.is_counted) misuse("cuStreamSynchronize of a caller's stream: the library never waits for those");
  return it->second.is_capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult CUDAAPI stream_begin_capture(CUstream stream, CUstreamCaptureMode mode) {
  ENTER("cuStreamBeginCapture");
  StreamFacts& facts = world().streams[stream];
  facts.is_capturing = facts.is_valid = true;
  facts.mode = mode;
  facts.capturer = std::this_thread::get_id();
  facts.captured.clear();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI stream_end_capture(CUstream stream, CUgraph* graph) {
  ENTER("cuStreamEndCapture");
  StreamFacts& facts = world().streams[stream];
  facts.is_capturing = false;
  *graph = nullptr;
  if (!facts.is_valid) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  *graph = new_handle<CUgraph>();
  world().graphs[*graph] = std::move(facts.captured);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI graph_instantiate(CUgraphExec* exec, CUgraph graph, unsigned long long) {
  ENTER("cuGraphInstantiate");
  *exec = new_handle<CUgraphExec>();
  world().execs[*exec] = world().graphs.at(graph);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI graph_launch(CUgraphExec exec, CUstream stream) {
  ENTER("cuGraphLaunch");
  World& w = world();
  const auto it = w.execs.find(exec);
  if (it == w.execs.end()) return CUDA_ERROR_INVALID_HANDLE;
  for (const Launch& launch : it->second) {
    if (w.launch_time_us) w.streams[stream].clock_us += w.launch_time_us(launch);
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI graph_destroy(CUgraph graph) {
  ENTER("cuGraphDestroy");
  if (world().graphs.erase(graph) == 0) misuse("cuGraphDestroy of no graph");
  return CUDA_SUCCESS;
}

CUresult CUDAAPI graph_exec_destroy(CUgraphExec exec) {
  ENTER("cuGraphExecDestroy");
  if (world().execs.erase(exec) == 0) misuse("cuGraphExecDestroy of no graph");
  return CUDA_SUCCESS;
}

CUresult CUDAAPI stream_capturing(CUstream stream, CUstreamCaptureStatus* status) {
  ENTER("cuStreamIsCapturing");
  const StreamFacts& facts = world().streams[stream];
  *status = !facts.is_capturing ? CU_STREAM_CAPTURE_STATUS_NONE
            : facts.is_valid    ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI stream_context(CUstream stream, CUcontext* context) {
  ENTER("cuStreamGetCtx");
  if (const CUresult code = need_context(); code != CUDA_SUCCESS) return code;
  *context = context_of(stream);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI stream_wait(CUstream stream, CUevent event, unsigned) {
  ENTER("cuStreamWaitEvent");
  const auto it = world().events.find(event);
  if (it == world().events.end()) return CUDA_ERROR_INVALID_HANDLE;
  world().streams[stream].waits.push_back(it->second.recorded_on);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI exchange_mode(CUstreamCaptureMode* mode) {
  ENTER("cuThreadExchangeStreamCaptureMode");
  std::swap(*mode, this_thread().mode);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI event_create(CUevent* event, unsigned flags) {
  ENTER("cuEventCreate");
  if (const CUresult code = need_context(); code != CUDA_SUCCESS) return code;
  const bool has_timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  if (has_timing && !world().launch_time_us) misuse("an event with timing, which costs");
  *event = new_handle<CUevent>();
  world().events[*event] = {.context = current(), .has_timing = has_timing};
  return CUDA_SUCCESS;
}

CUresult CUDAAPI event_record(CUevent event, CUstream stream) {
  ENTER("cuEventRecord");
  const auto it = world().events.find(event);
  if (it == world().events.end() || it->second.context != context_of(stream)) return CUDA_ERROR_INVALID_HANDLE;
  it->second.recorded_on = stream;
  it->second.time_us = world().streams[stream].clock_us;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI event_synchronize(CUevent event) {
  ENTER("cuEventSynchronize");
  return world().events.contains(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI event_elapsed(float* ms, CUevent begin, CUevent end) {
  ENTER("cuEventElapsedTime");
  const auto from = world().events.find(begin), to = world().events.find(end);
  if (from == world().events.end() || to == world().events.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (!from->second.has_timing || !to->second.has_timing) return CUDA_ERROR_INVALID_HANDLE;
  *ms = static_cast<float>((to->second.time_us - from->second.time_us) / 1000);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI event_destroy(CUevent event) {
  ENTER("cuEventDestroy");
  if (world().events.erase(event) == 0) {
    misuse("cuEventDestroy of no event");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI mem_alloc_async(CUdeviceptr* pointer, std::size_t bytes, CUstream) {
  ENTER("cuMemAllocAsync");
  return allocate(pointer, bytes, Memory::pool);
}

CUresult CUDAAPI memcpy_dtod_async(CUdeviceptr, CUdeviceptr, std::size_t, CUstream stream) {
  ENTER("cuMemcpyDtoDAsync");
  if (const CUresult code = need_context(); code != CUDA_SUCCESS) return code;
  return context_of(stream) == current() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI memcpy_htod_async(CUdeviceptr to, const void*, std::size_t bytes, CUstream stream) {
  ENTER("cuMemcpyHtoDAsync");
  if (const CUresult code = need_context(); code != CUDA_SUCCESS) return code;
  const MemoryFacts* facts = find_memory(to);
  if (facts == nullptr || find_memory(to + bytes - 1) != facts) {
    misuse("cuMemcpyHtoDAsync beyond an allocation");
    return CUDA_ERROR_INVALID_VALUE;
  }
  return context_of(stream) == current() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI mem_free_async(CUdeviceptr pointer, CUstream) {
  ENTER("cuMemFreeAsync");
  return release(pointer);
}

CUresult answer(CUpointer_attribute attribute, const MemoryFacts* facts, void* value) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = facts == nullptr                ? 0
                                       : facts->kind == Memory::pinned ? CU_MEMORYTYPE_HOST
                                                                       : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<unsigned*>(value) = facts != nullptr && facts->kind == Memory::managed;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = facts == nullptr ? -2 : facts->ordinal;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(value) = facts == nullptr ? nullptr : facts->context;
      return CUDA_SUCCESS;
    default:
      misuse("a pointer attribute that the fake driver has not");
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult CUDAAPI pointer_attributes(unsigned count, CUpointer_attribute* attributes, void** values,
                                    CUdeviceptr pointer) {
  ENTER("cuPointerGetAttributes");
  const MemoryFacts* facts = find_memory(pointer);
  for (unsigned i = 0; i < count; ++i) {
    if (const CUresult code = answer(attributes[i], facts, values[i]); code != CUDA_SUCCESS) return code;
  }
  return CUDA_SUCCESS;
}

/// Keeps what tests look at: the base, the extents and the box.
CUresult CUDAAPI encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                                   const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                                   const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                   CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  ENTER("cuTensorMapEncodeTiled");
  const bool is_good = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 && rank == 2 &&
                       reinterpret_cast<std::uintptr_t>(base) % 16 == 0 && strides[0] == extents[0] * 2 &&
                       strides[0] % 16 == 0 && box[0] == 64 && box[1] >= 1 && box[1] <= 256 &&
                       swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (!is_good) return CUDA_ERROR_INVALID_VALUE;
  *map = {};
  map->opaque[0] = reinterpret_cast<std::uintptr_t>(base);
  map->opaque[1] = extents[0];
  map->opaque[2] = extents[1];
  map->opaque[3] = box[1];
  return CUDA_SUCCESS;
}

#undef ENTER

/// What the table has where this file models nothing.
template <typename Function>
struct Unmodelled;
template <typename... Arguments>
struct Unmodelled<CUresult(CUDAAPI*)(Arguments...)> {
  static CUresult CUDAAPI call(Arguments...) {
    const std::lock_guard lock(world().mutex);
    misuse("a call of a function that the fake driver has not");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
};

}  // namespace

void reset(std::vector<Gpu> gpus) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.threads.clear();
  w.is_shut_down = false;
  w.gpus.clear();
  for (Gpu& gpu : gpus) w.gpus.push_back({.gpu = std::move(gpu)});
  w.contexts.clear();
  w.streams.clear();
  w.modules.clear();
  w.functions.clear();
  w.events.clear();
  w.memory.clear();
  w.faults.clear();
  w.log.clear();
  w.counts.clear();
  w.launches.clear();
  w.graphs.clear();
  w.execs.clear();
  w.launch_time_us = nullptr;
  w.misuses.clear();
}

std::shared_ptr<const qkvjit::DriverTable> table() {
  auto t = std::make_shared<qkvjit::DriverTable>();
#define QKVJIT_UNMODELLED(name) t->name = Unmodelled<decltype(t->name)>::call;
  QKVJIT_DRIVER_FUNCTIONS(QKVJIT_UNMODELLED)
#undef QKVJIT_UNMODELLED
  t->cuInit = init;
  t->cuDriverGetVersion = driver_version;
  t->cuGetErrorName = error_name;
  t->cuGetErrorString = error_string;
  t->cuDeviceGet = device_get;
  t->cuDeviceGetCount = device_count;
  t->cuDeviceGetName = device_name;
  t->cuDeviceGetAttribute = device_attribute;
  t->cuDeviceTotalMem = total_memory;
  t->cuDevicePrimaryCtxRetain = primary_retain;
  t->cuDevicePrimaryCtxRelease = primary_release;
  t->cuCtxGetCurrent = ctx_current;
  t->cuCtxPushCurrent = ctx_push;
  t->cuCtxPopCurrent = ctx_pop;
  t->cuCtxSynchronize = ctx_synchronize;
  t->cuModuleLoadData = module_load;
  t->cuModuleUnload = module_unload;
  t->cuModuleGetFunction = module_function;
  t->cuFuncSetAttribute = function_set;
  t->cuFuncLoad = function_load;
  t->cuLaunchKernelEx = launch_kernel_ex;
  t->cuStreamCreate = stream_create;
  t->cuStreamDestroy = stream_destroy;
  t->cuStreamSynchronize = stream_synchronize;
  t->cuStreamBeginCapture = stream_begin_capture;
  t->cuStreamEndCapture = stream_end_capture;
  t->cuGraphInstantiate = graph_instantiate;
  t->cuGraphLaunch = graph_launch;
  t->cuGraphDestroy = graph_destroy;
  t->cuGraphExecDestroy = graph_exec_destroy;
  t->cuStreamIsCapturing = stream_capturing;
  t->cuStreamGetCtx = stream_context;
  t->cuStreamWaitEvent = stream_wait;
  t->cuThreadExchangeStreamCaptureMode = exchange_mode;
  t->cuEventCreate = event_create;
  t->cuEventRecord = event_record;
  t->cuEventDestroy = event_destroy;
  t->cuEventSynchronize = event_synchronize;
  t->cuEventElapsedTime = event_elapsed;
  t->cuMemAllocAsync = mem_alloc_async;
  t->cuMemFreeAsync = mem_free_async;
  t->cuMemcpyHtoDAsync = memcpy_htod_async;
  t->cuMemcpyDtoDAsync = memcpy_dtod_async;
  t->cuPointerGetAttributes = pointer_attributes;
  t->cuTensorMapEncodeTiled = encode_tensor_map;
  return t;
}

void fail(std::string_view function, int nth, CUresult code) {
  const std::lock_guard lock(world().mutex);
  world().faults.push_back({std::string(function), nth, code});
}

bool clear_faults() {
  const std::lock_guard lock(world().mutex);
  const bool all = std::ranges::all_of(world().faults, [](const Fault& fault) { return fault.nth <= 0; });
  world().faults.clear();
  return all;
}

void set_launch_time(std::function<double(const Launch&)> time_us) {
  const std::lock_guard lock(world().mutex);
  world().launch_time_us = std::move(time_us);
}

void shut_down() {
  const std::lock_guard lock(world().mutex);
  world().is_shut_down = true;
}

void reset_primary_context(int ordinal) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const CUcontext context = std::exchange(w.gpus.at(static_cast<std::size_t>(ordinal)).primary, nullptr);
  w.contexts[context].is_alive = false;
  std::erase_if(w.functions, [&](const auto& entry) { return w.modules[entry.second.module].context == context; });
  std::erase_if(w.modules, [&](const auto& entry) { return entry.second.context == context; });
  std::erase_if(w.events, [&](const auto& entry) { return entry.second.context == context; });
  std::erase_if(w.memory, [&](const auto& entry) { return entry.second.context == context; });
}

int calls(std::string_view function) {
  const std::lock_guard lock(world().mutex);
  const auto it = world().counts.find(function);
  return it == world().counts.end() ? 0 : it->second;
}

std::vector<std::string> call_log() {
  const std::lock_guard lock(world().mutex);
  return world().log;
}

void clear_log() {
  const std::lock_guard lock(world().mutex);
  world().log.clear();
  world().counts.clear();
  world().launches.clear();
}

std::vector<Launch> launches() {
  const std::lock_guard lock(world().mutex);
  return world().launches;
}

Alive alive() {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  Alive result{.modules = static_cast<int>(w.modules.size()), .events = static_cast<int>(w.events.size())};
  for (const GpuFacts& gpu : w.gpus) result.primary_retains += gpu.retains;
  for (const auto& [address, facts] : w.memory) result.allocations += facts.is_counted ? 1 : 0;
  for (const auto& [stream, facts] : w.streams) result.streams += facts.is_counted ? 1 : 0;
  result.graphs = static_cast<int>(w.graphs.size() + w.execs.size());
  return result;
}

std::vector<std::string> misuses() {
  const std::lock_guard lock(world().mutex);
  return world().misuses;
}

std::vector<CUcontext> context_stack() {
  const std::lock_guard lock(world().mutex);
  return this_thread().stack;
}

CUstreamCaptureMode capture_mode() {
  const std::lock_guard lock(world().mutex);
  return this_thread().mode;
}

CUcontext make_context(int ordinal) {
  const std::lock_guard lock(world().mutex);
  const auto context = new_handle<CUcontext>();
  world().contexts[context] = {.ordinal = ordinal};
  return context;
}

void push_context(CUcontext context) {
  const std::lock_guard lock(world().mutex);
  this_thread().stack.push_back(context);
}

void pop_context() {
  const std::lock_guard lock(world().mutex);
  this_thread().stack.pop_back();
}

void* make_memory(int ordinal, std::size_t bytes, Memory kind, CUcontext context) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  if (context == nullptr && kind != Memory::pool)
    context = primary_of(w.gpus.at(static_cast<std::size_t>(ordinal)), ordinal);
  const CUdeviceptr address = w.next_address;
  w.next_address += (bytes + 0xfff) / 0x1000 * 0x1000 + 0x1000;
  w.memory[address] = {bytes, ordinal, kind, context, false};
  return reinterpret_cast<void*>(address);
}

CUstream make_stream(CUcontext context) {
  const std::lock_guard lock(world().mutex);
  const auto stream = new_handle<CUstream>();
  world().streams[stream].context = context;
  return stream;
}

void begin_capture(CUstream stream, CUstreamCaptureMode mode) {
  const std::lock_guard lock(world().mutex);
  StreamFacts& facts = world().streams.at(stream);
  facts.is_capturing = facts.is_valid = true;
  facts.mode = mode;
  facts.capturer = std::this_thread::get_id();
}

bool end_capture(CUstream stream) {
  const std::lock_guard lock(world().mutex);
  StreamFacts& facts = world().streams.at(stream);
  return std::exchange(facts.is_capturing, false) && facts.is_valid;
}

Image image_of(CUfunction function) {
  const std::lock_guard lock(world().mutex);
  return world().modules.at(world().functions.at(function).module).image;
}

int function_attribute(CUfunction function, CUfunction_attribute attribute) {
  const std::lock_guard lock(world().mutex);
  const auto& attributes = world().functions.at(function).attributes;
  const auto it = attributes.find(attribute);
  return it == attributes.end() ? -1 : it->second;
}

bool is_function_loaded(CUfunction function) {
  const std::lock_guard lock(world().mutex);
  return world().functions.at(function).is_loaded;
}

std::vector<CUstream> waits_of(CUstream stream) {
  const std::lock_guard lock(world().mutex);
  return world().streams[stream].waits;
}

}  // namespace fake
