// Properties of plans over many random inputs, and the cases that people ask about. The memory is
// made up and never touched.
#include "handle/plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/alignment.h"
#include "handle/plan_check.h"

namespace tensorferry::handle {
namespace {

constexpr std::uint64_t page_address = std::uint64_t{1} << 44;
constexpr Direction both_directions[] = {Direction::read, Direction::write};

std::string describe(const PlanCase& input) {
  std::ostringstream out;
  out << (input.direction == Direction::read ? "read" : "write") << " at " << input.offset
      << (input.rules.direct ? ", direct" : ", buffered") << ", memory alignment "
      << input.rules.memory_alignment << ", offset alignment " << input.rules.offset_alignment
      << ", blocks of " << input.limits.block_bytes << ", in slots "
      << input.limits.slot_block_bytes << ", pieces:";
  for (const Piece& piece : input.pieces) out << " " << piece.bytes << "@" << piece.memory;
  return out.str();
}

PlanCase one_piece(Direction direction, std::uint64_t offset, std::uint64_t bytes,
                   std::uint64_t address = page_address) {
  PlanCase input;
  input.direction = direction;
  input.offset = offset;
  input.limits = {.block_bytes = 1 * MiB, .slot_block_bytes = 256 * KiB};
  append_piece(input, address, bytes);
  return input;
}

Plan plan_of(const PlanCase& input) {
  return {input.direction, input.offset, input.pieces, input.rules, input.limits};
}

TEST(Plan, holds_its_promises_on_random_inputs) {
  std::mt19937_64 random(7);
  const auto pick = [&random](std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
  };
  for (int i = 0; i < 30'000; ++i) {
    const PlanCase input = make_plan_case(pick);
    ASSERT_EQ(check_plan(input), "") << describe(input);
  }
}

TEST(Plan, holds_its_promises_on_every_short_range_around_two_pages) {
  for (const Direction direction : both_directions) {
    for (const std::uint64_t misalignment : {0u, 1u, 512u}) {
      for (std::uint64_t offset = 0; offset <= 2 * page_bytes(); offset += 256) {
        for (std::uint64_t bytes = 0; bytes <= 2 * page_bytes() + 512; bytes += 256) {
          for (const std::uint64_t more : {0u, 1u}) {
            const PlanCase input =
                one_piece(direction, offset + more, bytes + more, page_address + misalignment);
            ASSERT_EQ(check_plan(input), "") << describe(input);
          }
        }
      }
    }
  }
}

TEST(Plan, holds_its_promises_at_the_borders_of_large_offsets) {
  for (const Direction direction : both_directions) {
    for (const std::uint64_t border : {2 * GiB, 4 * GiB, 8 * GiB, std::size_t{1} << 62}) {
      for (const std::uint64_t before : {0u, 1u, 511u, 512u, 4095u, 4096u, 1'048'576u}) {
        for (const std::uint64_t bytes : {1u, 512u, 4096u, 8193u, 3'000'000u}) {
          const PlanCase input = one_piece(direction, border - before, bytes);
          ASSERT_EQ(check_plan(input), "") << describe(input);
        }
      }
    }
  }
}

TEST(Plan, holds_its_promises_up_to_the_last_offset_there_is) {
  for (const Direction direction : both_directions) {
    for (const std::uint64_t bytes : {1u, 4095u, 4096u, 1'000'001u}) {
      const std::uint64_t end = (std::uint64_t{1} << 63) - 1;
      const PlanCase input = one_piece(direction, end - bytes, bytes);
      ASSERT_EQ(check_plan(input), "") << describe(input);
    }
  }
}

TEST(Plan, holds_its_promises_at_the_borders_of_large_lengths) {
  for (const Direction direction : both_directions) {
    for (const std::uint64_t border :
         {std::uint64_t{0x7ffff000}, std::uint64_t{2 * GiB}, std::uint64_t{4 * GiB}}) {
      for (const std::int64_t more : {-4096, -512, -1, 0, 1, 512, 4096}) {
        for (const std::uint64_t misalignment : {0u, 1u}) {
          const PlanCase input = one_piece(direction, 0, border + static_cast<std::uint64_t>(more),
                                           page_address + misalignment);
          ASSERT_EQ(check_plan(input), "") << describe(input);
        }
      }
    }
  }
}

TEST(Plan, of_nothing_has_no_blocks) {
  for (const Direction direction : both_directions) {
    for (const std::uint64_t offset : {0u, 1u, 4096u}) {
      PlanCase input = one_piece(direction, offset, 0);
      EXPECT_EQ(check_plan(input), "");
      append_piece(input, page_address, 0);
      EXPECT_EQ(check_plan(input), "");
      input.pieces.clear();
      EXPECT_EQ(check_plan(input), "");
      EXPECT_EQ(plan_of(input).block_count(), 0u);
    }
  }
}

TEST(Plan, moves_aligned_memory_in_place_in_blocks_of_the_limit) {
  for (const Direction direction : both_directions) {
    const PlanCase input = one_piece(direction, 1 * MiB, 10 * MiB + 4096);
    const Plan plan = plan_of(input);
    EXPECT_EQ(plan.block_count(), 11u);
    EXPECT_FALSE(plan.needs_slots());
    EXPECT_FALSE(plan.needs_buffered_descriptor());
    EXPECT_EQ(plan.block(3).memory, input.pieces[0].memory + 3 * MiB);
    EXPECT_EQ(plan.block(10).bytes, 4096u);
  }
}

TEST(Plan, gathers_several_pieces_in_one_request) {
  for (const Direction direction : both_directions) {
    PlanCase input = one_piece(direction, 0, 4096);
    for (std::uint64_t i = 1; i < 16; ++i) append_piece(input, page_address << 1, 4096);
    const Plan plan = plan_of(input);
    EXPECT_EQ(plan.block_count(), 1u);
    EXPECT_TRUE(plan.needs_slots());
    EXPECT_EQ(check_plan(input), "");
  }
}

TEST(Plan, writes_partly_written_pages_through_the_page_cache) {
  const PlanCase input = one_piece(Direction::write, 512, 3 * page_bytes(), page_address + 512);
  const Plan plan = plan_of(input);
  std::vector<std::pair<std::uint64_t, Descriptor>> blocks;
  for (std::uint64_t i = 0; i < plan.block_count(); ++i) {
    blocks.emplace_back(plan.block(i).offset, plan.block(i).descriptor);
  }
  const std::vector<std::pair<std::uint64_t, Descriptor>> expected{
      {512, Descriptor::buffered},
      {page_bytes(), Descriptor::direct},
      {3 * page_bytes(), Descriptor::buffered}};
  EXPECT_EQ(blocks, expected);
  EXPECT_FALSE(plan.needs_slots());
}

TEST(Plan, reads_an_unaligned_range_with_one_direct_request) {
  const PlanCase input = one_piece(Direction::read, 1000, 3000, page_address + 1);
  const Plan plan = plan_of(input);
  ASSERT_EQ(plan.block_count(), 1u);
  const Block block = plan.block(0);
  EXPECT_EQ(block.offset, 512u);
  EXPECT_EQ(block.bytes, 3584u);
  EXPECT_EQ(block.wanted_offset, 1000u);
  EXPECT_EQ(block.wanted_bytes, 3000u);
  EXPECT_EQ(block.descriptor, Descriptor::direct);
  EXPECT_EQ(block.memory, nullptr);
}

TEST(Plan, reads_the_middle_of_a_long_unaligned_range_in_place) {
  const PlanCase input = one_piece(Direction::read, 100, 3 * MiB, page_address + 100);
  const Plan plan = plan_of(input);
  ASSERT_EQ(plan.block_count(), 5u);
  EXPECT_EQ(plan.block(0).memory, nullptr);
  EXPECT_EQ(plan.block(0).wanted_bytes, 412u);
  EXPECT_EQ(plan.block(1).memory, input.pieces[0].memory + 412);
  EXPECT_EQ(plan.block(4).memory, nullptr);
  EXPECT_EQ(plan.block(4).wanted_bytes, 100u);
}

TEST(Plan, begins_later_requests_on_pages) {
  // In place, and through slots.
  for (const std::uint64_t address : {page_address + 512, page_address + 1}) {
    const PlanCase input = one_piece(Direction::read, 512, 3 * MiB, address);
    const Plan plan = plan_of(input);
    const std::uint64_t block_bytes = plan.needs_slots() ? 256 * KiB : 1 * MiB;
    ASSERT_EQ(plan.block_count(), 3 * MiB / block_bytes + 1);
    EXPECT_EQ(plan.block(0).bytes, block_bytes - 512);
    for (std::uint64_t i = 1; i < plan.block_count(); ++i) {
      EXPECT_EQ(plan.block(i).offset, i * block_bytes);
    }
    EXPECT_EQ(plan.block(plan.block_count() - 1).bytes, 512u);
    EXPECT_EQ(check_plan(input), "");
  }
}

TEST(Plan, costs_no_memory_or_time_for_an_enormous_range) {
  const PlanCase input = one_piece(Direction::read, 0, std::uint64_t{1} << 50);
  EXPECT_EQ(plan_of(input).block_count(), std::uint64_t{1} << 30);
  EXPECT_EQ(check_plan(input), "");
}

TEST(ForEachMemory, finds_the_memory_of_any_part_of_many_tiny_pieces) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    PlanCase input = one_piece(Direction::read, 12'345, random() % 3);
    std::vector<const std::byte*> places;
    for (std::uint64_t i = 2; i < 60; ++i) append_piece(input, i << 44, random() % 5);
    append_piece(input, 1, 1);
    for (const Piece& piece : input.pieces) {
      for (std::uint64_t at = 0; at < piece.bytes; ++at) places.push_back(piece.memory + at);
    }
    const Plan plan = plan_of(input);
    for (int part = 0; part < 50; ++part) {
      const std::uint64_t begin = random() % places.size();
      const std::uint64_t bytes = random() % (places.size() - begin + 1);
      std::vector<const std::byte*> visited;
      plan.for_each_memory(12'345 + begin, bytes, [&](const std::byte* memory, std::size_t count) {
        ASSERT_GT(count, 0u);
        for (std::size_t at = 0; at < count; ++at) visited.push_back(memory + at);
      });
      const auto first = places.begin() + static_cast<std::ptrdiff_t>(begin);
      ASSERT_EQ(visited,
                std::vector<const std::byte*>(first, first + static_cast<std::ptrdiff_t>(bytes)));
    }
  }
}

}  // namespace
}  // namespace tensorferry::handle
