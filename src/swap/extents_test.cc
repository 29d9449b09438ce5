#include "swap/extents.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "swap/extents_model.h"

namespace tensorferry::swap {
namespace {

TEST(FreeExtents, the_smallest_hole_that_fits_is_taken) {
  FreeExtents extents;
  extents.grow(100);
  ASSERT_EQ(extents.take(10), 0);
  ASSERT_EQ(extents.take(20), 10);
  ASSERT_EQ(extents.take(5), 30);
  extents.give_back({10, 20});
  EXPECT_EQ(extents.take(18), 10);
  EXPECT_EQ(extents.take(66), std::nullopt);
  EXPECT_EQ(extents.take(65), 35);
}

TEST(FreeExtents, all_given_back_is_one_extent) {
  FreeExtents extents;
  extents.grow(64);
  extents.grow(64);
  for (int i = 0; i < 128; ++i) ASSERT_TRUE(extents.take(1));
  EXPECT_EQ(extents.take(1), std::nullopt);
  for (std::uint64_t i = 0; i < 128; i += 2) extents.give_back({i, 1});
  EXPECT_EQ(extents.count(), 64);
  for (std::uint64_t i = 1; i < 128; i += 2) extents.give_back({i, 1});
  EXPECT_EQ(extents.count(), 1);
  EXPECT_EQ(extents.free_tail_bytes(), 128);
  EXPECT_EQ(extents.take(128), 0);
}

TEST(FreeExtents, a_million_random_steps_agree_with_the_model) {
  for (unsigned seed = 0; seed < 1000; ++seed) {
    std::mt19937_64 dice(seed);
    const std::string fault = check_extents(
        [&dice](std::uint64_t low, std::uint64_t high) {
          return std::uniform_int_distribution<std::uint64_t>(low, high)(dice);
        },
        1000);
    ASSERT_EQ(fault, "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace tensorferry::swap
