// Compares with values from tables and by hand; tests/command compares the command's figures with
// scipy.
#include "bench/measure/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

namespace tensorferry::bench {
namespace {

TEST(statistics, student_t_as_in_the_tables) {
  EXPECT_NEAR(student_t_quantile(0.975, 1), 12.706204736, 1e-8);
  EXPECT_NEAR(student_t_quantile(0.975, 4), 2.7764451052, 1e-9);
  EXPECT_NEAR(student_t_quantile(0.975, 199), 1.9719565442, 1e-9);
  EXPECT_NEAR(student_t_quantile(0.975, 1e6), 1.9599664, 1e-6);
  EXPECT_NEAR(student_t_quantile(0.025, 4), -2.7764451052, 1e-9);
  EXPECT_NEAR(student_t_quantile(0.5, 7), 0, 1e-9);
}

TEST(statistics, a_small_sample_by_hand) {
  const std::vector<double> values{4, 2, 8, 6};
  const Summary summary = summarize(values);
  EXPECT_DOUBLE_EQ(summary.mean, 5);
  EXPECT_DOUBLE_EQ(summary.median, 5);
  EXPECT_NEAR(summary.standard_deviation, std::sqrt(20.0 / 3), 1e-12);
  ASSERT_TRUE(summary.ci95);
  EXPECT_NEAR(summary.ci95->low, 5 - 3.1824463053 * std::sqrt(20.0 / 3) / 2, 1e-8);
  EXPECT_NEAR(summary.ci95->high, 5 + 3.1824463053 * std::sqrt(20.0 / 3) / 2, 1e-8);
  EXPECT_DOUBLE_EQ(summary.p90, 7.4);
  EXPECT_FALSE(summary.p999);
}

TEST(statistics, one_value_has_no_spread) {
  const std::vector<double> values{3};
  const Summary summary = summarize(values);
  EXPECT_EQ(summary.mean, 3);
  EXPECT_EQ(summary.standard_deviation, 0);
  EXPECT_FALSE(summary.ci95);
  EXPECT_EQ(summary.p99, 3);
  EXPECT_TRUE(std::isinf(ci95_half_width(values)));
}

TEST(statistics, a_thousand_values_have_a_p999) {
  std::vector<double> values(1001);
  std::iota(values.begin(), values.end(), 0.0);
  EXPECT_DOUBLE_EQ(summarize(values).p999.value_or(0), 999);
  values.resize(999);
  EXPECT_FALSE(summarize(values).p999);
}

}  // namespace
}  // namespace tensorferry::bench
