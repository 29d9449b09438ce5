// Blocks that describe themselves, so that a bad block shows what went wrong: where it belongs,
// which generation it has, and whether it is whole. Pure functions over memory.
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
  std::uint64_t generation = 0;  // 1 for the first write of the file
  std::uint64_t seed = 0;        // of the run
  std::uint64_t file_bytes = 0;  // length of the file

  [[nodiscard]] bool operator==(const Stamp&) const = default;
};

enum class Fault : std::uint8_t {
  flipped_bits,   // the right block, with some bits wrong
  swapped_block,  // a sound block of another offset
  stale_block,    // a sound block from before the previous generation
  lost_write,     // zeros, or the previous generation, in all of it or in part
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

// Fills one block of stamped_block_bytes, at any address: the stamp, bytes that look random and
// depend on all of the stamp, and a checksum over everything.
void write_stamp(std::span<std::byte> block, const Stamp& stamp);

// The stamp of a block; nothing if the block is not whole.
[[nodiscard]] std::optional<Stamp> read_stamp(std::span<const std::byte> block);

// What is wrong with a block that should have this stamp; nothing if it is right.
[[nodiscard]] std::optional<BadBlock> check_block(std::span<const std::byte> block,
                                                  const Stamp& expected);

}  // namespace tensorferry::bench
