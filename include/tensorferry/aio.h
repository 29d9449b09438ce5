// The one-off functions: set up, move a whole file, tear down. For repeated transfers open a
// Handle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tensorferry/error.h"
#include "tensorferry/export.h"
#include "tensorferry/options.h"

namespace tensorferry {

// How long a call took: until the transfer was done, and until it was validated.
struct AioElapsed {
  double transfer_us = 0;
  double call_us = 0;
};

// Fills `buffer` from a file of exactly its size; another size is an Error that names both.
// With `validate` the file is then read in the ordinary way and compared.
// Returns 0; every failure throws Error.
TENSORFERRY_EXPORT int aio_read(std::span<std::byte> buffer, const std::string& filename,
                                std::size_t block_size = std::size_t{1} << 20,
                                unsigned queue_depth = 128, bool single_submit = false,
                                bool overlap_events = true, bool validate = false,
                                AioElapsed* elapsed = nullptr);

// Leaves a file that holds exactly `buffer`: a missing one is made, which its user alone may read,
// and a longer one is cut.
TENSORFERRY_EXPORT int aio_write(std::span<const std::byte> buffer, const std::string& filename,
                                 std::size_t block_size = std::size_t{1} << 20,
                                 unsigned queue_depth = 128, bool single_submit = false,
                                 bool overlap_events = true, bool validate = false,
                                 AioElapsed* elapsed = nullptr);

// Reads the file in the ordinary way, through the page cache, and compares it with `memory`.
// Throws Error (EBADMSG) with the offset of the first byte that differs.
TENSORFERRY_EXPORT void validate(std::span<const std::byte> memory, const std::string& path,
                                 std::uint64_t offset = 0, CudaStream stream = {});

}  // namespace tensorferry
