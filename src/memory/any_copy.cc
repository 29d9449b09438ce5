#include "memory/any_copy.h"

#include <optional>

#include "os/cuda.h"
#include "tensorferry/copy.h"

namespace tensorferry::memory {

Status copy_any(std::span<std::byte> to, CudaStream to_stream, std::span<const std::byte> from,
                CudaStream from_stream) {
  if (to.empty()) return Nothing{};
  const std::optional<int> to_gpu = os::gpu_of(to.data());
  const std::optional<int> from_gpu = os::gpu_of(from.data());
  if (!to_gpu && !from_gpu) {
    copy(to, from);
    return Nothing{};
  }
  auto own = os::GpuStream::open(to_gpu ? *to_gpu : *from_gpu);
  if (!own.ok()) return own.error();
  for (const auto& [gpu, stream] : {std::pair(to_gpu, to_stream), {from_gpu, from_stream}}) {
    if (!gpu) continue;
    auto fence = os::GpuFence::after(*gpu, stream.handle);
    if (!fence.ok()) return fence.error();
    if (fence.value() == nullptr) continue;
    if (Status waits = own.value()->wait_for(*fence.value()); !waits.ok()) return waits;
  }
  if (Status started = own.value()->copy(to.data(), from.data(), to.size()); !started.ok()) {
    return started;
  }
  return own.value()->finish();
}

}  // namespace tensorferry::memory
