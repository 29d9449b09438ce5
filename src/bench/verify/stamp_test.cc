#include "bench/verify/stamp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <vector>

namespace tensorferry::bench {
namespace {

constexpr Stamp expected{.offset = 3 * stamped_block_bytes,
                         .generation = 7,
                         .seed = 42,
                         .file_bytes = 64 * stamped_block_bytes};

using Bytes = std::vector<std::byte>;

Bytes stamped(const Stamp& stamp) {
  Bytes block(stamped_block_bytes);
  write_stamp(block, stamp);
  return block;
}

Bytes stamped_with(std::uint64_t offset, std::uint64_t generation) {
  Stamp stamp = expected;
  stamp.offset = offset;
  stamp.generation = generation;
  return stamped(stamp);
}

TEST(stamp, a_block_as_it_was_written_is_sound) {
  EXPECT_FALSE(check_block(stamped(expected), expected));
  EXPECT_EQ(read_stamp(stamped(expected)), expected);
}

TEST(stamp, any_address_will_do) {
  Bytes memory(stamped_block_bytes + 1);
  const auto block = std::span(memory).subspan(1);
  write_stamp(block, expected);
  EXPECT_FALSE(check_block(block, expected));
}

TEST(stamp, any_single_flipped_bit_is_found_where_it_is) {
  Bytes block = stamped(expected);
  for (std::size_t bit = 0; bit < stamped_block_bytes * 8; ++bit) {
    const auto flip = std::byte(1U << (bit % 8));
    block[bit / 8] ^= flip;
    const auto bad = check_block(block, expected);
    ASSERT_TRUE(bad) << bit;
    ASSERT_EQ(bad->fault, Fault::flipped_bits) << bit;
    ASSERT_EQ(bad->offset, expected.offset + bit / 8);
    ASSERT_EQ(bad->length, 1U);
    block[bit / 8] ^= flip;
  }
}

TEST(stamp, a_block_of_another_offset_says_which) {
  const auto bad = check_block(stamped_with(20480, 7), expected);
  ASSERT_TRUE(bad);
  EXPECT_EQ(bad->fault, Fault::swapped_block);
  EXPECT_EQ(bad->offset, expected.offset);
  EXPECT_EQ(bad->length, stamped_block_bytes);
  EXPECT_NE(bad->explanation.find("offset 20480"), std::string::npos) << bad->explanation;
}

TEST(stamp, the_previous_generation_is_a_lost_write_and_an_older_one_is_stale) {
  const auto lost = check_block(stamped_with(expected.offset, 6), expected);
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->fault, Fault::lost_write);
  const auto stale = check_block(stamped_with(expected.offset, 5), expected);
  ASSERT_TRUE(stale);
  EXPECT_EQ(stale->fault, Fault::stale_block);
  EXPECT_NE(stale->explanation.find("generation 5"), std::string::npos) << stale->explanation;
}

TEST(stamp, zeros_are_a_lost_write) {
  const auto bad = check_block(Bytes(stamped_block_bytes), expected);
  ASSERT_TRUE(bad);
  EXPECT_EQ(bad->fault, Fault::lost_write);
  EXPECT_EQ(bad->offset, expected.offset);
  EXPECT_EQ(bad->length, stamped_block_bytes);
}

TEST(stamp, a_write_that_was_lost_in_part_is_told_with_its_range) {
  const Bytes previous = stamped_with(expected.offset, 6);
  for (const auto& [first, end] :
       {std::pair<std::size_t, std::size_t>{0, 512}, {512, 4096}, {1001, 2003}, {2048, 4096}}) {
    Bytes torn = stamped(expected);
    std::copy(previous.begin() + static_cast<std::ptrdiff_t>(first),
              previous.begin() + static_cast<std::ptrdiff_t>(end),
              torn.begin() + static_cast<std::ptrdiff_t>(first));
    const auto bad = check_block(torn, expected);
    ASSERT_TRUE(bad);
    EXPECT_EQ(bad->fault, Fault::lost_write) << first;
    EXPECT_GE(bad->offset, expected.offset + first);
    EXPECT_LE(bad->offset + bad->length, expected.offset + end);

    std::fill(torn.begin() + static_cast<std::ptrdiff_t>(first),
              torn.begin() + static_cast<std::ptrdiff_t>(end), std::byte{0});
    const auto zeroed = check_block(torn, expected);
    ASSERT_TRUE(zeroed);
    EXPECT_EQ(zeroed->fault, Fault::lost_write) << first;
  }
}

TEST(stamp, other_bytes_are_foreign) {
  std::mt19937 random(1);
  Bytes noise(stamped_block_bytes);
  std::ranges::generate(noise, [&] { return std::byte(random()); });
  const auto bad = check_block(noise, expected);
  ASSERT_TRUE(bad);
  EXPECT_EQ(bad->fault, Fault::foreign_data);
  EXPECT_EQ(bad->offset, expected.offset);

  Stamp other_run = expected;
  other_run.seed = 43;
  const auto other = check_block(stamped(other_run), expected);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->fault, Fault::foreign_data);
  EXPECT_NE(other->explanation.find("seed 43"), std::string::npos);

  const auto newer = check_block(stamped_with(expected.offset, 8), expected);
  ASSERT_TRUE(newer);
  EXPECT_EQ(newer->fault, Fault::foreign_data);
}

}  // namespace
}  // namespace tensorferry::bench
