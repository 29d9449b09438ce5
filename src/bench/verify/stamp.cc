#include "bench/verify/stamp.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace tensorferry::bench {

namespace {

using StampedBlock = std::array<std::byte, stamped_block_bytes>;

// "tfstamp1", readable for a person who looks at the drive.
constexpr std::uint64_t magic = 0x31706d6174736674;

// The beginning of a block. The payload follows; the last eight bytes are the checksum.
struct Head {
  std::uint64_t magic_number = magic;
  Stamp stamp;
};

constexpr std::size_t checksum_at = stamped_block_bytes - sizeof(std::uint64_t);
static_assert(sizeof(Head) == 40 && (checksum_at - sizeof(Head)) % sizeof(std::uint64_t) == 0);

// splitmix64: every bit of the state reaches every bit of the result.
std::uint64_t next_random(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15;
  std::uint64_t mixed = state;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 31);
}

// Where a block differs from what it should be.
struct Difference {
  std::size_t first = 0;
  std::size_t last = 0;
  std::size_t bits = 0;

  [[nodiscard]] std::size_t bytes() const { return last - first + 1; }
};

Difference difference(std::span<const std::byte> block, const StampedBlock& wanted) {
  Difference found{.first = stamped_block_bytes};
  for (std::size_t i = 0; i < stamped_block_bytes; ++i) {
    const auto changed = static_cast<unsigned char>(block[i] ^ wanted[i]);
    if (changed == 0) continue;
    found.first = std::min(found.first, i);
    found.last = i;
    found.bits += static_cast<std::size_t>(std::popcount(changed));
  }
  return found;
}

// A whole block, but the wrong one.
BadBlock judge_sound(const Stamp& found, const Stamp& expected) {
  BadBlock bad{.offset = expected.offset, .length = stamped_block_bytes, .explanation = {}};
  if (found.seed != expected.seed || found.file_bytes != expected.file_bytes) {
    bad.explanation = fmt::format("a block of another run, with seed {}, for offset {}", found.seed,
                                  found.offset);
  } else if (found.offset != expected.offset) {
    bad.fault = Fault::swapped_block;
    bad.explanation = fmt::format("this is the block of offset {}, generation {}", found.offset,
                                  found.generation);
  } else if (found.generation + 1 == expected.generation) {
    bad.fault = Fault::lost_write;
    bad.explanation = fmt::format("still generation {}: the write of generation {} never arrived",
                                  found.generation, expected.generation);
  } else if (found.generation < expected.generation) {
    bad.fault = Fault::stale_block;
    bad.explanation = fmt::format("generation {} is back, although generation {} was written",
                                  found.generation, expected.generation);
  } else {
    bad.explanation = fmt::format("generation {} is newer than the expected {}", found.generation,
                                  expected.generation);
  }
  return bad;
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

// A damaged block: which part is wrong, and what it holds instead.
BadBlock judge_damaged(std::span<const std::byte> block, const Stamp& expected) {
  // This many random bytes are never equal by accident.
  constexpr std::size_t telling_bytes = 16;
  StampedBlock wanted;
  write_stamp(wanted, expected);
  const Difference found = difference(block, wanted);
  const auto part = block.subspan(found.first, found.bytes());
  BadBlock bad{.offset = expected.offset + found.first, .length = found.bytes(), .explanation = {}};
  if (found.bytes() >= telling_bytes && all_zero(block)) {
    bad.fault = Fault::lost_write;
    bad.offset = expected.offset;
    bad.length = stamped_block_bytes;
    bad.explanation = "zeros: no write ever arrived here, or the drive discarded it";
    return bad;
  }
  if (found.bytes() >= telling_bytes && all_zero(part)) {
    bad.fault = Fault::lost_write;
    bad.explanation = fmt::format("{} bytes of the block are zeros", found.bytes());
    return bad;
  }
  StampedBlock previous;
  Stamp before = expected;
  --before.generation;
  write_stamp(previous, before);
  if (found.bytes() >= telling_bytes &&
      std::ranges::equal(part, std::span(previous).subspan(found.first, found.bytes()))) {
    bad.fault = Fault::lost_write;
    bad.explanation = fmt::format("torn: {} bytes of the block are still of generation {}",
                                  found.bytes(), before.generation);
    return bad;
  }
  // In unrelated bytes half of the bits differ.
  if (found.bits < stamped_block_bytes * 8 / 4) {
    bad.fault = Fault::flipped_bits;
    bad.explanation = found.bits == 1
                          ? fmt::format("one bit is flipped, in byte {} of the block", found.first)
                          : fmt::format("{} bits are flipped, in bytes {} to {} of the block",
                                        found.bits, found.first, found.last);
    return bad;
  }
  bad.offset = expected.offset;
  bad.length = stamped_block_bytes;
  bad.explanation = "unrelated to what was written";
  return bad;
}

}  // namespace

const char* to_string(Fault fault) noexcept {
  switch (fault) {
    case Fault::flipped_bits:
      return "flipped bits";
    case Fault::swapped_block:
      return "swapped block";
    case Fault::stale_block:
      return "stale block";
    case Fault::lost_write:
      return "lost write";
    case Fault::foreign_data:
      return "foreign data";
  }
  return "";
}

void write_stamp(std::span<std::byte> block, const Stamp& stamp) {
  const Head head{.stamp = stamp};
  std::memcpy(block.data(), &head, sizeof head);
  std::uint64_t state = XXH64(&head, sizeof head, stamp.seed);
  for (std::size_t at = sizeof head; at < checksum_at; at += sizeof state) {
    const std::uint64_t random = next_random(state);
    std::memcpy(block.data() + at, &random, sizeof random);
  }
  const std::uint64_t checksum = XXH64(block.data(), checksum_at, magic);
  std::memcpy(block.data() + checksum_at, &checksum, sizeof checksum);
}

std::optional<Stamp> read_stamp(std::span<const std::byte> block) {
  Head head;
  std::uint64_t checksum = 0;
  std::memcpy(&head, block.data(), sizeof head);
  std::memcpy(&checksum, block.data() + checksum_at, sizeof checksum);
  if (head.magic_number != magic || checksum != XXH64(block.data(), checksum_at, magic)) return {};
  return head.stamp;
}

std::optional<BadBlock> check_block(std::span<const std::byte> block, const Stamp& expected) {
  const std::optional<Stamp> found = read_stamp(block);
  if (found == expected) return {};
  return found ? judge_sound(*found, expected) : judge_damaged(block, expected);
}

}  // namespace tensorferry::bench
