// SPDX-License-Identifier: Apache-2.0
#include "qkvjit/device_context.h"

#include <fmt/format.h>

#include <atomic>

#include "cuda/device_state.h"
#include "qkvjit/error.h"

namespace qkvjit {
namespace {

int attribute(const DriverTable& driver, CUdevice device, CUdevice_attribute which, std::string_view name) {
  int value = 0;
  check(driver, driver.cuDeviceGetAttribute(&value, which, device), fmt::format("cuDeviceGetAttribute({})", name));
  return value;
}

DeviceInfo read_info(const DriverTable& driver, CUdevice device, int ordinal) {
  const auto get = [&](CUdevice_attribute which, std::string_view name) {
    return attribute(driver, device, which, name);
  };
  DeviceInfo info;
  info.ordinal = ordinal;
  char name[256] = {};
  check(driver, driver.cuDeviceGetName(name, sizeof(name), device), "cuDeviceGetName");
  info.name = name;
  info.sm_major = get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, "COMPUTE_CAPABILITY_MAJOR");
  info.sm_minor = get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, "COMPUTE_CAPABILITY_MINOR");
  info.multiprocessors = get(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, "MULTIPROCESSOR_COUNT");
  info.smem_per_block_bytes = static_cast<std::size_t>(
      get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, "SHARED_MEMORY_PER_BLOCK_OPTIN"));
  info.smem_per_multiprocessor_bytes =
      static_cast<std::size_t>(get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, "SHARED_MEMORY_PER_SM"));
  info.registers_per_multiprocessor = get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, "REGISTERS_PER_SM");
  info.l2_bytes = static_cast<std::size_t>(get(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, "L2_CACHE_SIZE"));
  info.clock_khz = get(CU_DEVICE_ATTRIBUTE_CLOCK_RATE, "CLOCK_RATE");
  check(driver, driver.cuDeviceTotalMem(&info.total_memory_bytes, device), "cuDeviceTotalMem");
  check(driver, driver.cuDriverGetVersion(&info.driver_version), "cuDriverGetVersion");
  return info;
}

}  // namespace

DeviceState::~DeviceState() {
  if (context == nullptr || is_forked_child()) return;  // what a parent initialised is not a child's to give back
  const RelaxedCapture relaxed(*driver, std::nothrow);  // another thread's capture lives on
  if (!free_events_.empty()) {
    const ContextScope scope(*this, std::nothrow);
    if (scope.entered()) {
      for (CUevent event : free_events_) driver->cuEventDestroy(event);
    }
  }
  driver->cuDevicePrimaryCtxRelease(device);  // a driver that has shut down refuses, and nothing is left to release
}

