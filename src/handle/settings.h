// Derives settings from the options of a handle: limits, memory for slots, the crew of a device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "handle/crew.h"
#include "handle/process_share.h"
#include "tensorferry/device.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

// The shares of the memory for slots, in sixteenths: of the workers, of those for files without
// O_DIRECT, of those whose engine moves the memory of GPUs (for ragged ends), of inline callers.
enum class SlotShares : std::uint8_t { workers = 9, buffered = 5, gpu = 1, inline_callers = 1 };

[[nodiscard]] Status check_options(const HandleOptions& options);

// Whether the device can do what the options say of polling.
[[nodiscard]] Status check_polling(const HandleOptions& options, const Device& device);

// The memory for slots that these shares amount to.
[[nodiscard]] std::size_t slot_bytes_of(const HandleOptions& options, SlotShares shares) noexcept;

// Whether a small transfer is cut into quarters, of at least cut_bytes_min each, if it goes through
// slots or somebody waits for it (then up to cut_bytes_max; memory of huge pages into halves). Not
// if the user chose a block size, a depth below 4 or no overlap.
inline constexpr std::uint64_t cut_bytes_min = std::uint64_t{256} << 10;
inline constexpr std::uint64_t cut_bytes_max = std::uint64_t{4} << 20;
[[nodiscard]] bool cuts_small_transfers(const HandleOptions& options) noexcept;

// How many bytes an inline caller may read with O_DIRECT, or move through a slot: it cannot cut
// them into quarters.
[[nodiscard]] std::uint64_t inline_uncut_bytes_max(const HandleOptions& options) noexcept;

[[nodiscard]] CrewOptions crew_options(const HandleOptions& options, EngineKind engine,
                                       const Device& device, SlotShares shares);

// Takes the share of the process that such a crew needs, and makes the crew smaller if there is
// less.
[[nodiscard]] ProcessShare take_share(CrewOptions& crew, const HandleOptions& options,
                                      ProcessLimits& limits);

}  // namespace tensorferry::handle
