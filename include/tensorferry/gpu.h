// Memory of a GPU, for programs that have no CUDA of their own.
#pragma once

#include <cstddef>
#include <span>

#include "tensorferry/export.h"

namespace tensorferry {

// How many GPUs there are. Starts the CUDA driver. Throws Error (ENODEV) that says why there is no
// driver to start.
[[nodiscard]] TENSORFERRY_EXPORT int gpu_count();

// Whether the memory is a GPU's, as far as CUDA in this process knows. False for an empty span.
[[nodiscard]] TENSORFERRY_EXPORT bool is_on_gpu(std::span<const std::byte> memory) noexcept;

// Owns memory of one GPU and moves, never copies. Handles take memory of GPUs like any other,
// whoever has allocated it; this is for those who need some and do not use CUDA otherwise.
class TENSORFERRY_EXPORT GpuBuffer {
 public:
  // Starts the CUDA driver and makes the device's context where that has not been done. Throws
  // Error: ENODEV without a driver or such a device, ENOMEM when the GPU has no more memory.
  explicit GpuBuffer(std::size_t bytes, int device = 0);
  ~GpuBuffer();
  GpuBuffer(GpuBuffer&& other) noexcept;
  GpuBuffer& operator=(GpuBuffer&& other) noexcept;

  // Addresses of the GPU: the CPU must not touch what is there.
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data_, bytes_}; }
  [[nodiscard]] int device() const noexcept { return device_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int device_ = 0;
};

}  // namespace tensorferry
