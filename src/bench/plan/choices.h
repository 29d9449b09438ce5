// Which settings to take: the least memory, the fastest, a balance; and what more would bring.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/plan/forecast.h"

namespace tensorferry::bench {

// What the user has decided. Everything else is chosen.
struct Wishes {
  std::optional<double> buffer_bytes;
  std::optional<double> buffer_count;
  std::optional<double> cpu_state_bytes;
  std::optional<double> gpu_state_bytes;
  std::optional<double> weight_bytes;
  std::optional<bool> offload_gradients;
  std::optional<bool> offload_weights;
  bool moments_in_8_bits = false;
  bool one_budget = true;
};

struct Choice {
  std::string name;
  Settings settings;
  Forecast forecast;
};

// The fastest that fits, the one with the least memory of those within a tenth of it, and the one
// with the least memory of all; each only once. If nothing fits, the one that lacks least.
[[nodiscard]] std::vector<Choice> choose(const Task& task, const Machine& machine,
                                         const Costs& costs, const Wishes& wishes);

// The same task with something more.
struct Change {
  std::string what;    // "one more drive"
  double seconds = 0;  // of a step with its passes, at its fastest; 0: it does not fit
  double drive_days = 0;
};

[[nodiscard]] std::vector<Change> changes(const Task& task, const Machine& machine,
                                          const Costs& costs, const Wishes& wishes);

// A step with its passes, at its fastest, with so many drives in a node.
struct WithDrives {
  double drives = 0;
  double seconds = 0;
  double drive_days = 0;
};

[[nodiscard]] std::vector<WithDrives> by_drives(const Task& task, const Machine& machine,
                                                const Costs& costs, const Wishes& wishes);

}  // namespace tensorferry::bench
