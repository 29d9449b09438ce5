// What the options of a handle come to: limits, the memory for slots, and the crew for a device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "handle/crew.h"
#include "tensorferry/device.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

// How the memory for slots is shared out, in sixteenths: to the workers, to those of files without
// O_DIRECT, to those of cuFile (for ragged ends alone) and to inline callers.
enum class SlotShares : std::uint8_t { workers = 9, buffered = 5, gds = 1, inline_callers = 1 };

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
