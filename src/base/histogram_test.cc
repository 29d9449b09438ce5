#include "base/histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace tensorferry {
namespace {

constexpr double tolerance = 0.032;
constexpr double shares[] = {0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0};

// At least the exact percentile, and above it by at most the tolerance.
void expect_percentiles_of(std::vector<std::uint64_t> values) {
  const auto histogram = std::make_unique<Histogram>();
  for (const std::uint64_t value : values) histogram->record(value);
  std::sort(values.begin(), values.end());
  EXPECT_EQ(histogram->max(), values.back());
  for (const double share : shares) {
    const auto rank = static_cast<std::size_t>(share * static_cast<double>(values.size() - 1));
    const std::uint64_t exact = values[rank];
    const std::uint64_t given = histogram->percentile(share);
    EXPECT_GE(given, exact) << share;
    EXPECT_LE(static_cast<double>(given - exact), tolerance * static_cast<double>(exact)) << share;
  }
}

TEST(Histogram, without_values_is_all_zero) {
  const auto histogram = std::make_unique<Histogram>();
  EXPECT_EQ(histogram->max(), 0u);
  for (const double share : shares) EXPECT_EQ(histogram->percentile(share), 0u);
}

TEST(Histogram, of_one_value_is_that_value) {
  for (const std::uint64_t value : {0u, 1u, 31u, 32u, 33u, 1000u, 4'000'000'000u}) {
    const auto histogram = std::make_unique<Histogram>();
    histogram->record(value);
    for (const double share : shares) EXPECT_EQ(histogram->percentile(share), value);
  }
}

TEST(Histogram, is_exact_below_64) {
  const auto histogram = std::make_unique<Histogram>();
  for (std::uint64_t value = 0; value < 64; ++value) histogram->record(value);
  for (std::uint64_t value = 0; value < 64; ++value) {
    // Half a rank more, so that rounding cannot fall below it.
    EXPECT_EQ(histogram->percentile((static_cast<double>(value) + 0.5) / 63.5), value);
  }
}

TEST(Histogram, percentiles_are_within_3_percent_on_uniform_values) {
  std::mt19937_64 random(1);
  for (const std::uint64_t limit : {100ull, 10'000ull, 123'456'789ull, 1ull << 40}) {
    std::uniform_int_distribution<std::uint64_t> value(0, limit);
    std::vector<std::uint64_t> values(20'000);
    for (std::uint64_t& one : values) one = value(random);
    expect_percentiles_of(std::move(values));
  }
}

TEST(Histogram, percentiles_are_within_3_percent_over_all_magnitudes) {
  std::mt19937_64 random(2);
  std::vector<std::uint64_t> values(50'000);
  for (std::uint64_t& one : values) one = random() >> (random() % 64);
  expect_percentiles_of(std::move(values));
}

TEST(Histogram, percentiles_are_within_3_percent_on_latencies) {
  std::mt19937_64 random(3);
  std::lognormal_distribution<double> latency_ns(std::log(80e3), 1.0);
  std::vector<std::uint64_t> values(50'000);
  for (std::uint64_t& one : values) one = static_cast<std::uint64_t>(latency_ns(random));
  expect_percentiles_of(std::move(values));
}

TEST(Histogram, keeps_powers_of_two_and_their_neighbours_apart_from_the_rest) {
  for (unsigned bit = 6; bit < 64; ++bit) {
    const std::uint64_t power = std::uint64_t{1} << bit;
    expect_percentiles_of({power - 1, power, power + 1});
  }
}

TEST(Histogram, takes_the_largest_value_there_is) {
  constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();
  const auto histogram = std::make_unique<Histogram>();
  histogram->record(largest);
  histogram->record(1);
  EXPECT_EQ(histogram->max(), largest);
  EXPECT_EQ(histogram->percentile(0.0), 1u);
  EXPECT_EQ(histogram->percentile(1.0), largest);
}

TEST(Histogram, never_exceeds_the_largest_value_recorded) {
  const auto histogram = std::make_unique<Histogram>();
  histogram->record(1'000'001);
  histogram->record(1'000'000);
  EXPECT_EQ(histogram->percentile(1.0), 1'000'001u);
}

TEST(Histogram, loses_nothing_between_threads) {
  const auto histogram = std::make_unique<Histogram>();
  constexpr std::uint64_t each = 20'000;
  {
    std::vector<std::jthread> threads;
    threads.reserve(4);
    for (std::uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&histogram, thread] {
        for (std::uint64_t i = 0; i < each; ++i) histogram->record(thread);
      });
    }
  }
  EXPECT_EQ(histogram->max(), 3u);
  // Four equal parts: each quarter ends in its own value.
  for (std::uint64_t thread = 0; thread < 4; ++thread) {
    EXPECT_EQ(histogram->percentile((static_cast<double>(thread) + 0.001) / 4), thread);
    EXPECT_EQ(histogram->percentile((static_cast<double>(thread) + 0.999) / 4), thread);
  }
}

}  // namespace
}  // namespace tensorferry
