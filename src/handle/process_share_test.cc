#include "handle/process_share.h"

#include <gtest/gtest.h>

#include <vector>

namespace tensorferry::handle {
namespace {

TEST(ProcessShare, late_crews_get_less_and_never_nothing) {
  ProcessLimits limits(10, 1000);
  std::vector<ProcessShare> shares;
  for (int i = 0; i < 4; ++i) shares.emplace_back(limits, 4U, 1U, 300U, 10U);
  EXPECT_EQ(shares[0].workers(), 4U);
  EXPECT_EQ(shares[1].workers(), 4U);
  EXPECT_EQ(shares[2].workers(), 2U);
  EXPECT_EQ(shares[3].workers(), 1U);
  EXPECT_EQ(shares[2].slot_bytes(), 300U);
  EXPECT_EQ(shares[3].slot_bytes(), 100U);
  const ProcessShare last(limits, 4U, 1U, 300U, 10U);
  EXPECT_EQ(last.slot_bytes(), 10U);
}

TEST(ProcessShare, what_ends_is_there_for_others) {
  ProcessLimits limits(4, 1000);
  {
    const ProcessShare all(limits, 4U, 1U, 1000U, 10U);
    EXPECT_EQ(ProcessShare(limits, 4U, 1U, 1000U, 10U).workers(), 1U);
  }
  const ProcessShare again(limits, 4U, 1U, 1000U, 10U);
  EXPECT_EQ(again.workers(), 4U);
  EXPECT_EQ(again.slot_bytes(), 1000U);
}

TEST(ProcessShare, what_a_user_chose_is_granted_in_full) {
  ProcessLimits limits(4, 1000);
  const ProcessShare all(limits, 4U, 1U, 1000U, 10U);
  const ProcessShare chosen(limits, 8U, 8U, 2000U, 2000U);
  EXPECT_EQ(chosen.workers(), 8U);
  EXPECT_EQ(chosen.slot_bytes(), 2000U);
}

}  // namespace
}  // namespace tensorferry::handle
