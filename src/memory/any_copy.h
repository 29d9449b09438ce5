// Copies that may begin or end on a GPU.
#pragma once

#include <cstddef>
#include <span>

#include "base/result.h"
#include "tensorferry/options.h"

namespace tensorferry::memory {

// Copies between memory of the CPU and of GPUs, whichever, and returns when it is done. Memory of a
// GPU is touched after the work that is queued on its stream. Both are of the same size and do not
// overlap.
[[nodiscard]] Status copy_any(std::span<std::byte> to, CudaStream to_stream,
                              std::span<const std::byte> from, CudaStream from_stream);

}  // namespace tensorferry::memory
