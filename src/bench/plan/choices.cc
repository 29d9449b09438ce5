#include "bench/plan/choices.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace tensorferry::bench {

namespace {

// What a plan leaves to the system and to what it does not know.
constexpr double memory_share = 0.9;
// A balance may take so much longer than the fastest.
constexpr double balance_share = 1.1;
constexpr double budget_least_bytes = 64 << 20;

class Chooser {
 public:
  Chooser(const Task& task, const Machine& machine, const Costs& costs, const Wishes& wishes)
      : task_(task), machine_(machine), costs_(costs), wishes_(wishes) {}

  std::vector<Choice> all() {
    for (const bool weights : options(wishes_.offload_weights, machine_.drives > 0)) {
      for (const bool gradients :
           options(wishes_.offload_gradients, task_.trains && machine_.drives > 0)) {
        Settings settings;
        settings.buffer_bytes = wishes_.buffer_bytes.value_or(settings.buffer_bytes);
        settings.buffer_count = wishes_.buffer_count.value_or(settings.buffer_count);
        settings.moments_in_8_bits = wishes_.moments_in_8_bits;
        settings.offload_weights = weights;
        settings.offload_gradients = gradients;
        settings.one_budget = weights && shares_budget();
        settings.offload_states = task_.trains && machine_.drives > 0;
        add_with_memory(settings);
      }
    }
    return std::move(found_);
  }

 private:
  // Whoever says how many states stay in memory has no budget to share.
  [[nodiscard]] bool shares_budget() const {
    return task_.trains && wishes_.one_budget && !wishes_.cpu_state_bytes &&
           !wishes_.gpu_state_bytes;
  }

  static std::vector<bool> options(const std::optional<bool>& wish, bool possible) {
    if (wish) return {*wish};
    return possible ? std::vector<bool>{false, true} : std::vector<bool>{false};
  }

  // Memory of the system and of the GPU that these settings leave.
  void add_with_memory(Settings settings) {
    settings.cpu_state_bytes = 0;
    settings.gpu_state_bytes = 0;
    settings.weight_bytes = wishes_.weight_bytes.value_or(least_weight_bytes());
    const Forecast bare = forecast(task_, machine_, costs_, settings);
    const double in_memory =
        machine_.memory_bytes * memory_share / machine_.ranks_per_node - bare.memory_bytes;
    const double on_gpu = machine_.gpu_memory_bytes * memory_share - bare.gpu_bytes;
    const double for_weights = machine_.has_gpu() ? on_gpu : in_memory;
    constexpr std::array shares{0.0, 0.5, 1.0};
    for (const double share : shares) {
      Settings own = settings;
      if (settings.offload_weights) {
        if (!wishes_.weight_bytes) own.weight_bytes += share * std::max(for_weights, 0.0);
        // Weights that all stay in memory need no drive.
        if (!wishes_.offload_weights && own.weight_bytes >= weight_bytes()) break;
      }
      if (task_.trains && !settings.one_budget) {
        own.cpu_state_bytes = wishes_.cpu_state_bytes.value_or(share * std::max(in_memory, 0.0));
        own.gpu_state_bytes = wishes_.gpu_state_bytes.value_or(share * std::max(on_gpu, 0.0));
        keep_no_more_than_all(own, bare);
      }
      found_.push_back({"", own, forecast(task_, machine_, costs_, own)});
      if (machine_.has_gpu() && own.gpu_state_bytes > 0 && !wishes_.gpu_state_bytes) {
        own.gpu_state_bytes = 0;  // in the memory of the system alone
        found_.push_back({"", own, forecast(task_, machine_, costs_, own)});
      }
    }
  }

  void keep_no_more_than_all(Settings& settings, const Forecast& bare) const {
    double states = 0;
    for (const Item& item : bare.items) {
      if (item.what == "masters" || item.what == "moments") states += item.drive;
    }
    states *= 1.001;  // pages
    if (!wishes_.gpu_state_bytes) {
      settings.gpu_state_bytes = std::min(settings.gpu_state_bytes, states);
    }
    if (!wishes_.cpu_state_bytes) {
      settings.cpu_state_bytes =
          std::min(settings.cpu_state_bytes, std::max(states - settings.gpu_state_bytes, 0.0));
    }
  }

  // All weights of a rank.
  [[nodiscard]] double weight_bytes() const {
    return task_.model.parameters() / machine_.ranks * bytes_of(task_.precision);
  }

