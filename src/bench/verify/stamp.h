// Blocks that describe themselves, so that a block that is wrong tells how: where it belongs, which
// generation it is of, and whether it is whole. Pure functions over memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "bench/run/sizes.h"

namespace tensorferry::bench {

inline constexpr std::size_t stamped_block_bytes = 4 * KiB;

struct Stamp {
  std::uint64_t offset = 0;      // of the block in its file
  std::uint64_t generation = 0;  // how many times the file had been written before, plus one
  std::uint64_t seed = 0;        // of the run
  std::uint64_t file_bytes = 0;  // length of the file

  [[nodiscard]] bool operator==(const Stamp&) const = default;
};

enum class Fault : std::uint8_t {
  flipped_bits,   // the block as it was written, but for some bits
  swapped_block,  // a sound block that belongs elsewhere
  stale_block,    // a sound block from before the previous generation: time went back
  lost_write,     // zeros, or still the previous generation, all over or in part
  foreign_data,   // anything else
};

// "flipped bits", "swapped block", ...
[[nodiscard]] const char* to_string(Fault fault) noexcept;

struct BadBlock {
  Fault fault = Fault::foreign_data;
  std::uint64_t offset = 0;  // of the first bad byte in the file
  std::uint64_t length = 0;  // from there to the last bad byte of the block
  std::string explanation;   // one line
};

// Fills one block of stamped_block_bytes: the stamp, bytes that look random and depend on all of
// it, and a checksum over all. Any address will do.
void write_stamp(std::span<std::byte> block, const Stamp& stamp);

// The stamp of a block that is whole, or nothing.
[[nodiscard]] std::optional<Stamp> read_stamp(std::span<const std::byte> block);

// What is wrong with a block where `expected` should be; nothing if it is just that.
[[nodiscard]] std::optional<BadBlock> check_block(std::span<const std::byte> block,
                                                  const Stamp& expected);

}  // namespace tensorferry::bench
