// The one-off functions: set up, move a whole file, tear down. To move more than one file, open a
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

// How long a call took: up to the end of the transfer, and up to the end of its validation.
struct AioElapsed {
  double transfer_us = 0;
  double call_us = 0;
};

// Fills `buffer` from a file of exactly its size. With `validate` it then reads the file through
// the page cache and compares. Blocks until done and returns 0; every failure throws Error, and a
// file of another size throws one that names both sizes.
TENSORFERRY_EXPORT int aio_read(std::span<std::byte> buffer, const std::string& filename,
                                std::size_t block_size = std::size_t{1} << 20,
                                unsigned queue_depth = 128, bool single_submit = false,
                                bool overlap_events = true, bool validate = false,
                                AioElapsed* elapsed = nullptr);

// Makes the file hold exactly `buffer`: creates it, readable for its user alone, or cuts a longer
// one. Otherwise as aio_read.
TENSORFERRY_EXPORT int aio_write(std::span<const std::byte> buffer, const std::string& filename,
                                 std::size_t block_size = std::size_t{1} << 20,
                                 unsigned queue_depth = 128, bool single_submit = false,
                                 bool overlap_events = true, bool validate = false,
                                 AioElapsed* elapsed = nullptr);

// Reads the file through the page cache and compares it with `memory`. Blocks. Throws Error
// (EBADMSG) with the offset of the first byte that differs.
TENSORFERRY_EXPORT void validate(std::span<const std::byte> memory, const std::string& path,
                                 std::uint64_t offset = 0, CudaStream stream = {});

}  // namespace tensorferry
