#include "bench/plan/forecast.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "bench/plan/sub_groups.h"

namespace tensorferry::bench {

namespace {

constexpr double page = 4096;
// What is read ahead while weights are in use (offload/residency.py).
constexpr double ahead_share = 1.0 / 32;
constexpr double ahead_bytes = 32 << 20;
// Memory that activations on the drive pass through (offload.activations()).
constexpr double activation_buffers = 1 << 30;
constexpr double day_seconds = 24 * 60 * 60;

double page_up(double bytes) { return std::ceil(bytes / page) * page; }

Channel shared_by(const Channel& channel, double times, double ranks) {
  return {channel.read * times / ranks, channel.write * times / ranks,
          channel.both * times / ranks};
}

// Seconds that a channel takes for these bytes, if nothing else goes on.
double alone(const Channel& channel, double read, double written) {
  const double all = read + written;
  return all > 0 ? all / channel.rate(read / all) : 0;
}

// Gives this way to as many of the sub-groups on the drive as there is room for, spread evenly
// (_memory/spreading.py).
void spread(const std::vector<SubGroup>& groups, double room, Way way, std::vector<Way>& ways) {
  double total = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (ways[i] == Way::drive) total += groups[i].record;
  }
  const double share = total > 0 ? std::min(room / total, 1.0) : 0;
  double due = 0;
  double taken = 0;
  for (const bool evenly : {true, false}) {
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const double bytes = groups[i].record;
      if (ways[i] != Way::drive) continue;
      if (evenly) due += bytes * share;
      if (taken + bytes > room || (evenly && taken + bytes / 2 > due)) continue;
      ways[i] = way;
      taken += bytes;
    }
  }
}

// All that goes into a forecast, in the order in which it is found out.
class Forecaster {
 public:
  Forecaster(const Task& task, const Machine& machine, const Costs& costs, const Settings& settings)
      : task_(task), machine_(machine), costs_(costs), settings_(settings) {
    // Ranks on one machine share its drives, and without a GPU its processors.
    drive_ = shared_by(machine.drive, machine.drives, machine.ranks_per_node);
    copies_ = {costs.copy_read, costs.copy_write, costs.copy_both};
    if (machine.has_gpu()) {  // bytes on their way to a GPU cross the bus
      drive_.read = std::min(drive_.read, copies_.read);
      drive_.write = std::min(drive_.write, copies_.write);
      drive_.both = std::min(drive_.both, copies_.both);
    }
    processors_shared_ = machine.has_gpu() ? 1 : machine.ranks_per_node;
    value_bytes_ = bytes_of(task.precision);
    parameters_ = task.model.parameters() / machine.ranks;
    for (const Tensors& tensors : task.model.tensors) {
      largest_weight_ = std::max(largest_weight_, tensors.elements / machine.ranks * value_bytes_);
    }
    if (machine.ranks > 1 && task.model.layers > 0) {  // FSDP brings the shards of a layer together
      largest_weight_ = std::max(largest_weight_, parameters_ / task.model.layers * value_bytes_);
    }
  }

  Forecast finish() {
    split_weights();
    add_weights();
    if (task_.trains) add_step();
    add_pass();
    add_up();
    find_shortages();
    return std::move(result_);
  }

 private:
  [[nodiscard]] double& here(Item& item) const {
    return machine_.has_gpu() ? item.gpu : item.memory;
  }

  // Which weights are on the drive, and what they take in memory.
  void split_weights() {
    const double all = parameters_ * value_bytes_;
    weights_here_ = all;
    if (!settings_.offload_weights) return;
    const double room = settings_.weight_bytes;
    if (settings_.one_budget && all <= room) {
      state_room_ = room - all;
      return;
    }
    const double ahead = std::max(largest_weight_, std::min(room * ahead_share, ahead_bytes));
    if (settings_.one_budget) {
      const double passing = std::min(largest_weight_ + ahead, room);
      share_on_drive_ = 1 - (room - passing) / all;
      passing_ = passing;
      missing_bytes_ = share_on_drive_ * all;
    } else {
      share_on_drive_ = 1;
      passing_ = std::min(all, std::max(room, largest_weight_));
      const double moving = task_.trains ? largest_weight_ : largest_weight_ + ahead;
      missing_bytes_ = passing_ >= all ? 0 : all - std::max(passing_ - moving, 0.0);
    }
    weights_here_ = (1 - share_on_drive_) * all + passing_;
    weights_there_ = share_on_drive_ * all;
  }

