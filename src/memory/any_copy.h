// Copies from and to memory of the CPU and of GPUs.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/result.h"
#include "os/gpu_stream.h"
#include "tensorferry/options.h"

namespace tensorferry::memory {

// The work that is queued on the stream now and must end before anybody touches the memory. nullptr
// if nothing is queued or no GPU holds the memory.
[[nodiscard]] Result<std::shared_ptr<os::GpuFence>> work_before(std::span<const std::byte> memory,
                                                                CudaStream stream);

// Blocks until that work has ended. The user's work may itself wait for anything, so nothing may
// wait for the caller.
[[nodiscard]] Status wait_for(const std::shared_ptr<os::GpuFence>& work);

// Copies between any memory of the CPU and of GPUs. Blocks until done. Both spans have the same
// size and do not overlap.
[[nodiscard]] Status copy_any(std::span<std::byte> to, std::span<const std::byte> from);

}  // namespace tensorferry::memory
