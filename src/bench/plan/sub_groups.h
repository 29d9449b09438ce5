// The sub-groups that a step of the optimizer goes through: weights are cut into pieces, and pieces
// share buffers, as optim/sub_groups.py does it.
#pragma once

#include <vector>

#include "bench/plan/costs.h"
#include "bench/plan/forecast.h"

namespace tensorferry::bench {

// A weight of one rank.
struct Weight {
  double elements = 0;
  bool on_drive = false;
};

// The weights of one rank. Some are on the drive if they are offloaded, spread evenly.
[[nodiscard]] std::vector<Weight> weights_of(const Task& task, double ranks, double share_on_drive);

struct SubGroup {
  double elements = 0;
  double held = 0;  // of a buffer
  double scratch = 0;
  double record = 0;  // on the drive
  double read = 0;    // by a step
  double written = 0;
  double compute = 0;  // seconds
};

struct SubGroups {
  std::vector<SubGroup> groups;
  double largest = 0;  // bytes of a buffer that one of them needs
};

// `processors_shared` ranks compute on the same processors.
[[nodiscard]] SubGroups cut(const std::vector<Weight>& weights, const Task& task,
                            const Costs& costs, const Settings& settings, double processors_shared);

// Whether a step has copies of the weights in fp32.
[[nodiscard]] bool has_master(Precision precision);
[[nodiscard]] double moment_count(OptimizerKind kind);

// Seconds that a step computes for each parameter.
[[nodiscard]] double step_cost(const Task& task, const Costs& costs, const Settings& settings,
                               bool cuts);

// More sub-groups or modules than about these are not simulated one by one: they are all alike.
inline constexpr double simulated_max = 4096;

}  // namespace tensorferry::bench
