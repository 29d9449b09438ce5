#include "memory/slot_copy.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <vector>

#include "support/pattern.h"

namespace tensorferry::memory {
namespace {

// How many of `copies` go past the cache if each way has this cost.
int past_cache(SlotWay& way, int copies, double through, double past) {
  int count = 0;
  for (int i = 0; i < copies; ++i) {
    const Destination taken = way.next();
    count += taken == Destination::cold;
    way.took(taken, taken == Destination::cold ? past : through);
  }
  return count;
}

constexpr int rounds = 100;
constexpr int copies = rounds * static_cast<int>(SlotWay::trial_period);

TEST(SlotWay, goes_through_the_cache_but_for_trials) {
  SlotWay way;
  EXPECT_EQ(past_cache(way, copies, 0.09, 0.09), rounds);
}

TEST(SlotWay, does_not_leave_the_cache_for_a_little) {
  SlotWay way;
  EXPECT_EQ(past_cache(way, copies, 0.12, 0.09), rounds);
}

TEST(SlotWay, goes_past_a_cache_that_is_slow_and_comes_back) {
  SlotWay way;
  past_cache(way, copies, 0.09, 0.09);
  // After a few copies only trials go through the cache.
  EXPECT_GT(past_cache(way, copies, 0.30, 0.09), copies - rounds - 8);
  // Only trials notice the end of it: after some of them all is as before.
  past_cache(way, 8 * static_cast<int>(SlotWay::trial_period), 0.09, 0.09);
  EXPECT_EQ(past_cache(way, copies, 0.09, 0.09), rounds);
}

TEST(SlotWay, is_not_moved_by_one_copy_that_was_interrupted) {
  SlotWay way;
  past_cache(way, copies, 0.09, 0.09);
  way.took(Destination::any, 100);
  EXPECT_EQ(way.next(), Destination::any);
}

TEST(SlotWay, is_not_moved_by_first_copies_that_were_interrupted) {
  for (const Destination way_taken : {Destination::any, Destination::cold}) {
    SlotWay way;
    way.took(way_taken, 100);
    past_cache(way, 8 * static_cast<int>(SlotWay::trial_period), 0.09, 0.09);
    EXPECT_EQ(past_cache(way, copies, 0.09, 0.09), rounds);
    // Nor does it take longer to find the better way.
    EXPECT_GT(past_cache(way, copies, 0.30, 0.09), copies - rounds - 8);
  }
}

TEST(SlotCopy, copies_every_byte_whichever_way_it_goes) {
  const std::vector<std::byte> from = support::pattern(SlotCopy::timed_bytes_min + 4096 + 13, 0, 1);
  SlotCopy slot_copy;
  for (const std::size_t bytes : {std::size_t{1}, SlotCopy::timed_bytes_min - 1, from.size()}) {
    for (unsigned i = 0; i < 2 * SlotWay::trial_period; ++i) {
      std::vector<std::byte> slot(from.size() + 1, std::byte{0x5a});
      slot_copy(std::span(slot).first(bytes), std::span(from).first(bytes));
      ASSERT_EQ(support::pattern_fault(std::span(slot).first(bytes), 0, 1), "");
      ASSERT_EQ(slot[bytes], std::byte{0x5a});
    }
  }
}

}  // namespace
}  // namespace tensorferry::memory