CUevent DeviceState::take_event() {
  {
    const std::lock_guard lock(events_mutex_);
    if (!free_events_.empty()) {
      CUevent event = free_events_.back();
      free_events_.pop_back();
      return event;
    }
  }
  CUevent event = nullptr;
  check(*driver, driver->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  return event;
}

void DeviceState::join(CUstream from, CUstream to) {
  if (from == to) return;
  CUevent event = take_event();
  const CUresult recorded = driver->cuEventRecord(event, from);
  const CUresult waited = recorded == CUDA_SUCCESS ? driver->cuStreamWaitEvent(to, event, 0) : CUDA_SUCCESS;
  {
    const std::lock_guard lock(events_mutex_);
    free_events_.push_back(event);
  }
  check(*driver, recorded, "cuEventRecord");
  check(*driver, waited, "cuStreamWaitEvent");
}

void UniqueModule::reset() noexcept {
  if (module_ != nullptr) {
    const ContextScope scope(*state_, std::nothrow);
    if (scope.entered()) {
      const RelaxedCapture relaxed(*state_->driver, std::nothrow);
      state_->driver->cuModuleUnload(module_);
    }
  }
  module_ = nullptr;
  state_.reset();
}

DeviceContext::DeviceContext(int ordinal) : DeviceContext(ordinal, open_driver()) {}

DeviceContext::DeviceContext(int ordinal, std::shared_ptr<const DriverTable> driver)
    : state_(std::make_shared<DeviceState>()) {
  static std::atomic<std::uint64_t> next_id{1};
  if (is_forked_child()) throw_forked_process("DeviceContext");
  note_driver_in_use();
  state_->driver = std::move(driver);
  state_->id = next_id++;
  const DriverTable& table = *state_->driver;
  int count = 0;
  check(table, table.cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    throw UnsupportedDevice(
        fmt::format("device ordinal: got {}, needs one below {}, the number of GPUs that the driver "
                    "sees; check CUDA_VISIBLE_DEVICES and nvidia-smi -L",
                    ordinal, count));
  }
  check(table, table.cuDeviceGet(&state_->device, ordinal), "cuDeviceGet");
  state_->info = read_info(table, state_->device, ordinal);
  if (state_->info.sm() < 80) {
    throw UnsupportedDevice(fmt::format("device {} ({}) has compute capability {}.{}, needs 8.0 or newer (Ampere)",
                                        ordinal, state_->info.name, state_->info.sm_major, state_->info.sm_minor));
  }
  check(table, table.cuDevicePrimaryCtxRetain(&state_->context, state_->device), "cuDevicePrimaryCtxRetain");
}

const DeviceInfo& DeviceContext::info() const noexcept { return state_->info; }
CUcontext DeviceContext::handle() const noexcept { return state_->context; }

PointerFacts DeviceContext::pointer_facts(const void* pointer) const {
  const DriverTable& driver = *state_->driver;
  const ContextScope scope(*state_);
  unsigned memory_type = 0, is_managed = 0;
  int ordinal = -1;
  CUcontext owner = nullptr;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_CONTEXT};
  void* values[] = {&memory_type, &is_managed, &ordinal, &owner};
  const CUresult code = driver.cuPointerGetAttributes(4, attributes, values, reinterpret_cast<CUdeviceptr>(pointer));
  if (code == CUDA_ERROR_INVALID_VALUE || (code == CUDA_SUCCESS && memory_type == 0)) return {};  // never seen it
  check(driver, code, "cuPointerGetAttributes");
  PointerFacts facts;
  facts.ordinal = ordinal;
  facts.kind = is_managed != 0                       ? MemoryKind::managed
               : memory_type == CU_MEMORYTYPE_DEVICE ? MemoryKind::cuda
                                                     : MemoryKind::host_pinned;
  // Stream-ordered allocations belong to a device, not to a context.
  facts.foreign_context = owner != nullptr && owner != state_->context && ordinal == state_->info.ordinal;
  return facts;
}

bool DeviceContext::is_foreign_stream(CUstream stream) const {
  const DriverTable& driver = *state_->driver;
  const ContextScope scope(*state_);
  CUcontext owner = nullptr;
  check(driver, driver.cuStreamGetCtx(stream, &owner), "cuStreamGetCtx");
  return owner != state_->context;
}

bool DeviceContext::is_capturing(CUstream stream) const {
  const DriverTable& driver = *state_->driver;
  const ContextScope scope(*state_);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver, driver.cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

DeviceInfo typical_device(unsigned sm) {
  struct Facts {
    unsigned sm;
    const char* name;
    int multiprocessors;
    std::size_t block_kib, multiprocessor_kib, l2_mib;
  };
  // CUDA programming guide, "Technical Specifications per Compute Capability", and cuda_occupancy.h; a common product
  // of each. A block may have all of a multiprocessor's shared memory but 1 KiB.
  static constexpr Facts kFacts[] = {
      {80, "A100", 108, 163, 164, 40},     {86, "RTX 3090", 82, 99, 100, 6},  {87, "Jetson Orin", 16, 163, 164, 4},
      {88, "sm_88", 16, 99, 100, 4},       {89, "L40S", 142, 99, 100, 96},    {90, "H200", 132, 227, 228, 60},
      {100, "B200", 148, 227, 228, 126},   {103, "B300", 148, 227, 228, 126}, {110, "Jetson Thor", 20, 227, 228, 32},
      {120, "RTX 5090", 170, 99, 100, 96}, {121, "GB10", 48, 99, 100, 24},
  };
  for (const Facts& facts : kFacts) {
    if (facts.sm != sm) continue;
    DeviceInfo info;
    info.name = facts.name;
    info.sm_major = static_cast<int>(sm / 10);
    info.sm_minor = static_cast<int>(sm % 10);
    info.multiprocessors = facts.multiprocessors;
    info.smem_per_block_bytes = facts.block_kib * 1024;
    info.smem_per_multiprocessor_bytes = facts.multiprocessor_kib * 1024;
    info.l2_bytes = facts.l2_mib << 20;
    return info;
  }
  throw UnsupportedDevice(fmt::format(
      "no facts are known of compute capability {}.{}; known are 8.0, 8.6 to 8.9, 9.0, 10.0, 10.3, 11.0, 12.0 and 12.1",
      sm / 10, sm % 10));
}

}  // namespace qkvjit
