#include "memory/any_copy.h"

#include <optional>

#include "os/cuda.h"
#include "tensorferry/copy.h"

namespace tensorferry::memory {

Result<std::shared_ptr<os::GpuFence>> work_before(std::span<const std::byte> memory,
                                                  CudaStream stream) {
  const std::optional<int> gpu = memory.empty() ? std::nullopt : os::gpu_of(memory.data());
  if (!gpu) return std::shared_ptr<os::GpuFence>();
  return explain(os::GpuFence::after(*gpu, stream.handle));
}

Status wait_for(const std::shared_ptr<os::GpuFence>& work) {
  if (work == nullptr) return Nothing{};
  auto own = os::GpuStream::open(work->device());
  if (!own.ok()) return explain(own.error());
  if (CudaStatus waits = own.value()->wait_for(*work); !waits.ok()) return explain(waits.error());
  return explain(own.value()->finish());
}

Status copy_any(std::span<std::byte> to, std::span<const std::byte> from) {
  if (to.empty()) return Nothing{};
  const std::optional<int> to_gpu = os::gpu_of(to.data());
  const std::optional<int> from_gpu = os::gpu_of(from.data());
  if (!to_gpu && !from_gpu) {
    copy(to, from);
    return Nothing{};
  }
  auto own = os::GpuStream::open(to_gpu ? *to_gpu : *from_gpu);
  if (!own.ok()) return explain(own.error());
  if (CudaStatus started = own.value()->copy(to.data(), from.data(), to.size()); !started.ok()) {
    return explain(started.error());
  }
  return explain(own.value()->finish());
}

}  // namespace tensorferry::memory