  void add_weights() {
    Item weights{.what = "weights", .drive = weights_there_};
    here(weights) = weights_here_;
    result_.items.push_back(weights);
    if (!task_.trains) return;
    const double all = parameters_ * value_bytes_;
    Item gradients{.what = "gradients"};
    if (settings_.offload_gradients) {
      gradients.drive = all;
      here(gradients) = largest_weight_;  // the current one
    } else {
      here(gradients) = all;
    }
    result_.items.push_back(gradients);
    if (machine_.ranks > 1 && task_.model.layers > 0) {
      // FSDP has the layer in use and the next one, each as tensors and as the buffer that they
      // came in; and in the backward pass the gradients of one, both ways too.
      constexpr double copies = 6;
      Item gathered{.what = "gathered layers"};
      here(gathered) = copies * parameters_ * machine_.ranks / task_.model.layers * value_bytes_;
      result_.items.push_back(gathered);
    }
  }

  // States, buffers and the time of a step.
  void add_step() {
    // A part of a very large model stands for all of it.
    const double whole = std::max(parameters_ * 20 / settings_.buffer_bytes / simulated_max, 1.0);
    const auto [groups, largest] = cut(weights_of(task_, machine_.ranks * whole, share_on_drive_),
                                       task_, costs_, settings_, processors_shared_);
    result_.groups = static_cast<double>(groups.size()) * whole;
    double held = 0;
    double scratch = 0;
    double records = 0;
    for (const SubGroup& group : groups) {
      held = std::max(held, group.held);
      scratch = std::max(scratch, group.scratch);
      records += group.record;
    }
    if (!settings_.offload_states) {
      add_states_here();
      return;
    }
    const double buffer = page_up(std::max(
        {settings_.buffer_bytes, largest, std::ceil((held + scratch) / settings_.buffer_count)}));
    const double buffers = buffer * settings_.buffer_count;
    Item item{.what = "buffers"};
    here(item) = buffers;
    if (machine_.has_gpu()) item.memory = buffer;
    const double extra = element_bytes(task_, settings_, false).scratch > 0 ? scratch : 0;
    simulate_step(groups, records, buffers - extra, whole);
    result_.items.push_back(item);
  }

  // All in memory: an optimizer of torch.
  void add_states_here() {
    Item states{.what = "masters and moments"};
    const double fp32 = 4;
    const double copies = (has_master(task_.precision) ? 1 : 0) + moment_count(task_.optimizer);
    here(states) = parameters_ * copies * fp32;
    result_.items.push_back(states);
    for (const Tensors& tensors : task_.model.tensors) {
      result_.stepping_seconds += tensors.elements * tensors.count / machine_.ranks *
                                  step_cost(task_, costs_, settings_, false) * processors_shared_;
    }
    result_.step_seconds = result_.stepping_seconds;
  }

