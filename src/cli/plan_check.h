// `tensorferry plan --check`: what the parts of a plan cost on this machine.
#pragma once

#include <string>

#include "bench/plan/costs.h"
#include "bench/plan/forecast.h"
#include "bench/run/json.h"

namespace tensorferry::cli {

// What was measured.
struct Checked {
  bench::Channel drive;
  double flops = 0;
  bench::Costs costs;
  bench::Json json;  // as the Python package has written it
};

// Measures the drive of a directory, copies, and the computation of a step and of a pass, in about
// half a minute. Throws std::runtime_error with what the Python package said if it fails.
[[nodiscard]] Checked check_machine(const std::string& directory, bench::Precision precision,
                                    bool on_gpu, const bench::Costs& otherwise);

// What the plan took for each cost, and what was measured.
[[nodiscard]] std::string check_table(const bench::Machine& planned, const bench::Costs& costs,
                                      const Checked& checked);

}  // namespace tensorferry::cli
