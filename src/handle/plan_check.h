// What must hold for every plan, checked against a naive map of bytes. Shared by the unit test and
// the fuzzer. The memory of a case is never touched, so its addresses may be made up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/alignment.h"
#include "handle/plan.h"

namespace tensorferry::handle {

struct PlanCase {
  Direction direction = Direction::read;
  std::uint64_t offset = 0;
  std::vector<Piece> pieces;
  Rules rules;
  Limits limits;
};

// Appends memory to the case's range.
inline void append_piece(PlanCase& input, std::uint64_t address, std::uint64_t bytes) {
  const std::uint64_t start =
      input.pieces.empty() ? 0 : input.pieces.back().start + input.pieces.back().bytes;
  input.pieces.push_back({reinterpret_cast<std::byte*>(address), bytes, start});
}

namespace plan_check {

inline constexpr std::uint64_t mapped_bytes_max = 24 * KiB;  // longer ranges get no byte map
inline constexpr std::uint64_t listed_blocks_max = 256;      // longer plans are sampled

// Thrown and caught in this file only.
struct Fault {
  std::string text;
};

inline void require(bool holds, const char* claim) {
  if (!holds) throw Fault{claim};
}

inline std::uint64_t bytes_of(const PlanCase& input) {
  std::uint64_t bytes = 0;
  for (const Piece& piece : input.pieces) bytes += piece.bytes;
  return bytes;
}

// The memory from the byte at `start` of the range to the end of its piece.
inline std::span<std::byte> memory_at(const PlanCase& input, std::uint64_t start) {
  for (const Piece& piece : input.pieces) {
    if (start < piece.bytes) return {piece.memory + start, piece.bytes - start};
    start -= piece.bytes;
  }
  throw Fault{"a byte lies outside the range"};
}

// A direct write covers whole pages and whole units; a direct read whole units.
inline std::size_t direct_unit(const PlanCase& input) {
  return input.direction == Direction::write ? std::max(page_bytes(), input.rules.offset_alignment)
                                             : input.rules.offset_alignment;
}

inline void check_ranges(const PlanCase& input, const Block& block) {
  require(block.wanted_bytes > 0, "a block is wanted");
  const std::uint64_t end = block.offset + block.bytes;
  const std::uint64_t wanted_end = block.wanted_offset + block.wanted_bytes;
  require(block.offset <= block.wanted_offset && wanted_end <= end, "the wanted part is covered");
  if (input.direction == Direction::write || block.memory != nullptr ||
      block.descriptor == Descriptor::buffered) {
    require(block.bytes == block.wanted_bytes, "only a direct read into a slot covers more");
  }
  require(block.wanted_offset - block.offset < input.rules.offset_alignment,
          "less than one unit more in front");
  require(end - wanted_end < input.rules.offset_alignment, "less than one unit more behind");
}

inline void check_shape(const PlanCase& input, const Block& block) {
  const bool in_place = block.memory != nullptr;
  require(block.bytes <= (in_place ? input.limits.block_bytes : input.limits.slot_block_bytes),
          "a block is within its limit");
  if (block.descriptor == Descriptor::buffered) {
    require(!input.rules.direct || input.direction == Direction::write,
            "reads of a direct file are direct");
    return;
  }
  const std::size_t unit = direct_unit(input);
  require(input.rules.direct, "a buffered file has buffered blocks only");
  require(block.offset % unit == 0, "a direct block starts aligned");
  require(block.bytes % unit == 0, "a direct block has an aligned length");
  require(!in_place || is_aligned(block.memory, input.rules.memory_alignment),
          "a direct block in place has aligned memory");
}

// Buffered writes to a direct file hold no whole unit: those are direct.
inline void check_buffered_write(const PlanCase& input, const Block& block) {
  if (!input.rules.direct || block.descriptor != Descriptor::buffered) return;
  const std::uint64_t unit = direct_unit(input);
  const std::uint64_t begin = input.offset;
  const std::uint64_t end = begin + bytes_of(input);
  const std::uint64_t first = align_up(begin, unit);
  const std::uint64_t last = align_down(end, unit);
  require(first >= last || block.offset + block.bytes <= first || block.offset >= last,
          "whole pages are written direct");
}

inline void check_memory(const PlanCase& input, const Plan& plan, const Block& block) {
  const std::uint64_t start = block.wanted_offset - input.offset;
  if (block.memory != nullptr) {
    const std::span<std::byte> memory = memory_at(input, start);
    require(block.memory == memory.data(), "a block in place has the memory of its range");
    require(block.wanted_bytes <= memory.size(), "a block in place lies in a single piece");
    return;
  }
  std::uint64_t seen = 0;
  plan.for_each_memory(block.wanted_offset, block.wanted_bytes,
                       [&](std::byte* memory, std::size_t bytes) {
                         const std::span<std::byte> piece = memory_at(input, start + seen);
                         require(bytes > 0, "no visit is empty");
                         require(memory == piece.data(), "a visit has the memory of its range");
                         require(bytes <= piece.size(), "a visit lies in a single piece");
                         seen += bytes;
                       });
  require(seen == block.wanted_bytes, "the visits of a block cover all of it");
}

inline void check_block(const PlanCase& input, const Plan& plan, std::uint64_t index) {
  const Block block = plan.block(index);
  check_ranges(input, block);
  check_shape(input, block);
  check_buffered_write(input, block);
  check_memory(input, plan, block);
  require(block.memory != nullptr || plan.needs_slots(), "slots are announced");
  require(block.descriptor == Descriptor::direct || plan.needs_buffered_descriptor(),
          "the buffered descriptor is announced");
  const std::uint64_t wanted_end = block.wanted_offset + block.wanted_bytes;
  const bool last = index + 1 == plan.block_count();
  require(index > 0 || block.wanted_offset == input.offset, "the first block begins the range");
  const bool direct = input.rules.direct && block.descriptor == Descriptor::direct;
  const bool follows = index > 0 && plan.block(index - 1).memory != nullptr;
  // Else the memory of blocks that begin on pages might not be aligned.
  const bool free = input.rules.memory_alignment <= input.rules.offset_alignment;
  require(
      !direct || !free || !follows || block.memory == nullptr || block.offset % page_bytes() == 0,
      "a direct block in place after another one begins on a page");
  require(wanted_end == (last ? input.offset + plan.bytes() : plan.block(index + 1).wanted_offset),
          "each block ends where the next begins");
}

// Every byte of the range is moved exactly once, to or from its own place.
inline void check_byte_map(const PlanCase& input, const Plan& plan) {
  std::vector<const std::byte*> places;
  places.reserve(plan.bytes());
  for (const Piece& piece : input.pieces) {
    for (std::uint64_t i = 0; i < piece.bytes; ++i) places.push_back(piece.memory + i);
  }
  std::vector<unsigned> moves(places.size());
  const auto move = [&](std::uint64_t at, const std::byte* memory, std::uint64_t bytes) {
    for (std::uint64_t i = 0; i < bytes; ++i, ++at) {
      require(at < places.size() && places[at] == memory + i, "a byte is moved to its own place");
      ++moves[at];
    }
  };
  for (std::uint64_t index = 0; index < plan.block_count(); ++index) {
    const Block block = plan.block(index);
    std::uint64_t at = block.wanted_offset - input.offset;
    if (block.memory != nullptr) {
      move(at, block.memory + (block.wanted_offset - block.offset), block.wanted_bytes);
      continue;
    }
    plan.for_each_memory(block.wanted_offset, block.wanted_bytes,
                         [&](const std::byte* memory, std::size_t bytes) {
                           move(at, memory, bytes);
                           at += bytes;
                         });
  }
  require(std::ranges::all_of(moves, [](unsigned times) { return times == 1; }),
          "every byte is moved exactly once");
}

inline void check_economy(const PlanCase& input, const Plan& plan) {
  const std::uint64_t shortest = std::min(input.limits.block_bytes, input.limits.slot_block_bytes);
  require(plan.block_count() <= plan.bytes() / shortest + 4, "no more blocks than needed");
  const std::uint64_t unit = direct_unit(input);
  const bool fits = input.offset % unit == 0 && plan.bytes() % unit == 0 &&
                    input.pieces.size() == 1 &&
                    is_aligned(input.pieces.front().memory, input.rules.memory_alignment);
  if (input.rules.direct && fits) {
    require(!plan.needs_slots(), "aligned input is never bounced");
    require(!plan.needs_buffered_descriptor(), "aligned input is all direct");
  }
  if (!input.rules.direct && input.pieces.size() == 1) {
    require(!plan.needs_slots(), "one piece is never bounced through the page cache");
  }
}

inline void check(const PlanCase& input) {
  const Plan plan(input.direction, input.offset, input.pieces, input.rules, input.limits);
  require(plan.offset() == input.offset, "the plan knows its offset");
  require(plan.bytes() == bytes_of(input), "the plan knows its length");
  if (plan.bytes() == 0) {
    require(plan.block_count() == 0, "nothing needs no blocks");
    require(!plan.needs_slots() && !plan.needs_buffered_descriptor(), "nothing needs nothing");
    return;
  }
  require(plan.block_count() > 0, "something needs blocks");
  const std::uint64_t count = plan.block_count();
  const std::uint64_t step = std::max<std::uint64_t>(1, count / listed_blocks_max);
  for (std::uint64_t index = 0; index < count; index += step) check_block(input, plan, index);
  for (std::uint64_t edge = 0; edge < std::min<std::uint64_t>(count, 8); ++edge) {
    check_block(input, plan, edge);
    check_block(input, plan, count - 1 - edge);
  }
  check_economy(input, plan);
  if (plan.bytes() <= mapped_bytes_max) check_byte_map(input, plan);
}

}  // namespace plan_check

// Makes a plan of `input` and returns the first claim that does not hold, or an empty text.
[[nodiscard]] inline std::string check_plan(const PlanCase& input) {
  try {
    plan_check::check(input);
    return {};
  } catch (const plan_check::Fault& fault) {
    return fault.text;
  }
}

// A case made of choices: `pick(low, high)` gives a whole number between the two, both included.
// Favours what is awkward: borders, powers of two, empty pieces, memory congruent to the file.
template <class Pick>
[[nodiscard]] PlanCase make_plan_case(Pick pick) {
  PlanCase input;
  input.direction = pick(0, 1) == 0 ? Direction::read : Direction::write;
  input.rules.direct = pick(0, 7) != 0;
  const bool usual = pick(0, 3) != 0;
  input.rules.offset_alignment = std::size_t{1} << (usual ? pick(9, 12) : pick(0, 16));
  input.rules.memory_alignment = std::size_t{1} << (usual ? pick(2, 12) : pick(0, 16));
  const std::uint64_t unit =
      std::max({page_bytes(), input.rules.offset_alignment, input.rules.memory_alignment});
  input.limits.block_bytes = unit * (std::uint64_t{1} << pick(0, 8));
  input.limits.slot_block_bytes = unit * pick(1, 32);

  const auto near = [&](std::uint64_t value) {
    switch (pick(0, 3)) {
      case 0:
        return value;
      case 1:
        return value + unit * pick(0, 3);
      case 2:
        return value + pick(0, 2 * unit);
      default:
        return value - std::min(value, pick(0, 2 * unit));
    }
  };
  const std::uint64_t offsets[] = {0, 0, 1 * MiB, 2 * GiB, 4 * GiB, bytes_max, bytes_max - GiB};
  input.offset = std::min(near(offsets[pick(0, 6)]), bytes_max);

  const std::uint64_t lengths[] = {0, unit, 64 * KiB, 0x7ffff000, 4 * GiB, std::uint64_t{1} << 40};
  const std::uint64_t piece_count = pick(0, 2) != 0 ? 1 : pick(0, 40);
  std::uint64_t at = input.offset;
  for (std::uint64_t i = 0; i < piece_count; ++i) {
    const std::uint64_t wanted = piece_count > 4 && pick(0, 9) != 0 ? pick(0, 300)
                                 : pick(0, 30) == 0                 ? near(lengths[pick(3, 5)])
                                                                    : near(lengths[pick(0, 2)]);
    const std::uint64_t bytes = std::min(wanted, bytes_max - at);
    const std::uint64_t page = (i + 1) << 44;
    const std::uint64_t misalignments[] = {0, at % input.rules.memory_alignment, pick(0, 4095)};
    append_piece(input, page + misalignments[pick(0, 2)], bytes);
    at += bytes;
  }
  return input;
}

}  // namespace tensorferry::handle
