// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "cuda/device_state.h"
#include "qkvjit/qkvjit.h"

namespace qkvjit {

DeviceBuffer::DeviceBuffer(const DeviceContext& context, std::size_t bytes, CUstream stream)
    : state_(context.state()), bytes_(bytes), stream_(stream) {
  if (bytes == 0) return;
  const ContextScope scope(*state_);
  CUdeviceptr pointer = 0;
  check(*state_->driver, state_->driver->cuMemAllocAsync(&pointer, bytes, stream), "cuMemAllocAsync");
  data_ = reinterpret_cast<void*>(pointer);
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  const ContextScope scope(*state_, std::nothrow);
  if (scope.entered()) state_->driver->cuMemFreeAsync(reinterpret_cast<CUdeviceptr>(data_), stream_);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : state_(std::move(other.state_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      stream_(other.stream_) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  DeviceBuffer old(std::move(*this));
  state_ = std::move(other.state_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  stream_ = other.stream_;
  return *this;
}

}  // namespace qkvjit
