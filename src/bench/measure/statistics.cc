#include "bench/measure/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace tensorferry::bench {

namespace {

constexpr std::size_t p999_values_min = 1000;

// The continued fraction of the incomplete beta function, by Lentz's method.
double beta_fraction(double a, double b, double x) {
  constexpr double tiny = 1e-300;
  constexpr double precision = 1e-16;
  constexpr int steps_max = 10'000;
  const auto guarded = [](double value) { return std::abs(value) < tiny ? tiny : value; };
  double c = 1;
  double d = 1 / guarded(1 - (a + b) * x / (a + 1));
  double result = d;
  for (int m = 1; m < steps_max; ++m) {
    const auto step = [&](double numerator) {
      d = 1 / guarded(1 + numerator * d);
      c = guarded(1 + numerator / c);
      result *= c * d;
      return c * d;
    };
    step(m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)));
    const double factor = step(-(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)));
    if (std::abs(factor - 1) < precision) break;
  }
  return result;
}

// lgamma() writes to a global variable; this one does not.
double log_gamma(double x) {
  int sign = 0;
  return lgamma_r(x, &sign);
}

// The regularised incomplete beta function.
double incomplete_beta(double a, double b, double x) {
  if (x <= 0) return 0;
  if (x >= 1) return 1;
  const double front = std::exp(log_gamma(a + b) - log_gamma(a) - log_gamma(b) + a * std::log(x) +
                                b * std::log1p(-x));
  if (x < (a + 1) / (a + b + 2)) return front * beta_fraction(a, b, x) / a;
  return 1 - front * beta_fraction(b, a, 1 - x) / b;
}

// The probability that a Student t variable is above t >= 0.
double upper_tail(double t, double degrees) {
  return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2;
}

double percentile(std::span<const double> sorted, double share) {
  const double position = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (position - std::floor(position));
}

double deviation_of(std::span<const double> values, double mean) {
  if (values.size() < 2) return 0;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

}  // namespace

double student_t_quantile(double probability, double degrees_of_freedom) {
  if (probability < 0.5) return -student_t_quantile(1 - probability, degrees_of_freedom);
  const double tail = 1 - probability;
  double low = 0;
  double high = 1;
  while (upper_tail(high, degrees_of_freedom) > tail) high *= 2;
  for (int i = 0; i < 200 && high - low > 1e-14 * high; ++i) {
    const double middle = (low + high) / 2;
    (upper_tail(middle, degrees_of_freedom) > tail ? low : high) = middle;
  }
  return (low + high) / 2;
}

double mean_of(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double median_of(std::span<const double> values) {
  std::vector<double> sorted(values.begin(), values.end());
  std::ranges::sort(sorted);
  return percentile(sorted, 0.5);
}

double ci95_half_width(std::span<const double> values) {
  if (values.size() < 2) return std::numeric_limits<double>::infinity();
  const auto count = static_cast<double>(values.size());
  return student_t_quantile(0.975, count - 1) * deviation_of(values, mean_of(values)) /
         std::sqrt(count);
}

Summary summarize(std::span<const double> values) {
  std::vector<double> sorted(values.begin(), values.end());
  std::ranges::sort(sorted);
  Summary summary;
  summary.mean = mean_of(values);
  summary.median = percentile(sorted, 0.5);
  summary.standard_deviation = deviation_of(values, summary.mean);
  if (values.size() > 1) {
    const double half = ci95_half_width(values);
    summary.ci95 = Interval{.low = summary.mean - half, .high = summary.mean + half};
  }
  summary.p50 = summary.median;
  summary.p90 = percentile(sorted, 0.90);
  summary.p99 = percentile(sorted, 0.99);
  if (values.size() >= p999_values_min) summary.p999 = percentile(sorted, 0.999);
  return summary;
}

Json to_json(const Summary& summary) {
  Json json = {{"mean", summary.mean},
               {"median", summary.median},
               {"standard_deviation", summary.standard_deviation},
               {"p50", summary.p50},
               {"p90", summary.p90},
               {"p99", summary.p99}};
  if (summary.ci95) json["ci95"] = {summary.ci95->low, summary.ci95->high};
  if (summary.p999) json["p999"] = *summary.p999;
  return json;
}

}  // namespace tensorferry::bench
