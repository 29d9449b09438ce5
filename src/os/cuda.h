// The one seam to the CUDA driver, libcuda.so.1, which is found at run time: nothing of CUDA is
// needed to build, and nothing changes where there is none.
//
// Nobody here starts the driver or makes a context, start_cuda() aside: a process that does not use
// CUDA stays free of it, and its forks stay safe. Thread-safe; each call says what device it is
// for and leaves the calling thread's current context as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/result.h"

namespace tensorferry::os {

struct CudaDriver;  // the functions of the library

// The driver, if this process uses it: its library has been loaded, by whomever, and has all that
// is needed. nullptr if not.
[[nodiscard]] const CudaDriver* cuda() noexcept;

// Which GPU has the memory; nullopt for the CPU's.
[[nodiscard]] std::optional<int> gpu_of(const std::byte* memory) noexcept;

// Loads and starts the driver, for those whose task is to use a GPU. Says why if it cannot be.
[[nodiscard]] Status start_cuda();
[[nodiscard]] Result<int> gpu_count();

// Memory of a GPU, of whichever content. Makes the device's context if there is none.
[[nodiscard]] Result<std::byte*> allocate_on_gpu(int device, std::size_t bytes);
void free_on_gpu(int device, std::byte* memory) noexcept;

// While it lives the calling thread works on one device, for libraries that ask for that.
class GpuVisit {
 public:
  explicit GpuVisit(int device);
  ~GpuVisit();
  GpuVisit(const GpuVisit&) = delete;
  GpuVisit& operator=(const GpuVisit&) = delete;

  [[nodiscard]] const Status& status() const noexcept { return status_; }

 private:
  Status status_ = Nothing{};
  int capture_mode_ = 0;
};

// Makes page-locked memory known to CUDA, so that copies from and to it need not wait. Returns by
// which device; nullopt where the process has no context yet; an Error where CUDA refuses, as it
// does for memory that somebody else has made known.
[[nodiscard]] Result<std::optional<int>> register_with_cuda(std::byte* memory, std::size_t bytes);
void unregister_with_cuda(int device, std::byte* memory) noexcept;

// The work that is queued on a stream of the user's at this moment.
class GpuFence {
 public:
  // An Error for a stream that is not of this device, or that is being captured into a graph.
  // nullptr where nothing is queued.
  [[nodiscard]] static Result<std::shared_ptr<GpuFence>> after(int device, void* stream);
  ~GpuFence();
  GpuFence(const GpuFence&) = delete;
  GpuFence& operator=(const GpuFence&) = delete;

  [[nodiscard]] int device() const noexcept { return device_; }
  // Whether that work has ended, in whichever way.
  [[nodiscard]] bool passed() const noexcept;

 private:
  friend class GpuStream;
  GpuFence(int device, void* event) : device_(device), event_(event) {}
  int device_;
  void* event_;
};

// A stream of our own on one device. It waits for nothing but what it is told to. Used by one
// thread at a time.
class GpuStream {
 public:
  [[nodiscard]] static Result<std::unique_ptr<GpuStream>> open(int device);
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  [[nodiscard]] int device() const noexcept { return device_; }

  // What follows is done after the fence has passed.
  [[nodiscard]] Status wait_for(const GpuFence& fence);

  // Starts to copy, from and to wherever, and returns at once where the CPU's memory is known to
  // CUDA.
  [[nodiscard]] Status copy(std::byte* to, const std::byte* from, std::size_t bytes);

  // A number for all that was started so far. Numbers grow by one.
  [[nodiscard]] Result<std::uint64_t> mark();
  // Whether what came before the mark has been done. An Error if the GPU has failed.
  [[nodiscard]] Result<bool> reached(std::uint64_t mark);

  // Returns when all is done.
  [[nodiscard]] Status finish();

 private:
  struct Marks;
  GpuStream(int device, void* stream);
  int device_;
  void* stream_;
  std::unique_ptr<Marks> marks_;
};

}  // namespace tensorferry::os
