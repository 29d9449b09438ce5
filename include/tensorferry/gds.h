// GPUDirect Storage: transfers between drives and GPUs that do not pass through memory of the CPU.
// Handles with the engine `gds` use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tensorferry/export.h"

namespace tensorferry {

// `compat`: NVIDIA's library works, but moves the bytes through memory of the CPU.
enum class GdsMode : std::uint8_t { none, compat, direct };

struct GdsSupport {
  GdsMode mode = GdsMode::none;
  std::string reason;  // why this mode
};

// What this machine supports. Loads NVIDIA's library (libcufile.so.0, as the system, CUDA or pip
// installed it) but does not start it.
[[nodiscard]] TENSORFERRY_EXPORT GdsSupport gds_support();

// Registers memory of a GPU with cuFile, so that transfers of it need no preparation. Unregister
// the memory before you free it. Throws Error if cuFile refuses the memory or is not available.
// unregister_gpu_memory() returns false if no memory is registered at that address.
TENSORFERRY_EXPORT void register_gpu_memory(std::span<std::byte> memory);
TENSORFERRY_EXPORT bool unregister_gpu_memory(std::byte* memory);

// What this process has asked cuFile to do so far.
struct GdsCounts {
  std::uint64_t requests = 0;
  std::uint64_t registered_requests = 0;  // on memory that was registered
  unsigned in_flight_max = 0;             // at the same time
};
[[nodiscard]] TENSORFERRY_EXPORT GdsCounts gds_counts() noexcept;

}  // namespace tensorferry
