#include "base/one_or_many.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>

namespace tensorferry {
namespace {

TEST(OneOrMany, keeps_the_order_of_any_number_of_elements) {
  for (const int count : {0, 1, 2, 3, 100}) {
    OneOrMany<int> list;
    for (int i = 0; i < count; ++i) EXPECT_EQ(list.push_back(i), i);
    ASSERT_EQ(list.size(), static_cast<std::size_t>(count));
    EXPECT_EQ(list.empty(), count == 0);
    EXPECT_EQ(std::accumulate(list.begin(), list.end(), 0), count * (count - 1) / 2);
    if (count > 0) {
      EXPECT_EQ(list.front(), 0);
      EXPECT_EQ(list.back(), count - 1);
      EXPECT_EQ(list[static_cast<std::size_t>(count / 2)], count / 2);
    }
  }
}

TEST(OneOrMany, elements_stay_in_place_if_their_number_was_reserved) {
  OneOrMany<int> list;
  list.reserve(3);
  const int* const first = &list.push_back(1);
  list.push_back(2);
  list.push_back(3);
  EXPECT_EQ(&list.front(), first);
}

TEST(OneOrMany, clear_destroys_the_elements) {
  for (const int count : {1, 2}) {
    const auto counted = std::make_shared<int>(0);
    OneOrMany<std::shared_ptr<int>> list;
    for (int i = 0; i < count; ++i) list.push_back(counted);
    EXPECT_EQ(counted.use_count(), count + 1);
    list.clear();
    EXPECT_EQ(counted.use_count(), 1);
    EXPECT_TRUE(list.empty());
  }
}

}  // namespace
}  // namespace tensorferry
