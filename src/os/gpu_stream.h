// Streams of CUDA: the user's, whose work we wait for, and ours. As in os/cuda.h, each call names
// its device and leaves the calling thread's current context as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/cuda_failure.h"

namespace tensorferry::os {

// The work that was queued on a stream of the user when the fence was made.
class GpuFence {
 public:
  // Returns nullptr if nothing is queued. Fails if the stream is not on this device or is being
  // captured into a graph.
  [[nodiscard]] static CudaResult<std::shared_ptr<GpuFence>> after(int device, void* stream);
  ~GpuFence();
  GpuFence(const GpuFence&) = delete;
  GpuFence& operator=(const GpuFence&) = delete;

  [[nodiscard]] int device() const noexcept { return device_; }
  // Whether that work has ended, well or badly.
  [[nodiscard]] bool passed() const noexcept;

 private:
  friend class GpuStream;
  GpuFence(int device, void* event) : device_(device), event_(event) {}
  int device_;
  void* event_;
};

// A stream of ours on one device. It waits only for the fences it is given. Used by one thread at a
// time.
class GpuStream {
 public:
  [[nodiscard]] static CudaResult<std::unique_ptr<GpuStream>> open(int device);
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  [[nodiscard]] int device() const noexcept { return device_; }

  // Work that is started from now on runs after the fence has passed.
  [[nodiscard]] CudaStatus wait_for(const GpuFence& fence);

  // Starts a copy between any two memories. Returns at once if the CPU's memory is registered with
  // CUDA.
  [[nodiscard]] CudaStatus copy(std::byte* to, const std::byte* from, std::size_t bytes);

  // Marks the end of all work that was started so far. Marks grow by one.
  [[nodiscard]] CudaResult<std::uint64_t> mark();
  // Whether the work before the mark is done. Fails if the GPU has failed.
  [[nodiscard]] CudaResult<bool> reached(std::uint64_t mark);

  // Waits until all work is done.
  [[nodiscard]] CudaStatus finish();

 private:
  struct Marks;
  GpuStream(int device, void* stream);
  int device_;
  void* stream_;
  std::unique_ptr<Marks> marks_;
};

}  // namespace tensorferry::os
