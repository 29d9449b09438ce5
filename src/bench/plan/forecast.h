// What a step of training, or a pass, takes and costs on a machine: `tensorferry plan`.
//
// Pure functions over measured costs (costs.h). They follow what the package does: see
// optim/sub_groups.py for the bytes of each parameter and how they are cut, optim/kept.py for
// states that stay in memory, offload/split.py and residency.py for weights that do. docs/plan.md
// explains it, and has what was measured beside what this says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/plan/architecture.h"
#include "bench/plan/costs.h"
#include "bench/plan/pipeline.h"

namespace tensorferry::bench {

enum class Activations : std::uint8_t { kept, recomputed, drive };
[[nodiscard]] const char* to_string(Activations activations) noexcept;

// What is to be done.
struct Task {
  Model model;
  Precision precision = Precision::bf16;
  OptimizerKind optimizer = OptimizerKind::adamw;
  bool trains = true;
  double tokens_per_step = 0;  // of all ranks
  double accumulation = 1;     // passes for each step
  double batch = 1;            // sequences that inference continues at once
  Activations activations = Activations::kept;
  double activation_bytes = 0;  // for each token, of all layers; 0: as transformers' are
};

// What there is. Nodes are alike; ranks are spread over them.
struct Machine {
  double ranks = 1;
  double ranks_per_node = 1;
  double drives = 1;            // of a node
  Channel drive;                // each of them
  double drive_bytes = 0;       // free, on each; 0: unknown
  double endurance_bytes = 0;   // that each may be written in its life; 0: unknown
  double memory_bytes = 0;      // of a node; 0: unknown
  double gpu_memory_bytes = 0;  // of each rank; 0: there is no GPU
  double flops = 0;             // of each rank, as they are reached; 0: unknown
  double network = 0;           // bytes per second of each rank; 0: not counted

  [[nodiscard]] bool has_gpu() const { return gpu_memory_bytes > 0; }
  [[nodiscard]] double nodes() const;
};

// What the package is told.
struct Settings {
  double buffer_bytes = 64 << 20;
  double buffer_count = 4;
  bool moments_in_8_bits = false;
  bool offload_gradients = false;
  bool offload_weights = false;
  bool offload_states = true;
  double weight_bytes = 1 << 30;  // memory for weights that are on the drive (of the GPU, if any)
  double cpu_state_bytes = 0;     // max_cpu_bytes of the optimizer
  double gpu_state_bytes = 0;     // max_gpu_bytes
  bool one_budget = false;        // weight_bytes is a MemoryBudget for weights and states
};

// Bytes of one rank, by place.
struct Item {
  std::string what;
  double gpu = 0;
  double memory = 0;
  double drive = 0;
};

// Something does not fit.
struct Shortage {
  std::string place;  // "memory of a node"
  double needed_bytes = 0;
  double there_bytes = 0;
  std::string holds;  // what of it takes most
};

struct Forecast {
  std::vector<Item> items;
  double gpu_bytes = 0;     // of a rank
  double memory_bytes = 0;  // of a rank, with its process
  double drive_bytes = 0;   // of a rank

  // Of one rank: in a step of the optimizer, and in the passes for it.
  double step_read = 0;
  double step_written = 0;
  double pass_read = 0;
  double pass_written = 0;

  double pass_seconds = 0;  // all passes of a step
  double step_seconds = 0;
  [[nodiscard]] double seconds() const { return pass_seconds + step_seconds; }

  // How long each would take alone.
  double compute_seconds = 0;   // of passes
  double stepping_seconds = 0;  // the computation of the step
  double drive_seconds = 0;
  double copy_seconds = 0;
  double network_seconds = 0;
  std::string limit;  // of the whole: "compute", "drive", "copies", "network"

  double tokens_per_second = 0;      // of all ranks
  double written_bytes_per_day = 0;  // by each drive
  double drive_days = 0;             // until it has taken what it is rated for; 0: unknown

  double groups = 0;  // sub-groups of a rank
  Course step;        // of its sub-groups: those that are simulated
  Course pass;        // the stages of the first pass
  std::vector<Shortage> shortages;
  [[nodiscard]] bool fits() const { return shortages.empty(); }
};

[[nodiscard]] Forecast forecast(const Task& task, const Machine& machine, const Costs& costs,
                                const Settings& settings);

// Bytes on the drive for each parameter that is stepped: its states.
struct ElementBytes {
  double master = 0;
  double moments = 0;
  double held = 0;     // in a buffer, as sub-groups are cut
  double scratch = 0;  // only while it is computed
  double read = 0;     // by a step: states, and values and a gradient that are on the drive
  double written = 0;
};
[[nodiscard]] ElementBytes element_bytes(const Task& task, const Settings& settings,
                                         bool weight_on_drive);

}  // namespace tensorferry::bench
