// The one seam to the CUDA driver, libcuda.so.1, which is found at run time: building needs nothing
// of CUDA, and a machine without CUDA notices nothing.
//
// Calls report CUDA's own codes (base/cuda_failure.h); no code is judged here. Only start_cuda()
// starts the driver and only allocate_on_gpu() makes a context: a process that does not use CUDA
// stays free of it, and may fork. Thread-safe. Each call names its device and leaves the calling
// thread's current context as it was.
#pragma once

#include <cstddef>
#include <optional>

#include "base/cuda_failure.h"

namespace tensorferry::os {

struct CudaDriver;  // the driver's functions

// The driver if this process uses it: somebody has loaded its library, and the library has all
// functions that we need. nullptr if not.
[[nodiscard]] const CudaDriver* cuda() noexcept;

// The GPU that holds the memory; nullopt for memory of the CPU.
[[nodiscard]] std::optional<int> gpu_of(const std::byte* memory) noexcept;

// Loads and starts the driver, for callers whose task is to use a GPU.
[[nodiscard]] CudaStatus start_cuda();
[[nodiscard]] CudaResult<int> gpu_count();

// Uninitialized memory of a GPU. Makes the device's context if it has none.
[[nodiscard]] CudaResult<std::byte*> allocate_on_gpu(int device, std::size_t bytes);
void free_on_gpu(int device, std::byte* memory) noexcept;

// Makes a device the calling thread's while the visit lives, for libraries that ask for that.
class GpuVisit {
 public:
  explicit GpuVisit(int device);
  ~GpuVisit();
  GpuVisit(const GpuVisit&) = delete;
  GpuVisit& operator=(const GpuVisit&) = delete;

  [[nodiscard]] const CudaStatus& status() const noexcept { return status_; }

 private:
  CudaStatus status_ = Nothing{};
  int capture_mode_ = 0;
};

// Registers page-locked memory with CUDA, so that copies from and to it run in the background.
// Returns the device it used, or nullopt if the process has no context yet. Fails if CUDA refuses,
// for example because somebody else has registered the memory.
[[nodiscard]] CudaResult<std::optional<int>> register_with_cuda(std::byte* memory,
                                                                std::size_t bytes);
void unregister_with_cuda(int device, std::byte* memory) noexcept;

}  // namespace tensorferry::os
