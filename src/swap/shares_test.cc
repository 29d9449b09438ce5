#include "swap/shares.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "handle/handle_fixture.h"

namespace tensorferry::swap {
namespace {

using handle::Dice;

std::vector<std::size_t> all(std::size_t count) {
  std::vector<std::size_t> drives(count);
  std::iota(drives.begin(), drives.end(), std::size_t{0});
  return drives;
}

Shares shares_of(const std::vector<double>& speeds) {
  Shares shares(speeds.size());
  shares.set_speeds(speeds);
  return shares;
}

// What each drive gets of one tensor.
std::vector<std::uint64_t> cut(Shares& shares, std::uint64_t bytes, std::size_t drives) {
  std::vector<std::uint64_t> given(drives, 0);
  for (const Share& share : shares.cut(bytes, all(drives))) given[share.drive] += share.bytes;
  return given;
}

// Which part of many tensors the first drive gets.
template <class Size>
double first_part(Shares& shares, std::size_t drives, int tensors, Size size) {
  double first = 0;
  double total = 0;
  for (int i = 0; i < tensors; ++i) {
    const std::uint64_t bytes = size();
    first += static_cast<double>(cut(shares, bytes, drives).front());
    total += static_cast<double>(bytes);
  }
  return first / total;
}

using Bytes = std::vector<std::uint64_t>;

TEST(shares, a_large_tensor_is_cut_by_speed) {
  Shares equal(3);
  EXPECT_EQ(cut(equal, 9 * MiB, 3), (Bytes{3 * MiB, 3 * MiB, 3 * MiB}));
  Shares shares = shares_of({6e9, 2e9});
  EXPECT_EQ(cut(shares, 64 * MiB, 2), (Bytes{48 * MiB, 16 * MiB}));
}

TEST(shares, are_whole_pages_and_make_the_tensor_and_none_is_below_a_stripe) {
  Dice dice(1);
  for (int round = 0; round < 2000; ++round) {
    const std::size_t drives = 1 + dice.below(5);
    std::vector<double> speeds;
    for (std::size_t i = 0; i < drives; ++i)
      speeds.push_back(static_cast<double>(1 + dice.below(300)));
    Shares shares = shares_of(speeds);
    for (int tensor = 0; tensor < 4; ++tensor) {
      const std::uint64_t bytes = (1 + dice.below(64 * MiB / page_bytes())) * page_bytes();
      const std::vector<Share> found = shares.cut(bytes, all(drives));
      std::uint64_t sum = 0;
      for (const Share& share : found) {
        EXPECT_EQ(share.bytes % page_bytes(), 0U);
        // Rounding to pages may cost each stripe one.
        EXPECT_GE(share.bytes + drives * 64 * page_bytes(), std::min(bytes, stripe_bytes_min));
        sum += share.bytes;
      }
      EXPECT_EQ(sum, bytes);
      const bool small = bytes < 2 * stripe_bytes_min;
      EXPECT_TRUE(found.size() == 1 || !small) << "a small tensor is whole";
    }
  }
}

TEST(shares, small_tensors_take_turns_on_equal_drives) {
  Shares shares(2);
  for (int round = 0; round < 10; ++round) {
    EXPECT_EQ(cut(shares, 64 * KiB, 2), (Bytes{64 * KiB, 0}));
    EXPECT_EQ(cut(shares, 64 * KiB, 2), (Bytes{0, 64 * KiB}));
  }
}

TEST(shares, a_tensor_of_fewer_stripes_than_drives_lies_on_as_many_drives) {
  Shares shares(4);
  EXPECT_EQ(cut(shares, 2 * MiB, 4), (Bytes{MiB, MiB, 0, 0}));
  EXPECT_EQ(cut(shares, 2 * MiB, 4), (Bytes{0, 0, MiB, MiB}));
}

TEST(shares, small_tensors_are_spread_by_speed) {
  Dice dice(2);
  Shares shares = shares_of({3, 1});
  const auto size = [&dice] { return (1 + dice.below(255)) * 4 * KiB; };
  EXPECT_NEAR(first_part(shares, 2, 4000, size), 0.75, 0.01);
}

TEST(shares, tensors_that_leave_a_slow_drive_less_than_a_stripe_are_spread_by_speed) {
  for (const std::uint64_t bytes : {2 * MiB, 4 * MiB - 64 * KiB, 5 * MiB}) {
    Shares shares = shares_of({9, 1});
    EXPECT_NEAR(first_part(shares, 2, 1000, [bytes] { return bytes; }), 0.9, 0.01) << bytes;
  }
}

TEST(shares, a_far_slower_drive_gets_one_stripe_at_a_time) {
  Shares shares = shares_of({100, 1});
  for (int round = 0; round < 200; ++round) {
    EXPECT_LE(cut(shares, 16 * MiB, 2).back(), stripe_bytes_min);
  }
}

TEST(shares, large_tensors_change_nothing_for_small_ones) {
  Shares shares(2);
  EXPECT_EQ(cut(shares, 64 * KiB, 2), (Bytes{64 * KiB, 0}));
  EXPECT_EQ(cut(shares, 64 * MiB, 2), (Bytes{32 * MiB, 32 * MiB}));
  EXPECT_EQ(cut(shares, 64 * KiB, 2), (Bytes{0, 64 * KiB}));
}

// What was right at the old speeds is not made up for.
TEST(shares, new_speeds_count_from_now_on) {
  Shares shares(2);
  for (int i = 0; i < 1000; ++i) (void)cut(shares, 64 * MiB, 2);
  for (int i = 0; i < 1000; ++i) (void)cut(shares, 512 * KiB, 2);
  shares.set_speeds({3e9, 1e9});
  EXPECT_NEAR(first_part(shares, 2, 100, [] { return 512 * KiB; }), 0.75, 0.02);
  shares.set_speeds({1e3, 3e3});
  EXPECT_NEAR(first_part(shares, 2, 100, [] { return 512 * KiB; }), 0.25, 0.02);
}

TEST(shares, no_drive_is_left_out) {
  Shares shares = shares_of({1e-6, 1e9});
  EXPECT_NEAR(shares.part(0), 1.0 / 257, 1e-6);
  EXPECT_NEAR(first_part(shares, 2, 3000, [] { return MiB; }), 1.0 / 257, 0.001);
}

TEST(shares, drives_that_are_not_asked_get_nothing) {
  Shares shares = shares_of({4, 2, 1});
  const std::vector<std::size_t> others = {2, 0};
  const std::vector<Share> found = shares.cut(10 * MiB, others);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].drive, 2U);
  EXPECT_EQ(found[0].bytes, 2 * MiB);
  EXPECT_EQ(found[1].drive, 0U);
  EXPECT_EQ(found[1].bytes, 8 * MiB);
}

TEST(shares, of_nothing_are_none) {
  Shares shares(2);
  EXPECT_TRUE(shares.cut(0, all(2)).empty());
}

}  // namespace
}  // namespace tensorferry::swap
