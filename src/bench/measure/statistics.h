// Statistics of a list of measurements. Pure arithmetic.
#pragma once

#include <optional>
#include <span>

#include "bench/run/json.h"

namespace tensorferry::bench {

struct Interval {
  double low = 0;
  double high = 0;
};

struct Summary {
  double mean = 0;
  double median = 0;
  double standard_deviation = 0;  // of the sample (n - 1); 0 for one value
  // The 95 % confidence interval of the mean, by Student's t; none for one value.
  std::optional<Interval> ci95;
  // Percentiles, interpolated between neighbours.
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  std::optional<double> p999;  // only of 1,000 values or more
};

// Needs at least one value.
[[nodiscard]] Summary summarize(std::span<const double> values);

[[nodiscard]] Json to_json(const Summary& summary);

// A Student t variable is below this value with `probability` (between 0 and 1).
[[nodiscard]] double student_t_quantile(double probability, double degrees_of_freedom);

// Half the width of the 95 % confidence interval of the mean; infinite for fewer than two values.
[[nodiscard]] double ci95_half_width(std::span<const double> values);

[[nodiscard]] double mean_of(std::span<const double> values);
[[nodiscard]] double median_of(std::span<const double> values);

}  // namespace tensorferry::bench
