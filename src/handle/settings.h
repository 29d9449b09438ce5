// What the options of a handle come to: limits, the memory for slots, and the crew for a device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "handle/crew.h"
#include "tensorferry/device.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

// The shares of the memory for slots, in sixteenths: of the workers, of those for files without
// O_DIRECT, of those whose engine moves the memory of GPUs (for ragged ends), of inline callers.
enum class SlotShares : std::uint8_t { workers = 9, buffered = 5, gpu = 1, inline_callers = 1 };

[[nodiscard]] Status check_options(const HandleOptions& options);

// So many shares of the memory for slots.
[[nodiscard]] std::size_t slot_bytes_of(const HandleOptions& options, SlotShares shares) noexcept;

// Whether a small transfer through slots, and nothing else, may be cut into quarters: the copy of
// one goes on while the others are on their way. What the user chose is not cut.
[[nodiscard]] bool cuts_small_transfers(const HandleOptions& options) noexcept;

// How much of a transfer the calling thread takes through a slot, where the copy comes last.
[[nodiscard]] std::uint64_t inline_slot_bytes_max(const HandleOptions& options) noexcept;

[[nodiscard]] CrewOptions crew_options(const HandleOptions& options, EngineKind engine,
                                       const Device& device, SlotShares shares);

}  // namespace tensorferry::handle
