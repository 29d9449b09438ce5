// Copies that may begin or end on a GPU.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/result.h"
#include "os/gpu_stream.h"
#include "tensorferry/options.h"

namespace tensorferry::memory {

// The work that is queued on a stream now and comes before the memory may be touched: nullptr where
// there is none, or the memory is not a GPU's.
[[nodiscard]] Result<std::shared_ptr<os::GpuFence>> work_before(std::span<const std::byte> memory,
                                                                CudaStream stream);

// Returns when that work has ended. It is the user's and may wait for whatever it likes, so that
// nobody may have to wait for the caller.
[[nodiscard]] Status wait_for(const std::shared_ptr<os::GpuFence>& work);

// Copies between memory of the CPU and of GPUs, whichever, at once, and returns when it is done.
// Both are of the same size and do not overlap.
[[nodiscard]] Status copy_any(std::span<std::byte> to, std::span<const std::byte> from);

}  // namespace tensorferry::memory