  // `whole` is how many times as large all of it is.
  void simulate_step(const std::vector<SubGroup>& groups, double records, double buffer_bytes,
                     double whole) {
    // A budget is one of the GPU, if there is one.
    const bool on_gpu = machine_.has_gpu();
    const double in_cpu = std::max(settings_.cpu_state_bytes, on_gpu ? 0 : state_room_);
    const double in_gpu = on_gpu ? std::max(settings_.gpu_state_bytes, state_room_) : 0;
    Pipeline pipeline{.loads_max = static_cast<unsigned>(settings_.buffer_count),
                      .buffer_bytes = buffer_bytes,
                      .start_seconds = costs_.operation_seconds,
                      .drive = drive_,
                      .copies = copies_};
    // As optim/kept.py: first in the memory of the device that steps, then in that of the system.
    std::vector<Way> ways(groups.size(), Way::drive);
    const double here_bytes = on_gpu ? in_gpu : in_cpu;
    spread(groups, here_bytes / whole, Way::in_place, ways);
    if (on_gpu) spread(groups, in_cpu / whole, Way::copies, ways);
    double kept_here = 0;
    double kept_there = 0;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const SubGroup& group = groups[i];
      Stage stage{.read_bytes = group.read,
                  .compute_seconds = group.compute,
                  .write_bytes = group.written,
                  .held_bytes = group.held};
      if (ways[i] == Way::in_place) {
        kept_here += group.record;
        stage.read_bytes -= group.record;
        stage.write_bytes -= group.record;
        if (stage.read_bytes < 1) stage.way = Way::in_place;
      } else if (ways[i] == Way::copies) {
        kept_there += group.record;
        stage.way = Way::copies;
      }
      if (stage.way == Way::drive) {
        result_.step_read += stage.read_bytes * whole;
        result_.step_written += stage.write_bytes * whole;
      } else if (stage.way == Way::copies) {
        copied_read_ += stage.read_bytes * whole;
        copied_written_ += stage.write_bytes * whole;
      }
      result_.stepping_seconds += stage.compute_seconds * whole;
      pipeline.stages.push_back(stage);
    }
    place_states(records * whole, kept_here * whole, kept_there * whole);
    result_.step = run(pipeline);
    result_.step_seconds = result_.step.seconds * whole;
  }

  void place_states(double records, double kept_here, double kept_there) {
    const ElementBytes in = element_bytes(task_, settings_, false);
    const ElementBytes on = element_bytes(task_, settings_, true);
    const double masters =
        parameters_ * ((1 - share_on_drive_) * in.master + share_on_drive_ * on.master);
    const double on_drive = records - kept_here - kept_there;
    for (const bool is_master : {true, false}) {
      const double bytes = is_master ? masters : records - masters;
      if (bytes < 1) continue;
      Item item{.what = is_master ? "masters" : "moments"};
      const double share = bytes / records;
      here(item) = kept_here * share;
      item.memory += kept_there * share;
      item.drive = on_drive * share;
      result_.items.push_back(item);
    }
  }

  // One pass, forward and backward, of which a step takes several; or one of inference.
  void add_pass() {
    const double passes = task_.trains ? std::max(task_.accumulation, 1.0) : 1;
    const double tokens =
        task_.trains ? task_.tokens_per_step / machine_.ranks / passes : task_.batch;
    add_activations(tokens);
    const double forward = 2 * task_.model.active_parameters() * tokens;
    const double recompute = task_.activations == Activations::recomputed ? forward : 0;
    double compute = task_.trains ? 3 * forward + recompute : forward;
    compute = machine_.flops > 0 ? compute / machine_.flops : 0;
    const double touched = task_.trains ? parameters_ : active_share(tokens) * parameters_;
    compute += touched * costs_.pass_seconds * processors_shared_ * (task_.trains ? 1.0 : 1.0 / 3);
    const double network = network_seconds();
    const Pipeline pipeline = pass_pipeline(tokens, compute, passes);
    result_.pass = run(pipeline);
    // The step begins while the last gradients are on their way to the drive, and waits for them.
    const double computed =
        result_.pass.timings.empty() ? 0 : result_.pass.timings.back().compute_end;
    result_.step_seconds += task_.trains ? result_.pass.seconds - computed : 0;
    // A GPU computes meanwhile; processors have to move the bytes themselves.
    result_.pass_seconds =
        passes * (machine_.has_gpu() ? std::max(computed, network) : computed + network);
    result_.compute_seconds = passes * result_.pass.compute_seconds;
    result_.network_seconds = passes * network;
    for (const Stage& stage : pipeline.stages) {
      result_.pass_read += passes * stage.read_bytes;
      result_.pass_written += passes * stage.write_bytes;
    }
  }

  // The share of the weights that a pass of so many tokens uses: experts that nobody chooses are
  // not read.
  [[nodiscard]] double active_share(double tokens) const {
    const Model& model = task_.model;
    if (model.experts < 1) return 1;
    const double idle = std::pow(1 - model.experts_chosen / model.experts, tokens);
    return 1 - idle * model.expert_parameters() / model.parameters();
  }

  [[nodiscard]] double network_seconds() const {
    if (machine_.network <= 0 || machine_.ranks <= 1) return 0;
    // FSDP gathers weights forward and backward, and scatters gradients.
    const double all = task_.model.parameters() * value_bytes_;
    const double ways = task_.trains ? 3 : 1;
    return ways * all * (machine_.ranks - 1) / machine_.ranks / machine_.network;
  }

  // Forward through all modules and back again.
  [[nodiscard]] Pipeline pass_pipeline(double tokens, double compute, double passes) const {
    double modules = 0;
    for (const Tensors& tensors : task_.model.tensors) modules += tensors.count;
    modules = std::max(modules, 1.0);
    const double simulated = std::min(modules, simulated_max);
    const double scale = modules / simulated;
    const double share = task_.trains ? 1 : active_share(tokens);
    const double calls = costs_.module_seconds * (share_on_drive_ > 0 ? 1 : 0.2) * scale;
    const double unit = parameters_ * value_bytes_ / simulated;
    const double missing = missing_bytes_ / std::max(unit, 1.0);  // units that are read
    // Activations have buffers of their own. The newest stay in half of them.
    const double saved = saved_bytes_ / simulated;
    const double stay = saved > 0 ? std::floor(activation_buffers / 2 / saved) : 0;
    Pipeline pipeline{
        .loads_max = 2,
        .buffer_bytes = std::max(passing_, 2 * unit) + (saved > 0 ? activation_buffers : 0),
        .start_seconds = costs_.operation_seconds,
        .drive = drive_,
        .copies = copies_};
    const auto add = [&](double i, bool is_read, bool backward, double of_compute) {
      Stage stage{.compute_seconds = compute * of_compute / simulated + calls, .held_bytes = unit};
      stage.read_bytes = is_read ? unit * share : 0;
      if (backward ? i >= stay : i < simulated - stay) {
        (backward ? stage.read_bytes : stage.write_bytes) += saved;
        stage.held_bytes += saved;
      }
      if (backward && settings_.offload_gradients) {
        stage.write_bytes += unit;
        stage.read_bytes += unit * (passes - 1) / passes;  // what has accumulated
        stage.compute_seconds += unit * costs_.gradient_byte_seconds * processors_shared_;
      }
      pipeline.stages.push_back(stage);
    };
    double due = 0;
    for (int i = 0; i < simulated; ++i) {
      if (task_.trains) {  // what backward used last is there: the first modules
        add(i, i >= simulated - missing, false, 1.0 / 3);
      } else {  // what stays is spread
        due += missing / simulated;
        add(i, due >= 0.5, false, 1);
        due -= due >= 0.5 ? 1 : 0;
      }
    }
    for (int i = 0; task_.trains && i < simulated; ++i) {
      add(i, i >= simulated - missing, true, 2.0 / 3);
    }
    return pipeline;
  }

  void add_activations(double tokens) {
    if (!task_.trains) return;
    const Model& model = task_.model;
    Item item{.what = "activations"};
    const double layer = model.hidden * value_bytes_;
    double bytes = task_.activation_bytes;
    // Of a layer: what its parts take and give, 17 values for each of its width.
    if (bytes == 0) bytes = 17 * layer * model.layers + model.vocabulary * (value_bytes_ + 4);
    if (task_.activations == Activations::recomputed) {
      bytes = layer * model.layers + 17 * layer + model.vocabulary * (value_bytes_ + 4);
    }
    if (task_.activations == Activations::drive) {
      saved_bytes_ = bytes * tokens;
      item.drive = std::max(saved_bytes_ - activation_buffers / 2, 0.0);
      item.memory = activation_buffers;
    } else {
      here(item) = bytes * tokens;
    }
    result_.items.push_back(item);
    if (!machine_.has_gpu() && costs_.working_bytes > 0) {
      result_.items.push_back({.what = "working memory", .memory = costs_.working_bytes});
    }
  }

  void add_up() {
    result_.memory_bytes = costs_.process_bytes;
    for (const Item& item : result_.items) {
      result_.gpu_bytes += item.gpu;
      result_.memory_bytes += item.memory;
      result_.drive_bytes += item.drive;
    }
    // Passes and steps come one after the other, so their reads and writes do not meet.
    result_.drive_seconds = alone(drive_, result_.step_read, result_.step_written) +
                            alone(drive_, result_.pass_read, result_.pass_written);
    result_.copy_seconds = alone(copies_, copied_read_, copied_written_);
    const double written = result_.step_written + result_.pass_written;
    const double compute = result_.compute_seconds + result_.stepping_seconds;
    const std::vector<std::pair<double, const char*>> all{{compute, "compute"},
                                                          {result_.drive_seconds, "drive"},
                                                          {result_.copy_seconds, "copies"},
                                                          {result_.network_seconds, "network"}};
    result_.limit = std::ranges::max_element(all)->second;
    const double seconds = result_.seconds();
    if (seconds <= 0) return;
    const double tokens = task_.trains ? task_.tokens_per_step : task_.batch * machine_.ranks;
    result_.tokens_per_second = tokens / seconds;
    if (written <= 0) return;
    result_.written_bytes_per_day =
        written * machine_.ranks_per_node / machine_.drives / seconds * day_seconds;
    result_.drive_days = machine_.endurance_bytes / result_.written_bytes_per_day;
  }

  void find_shortages() {
    const double ranks = machine_.ranks_per_node;
    check("memory of the GPU", result_.gpu_bytes, machine_.gpu_memory_bytes, &Item::gpu);
    check("memory of a node", result_.memory_bytes * ranks, machine_.memory_bytes, &Item::memory);
    check("room on the drives of a node", result_.drive_bytes * ranks,
          machine_.drive_bytes * machine_.drives, &Item::drive);
  }

  void check(const char* place, double needed, double there, double Item::* part) {
    if (there <= 0 || needed <= there) return;
    const auto most = std::ranges::max_element(result_.items, {}, part);
    result_.shortages.push_back({place, needed, there, most->what});
  }

  const Task& task_;
  const Machine& machine_;
  const Costs& costs_;
  const Settings& settings_;
  Forecast result_;
  Channel drive_;  // what one rank has of it
  Channel copies_;
  double processors_shared_ = 1;
  double value_bytes_ = 0;
  double parameters_ = 0;      // of a rank
  double largest_weight_ = 0;  // bytes
  double weights_here_ = 0;    // bytes in memory
  double weights_there_ = 0;   // bytes on the drive
  double share_on_drive_ = 0;
  double passing_ = 0;        // memory that weights on the drive pass through
  double missing_bytes_ = 0;  // that a pass reads, one way
  double state_room_ = 0;     // that a budget leaves for states
  double saved_bytes_ = 0;    // activations of a pass that the drive is to take
  double copied_read_ = 0;    // from memory of the system to a GPU
  double copied_written_ = 0;
};

}  // namespace

const char* to_string(Activations activations) noexcept {
  switch (activations) {
    case Activations::kept:
      return "kept";
    case Activations::recomputed:
      return "recomputed";
    case Activations::drive:
      return "drive";
  }
  return "";
}

double Machine::nodes() const { return std::ceil(ranks / ranks_per_node); }

Forecast forecast(const Task& task, const Machine& machine, const Costs& costs,
                  const Settings& settings) {
  return Forecaster(task, machine, costs, settings).finish();
}

}  // namespace tensorferry::bench
