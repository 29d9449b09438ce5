// GPUDirect Storage: transfers between drives and GPUs that do not pass through memory of the CPU.
// What is done with it is done by Handles with the engine `gds`.
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
  std::string reason;  // why that and no more, in words
};

// What can be had on this machine. Loads NVIDIA's library (libcufile.so.0, from where the system,
// CUDA or pip has put it) and starts nothing.
[[nodiscard]] TENSORFERRY_EXPORT GdsSupport gds_support();

// Registers memory of a GPU with cuFile, so that transfers within it need no preparation. It must
// be unregistered before it is freed. Throws Error for memory that cannot be, and where there is no
// cuFile. False where there is nothing registered at that address.
TENSORFERRY_EXPORT void register_gpu_memory(std::span<std::byte> memory);
TENSORFERRY_EXPORT bool unregister_gpu_memory(std::byte* memory);

// What this process has asked of cuFile so far.
struct GdsCounts {
  std::uint64_t requests = 0;
  std::uint64_t registered_requests = 0;  // on memory that was registered
  unsigned in_flight_max = 0;             // at the same time
};
[[nodiscard]] TENSORFERRY_EXPORT GdsCounts gds_counts() noexcept;

}  // namespace tensorferry
