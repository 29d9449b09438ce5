// Memory of a GPU, for programs that do not use CUDA themselves.
#pragma once

#include <cstddef>
#include <span>

#include "tensorferry/export.h"

namespace tensorferry {

// The number of GPUs. Starts the CUDA driver. Throws Error (ENODEV) that says why the driver cannot
// be started.
[[nodiscard]] TENSORFERRY_EXPORT int gpu_count();

// Whether a GPU holds the memory, as far as CUDA in this process knows. False for an empty span.
[[nodiscard]] TENSORFERRY_EXPORT bool is_on_gpu(std::span<const std::byte> memory) noexcept;

// Owns memory of one GPU. Movable, not copyable. Handles accept any memory of a GPU, whoever
// allocated it; this class is for programs that do not use CUDA otherwise.
class TENSORFERRY_EXPORT GpuBuffer {
 public:
  // Starts the CUDA driver and makes the device's context if nobody has. Throws Error: ENODEV if
  // there is no driver or no such GPU, ENOMEM if the GPU has too little free memory.
  explicit GpuBuffer(std::size_t bytes, int device = 0);
  ~GpuBuffer();
  GpuBuffer(GpuBuffer&& other) noexcept;
  GpuBuffer& operator=(GpuBuffer&& other) noexcept;

  // Addresses of the GPU: the CPU must not touch them.
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data_, bytes_}; }
  [[nodiscard]] int device() const noexcept { return device_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int device_ = 0;
};

}  // namespace tensorferry
