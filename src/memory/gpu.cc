#include "tensorferry/gpu.h"

#include <algorithm>
#include <utility>

#include "os/cuda.h"

namespace tensorferry {

int gpu_count() {
  explain(os::start_cuda()).or_throw();
  return explain(os::gpu_count()).or_throw();
}

bool is_on_gpu(std::span<const std::byte> memory) noexcept {
  return !memory.empty() && os::gpu_of(memory.data()).has_value();
}

GpuBuffer::GpuBuffer(std::size_t bytes, int device) : bytes_(bytes), device_(device) {
  explain(os::start_cuda()).or_throw();
  data_ = explain(os::allocate_on_gpu(device, std::max<std::size_t>(bytes, 1))).or_throw();
}

GpuBuffer::~GpuBuffer() {
  if (data_ != nullptr) os::free_on_gpu(device_, data_);
}

GpuBuffer::GpuBuffer(GpuBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_) {}

GpuBuffer& GpuBuffer::operator=(GpuBuffer&& other) noexcept {
  GpuBuffer taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  std::swap(device_, taken.device_);
  return *this;
}

}  // namespace tensorferry