  // Three of the largest: one in use, one on its way, one that goes. Of several ranks each has a
  // shard, and FSDP brings those of a layer together.
  [[nodiscard]] double least_weight_bytes() const {
    double largest = 0;
    for (const Tensors& one : task_.model.tensors) largest = std::max(largest, one.elements);
    if (machine_.ranks > 1 && task_.model.layers > 0) {
      largest = std::max(largest, task_.model.parameters() / task_.model.layers) / machine_.ranks;
    }
    const double bytes = 3 * largest * bytes_of(task_.precision);
    return std::max(std::ceil(bytes / budget_least_bytes) * budget_least_bytes, budget_least_bytes);
  }

  const Task& task_;
  const Machine& machine_;
  const Costs& costs_;
  const Wishes& wishes_;
  std::vector<Choice> found_;
};

// The memory that a choice takes: of the GPU and of the system.
double memory_of(const Choice& choice) {
  return choice.forecast.memory_bytes + choice.forecast.gpu_bytes;
}

double lacking(const Choice& choice) {
  double sum = 0;
  for (const Shortage& shortage : choice.forecast.shortages) {
    sum += shortage.needed_bytes / shortage.there_bytes - 1;
  }
  return sum;
}

double seconds_of(const Choice& choice) { return choice.forecast.seconds(); }

}  // namespace

std::vector<Choice> choose(const Task& task, const Machine& machine, const Costs& costs,
                           const Wishes& wishes) {
  std::vector<Choice> all = Chooser(task, machine, costs, wishes).all();
  std::vector<Choice> fitting;
  std::ranges::copy_if(all, std::back_inserter(fitting),
                       [](const Choice& choice) { return choice.forecast.fits(); });
  if (fitting.empty()) {
    Choice nearest = *std::ranges::min_element(all, {}, lacking);
    nearest.name = "nothing fits: lacks least";
    return {nearest};
  }
  // What is hardly slower and takes less is the better choice.
  const auto add = [&](std::vector<Choice>& to, const char* name, double slower) {
    const double best = seconds_of(*std::ranges::min_element(fitting, {}, seconds_of));
    const Choice* least = nullptr;
    for (const Choice& one : fitting) {
      if (seconds_of(one) > best * slower) continue;
      if (least == nullptr || memory_of(one) < memory_of(*least)) least = &one;
    }
    to.push_back(*least);
    to.back().name = name;
  };
  std::vector<Choice> chosen;
  add(chosen, "fastest", 1.001);
  add(chosen, "balance", balance_share);
  add(chosen, "least memory", INFINITY);
  return chosen;
}

namespace {

Change change(const char* what, const Task& task, const Machine& machine, const Costs& costs,
              const Wishes& wishes) {
  const Choice fastest = choose(task, machine, costs, wishes).front();
  if (!fastest.forecast.fits()) return {what, 0, 0};
  return {what, seconds_of(fastest), fastest.forecast.drive_days};
}

}  // namespace

std::vector<Change> changes(const Task& task, const Machine& machine, const Costs& costs,
                            const Wishes& wishes) {
  std::vector<Change> found;
  Machine other = machine;
  if (machine.drive.both > 0) {  // how fast it would be is known
    other.drives += 1;
    found.push_back(change("one more drive in each node", task, other, costs, wishes));
    other = machine;
  }
  other.memory_bytes *= 2;
  found.push_back(change("twice the memory", task, other, costs, wishes));
  if (machine.has_gpu()) {
    other = machine;
    other.gpu_memory_bytes *= 2;
    found.push_back(change("twice the memory of each GPU", task, other, costs, wishes));
  }
  const bool steps_adam = task.trains && task.optimizer != OptimizerKind::sgd;
  if (steps_adam && machine.drives > 0 && !wishes.moments_in_8_bits) {
    Wishes with = wishes;
    with.moments_in_8_bits = true;
    found.push_back(change("moments in 8 bits", task, machine, costs, with));
  }
  return found;
}

std::vector<WithDrives> by_drives(const Task& task, const Machine& machine, const Costs& costs,
                                  const Wishes& wishes) {
  std::vector<WithDrives> found;
  double drives = 1;
  while (drives <= std::max(2 * machine.drives, 8.0)) {
    Machine other = machine;
    other.drives = drives;
    const Choice fastest = choose(task, other, costs, wishes).front();
    const bool fits = fastest.forecast.fits();
    found.push_back({drives, fits ? seconds_of(fastest) : 0, fastest.forecast.drive_days});
    drives *= 2;
  }
  return found;
}

}  // namespace tensorferry::bench
