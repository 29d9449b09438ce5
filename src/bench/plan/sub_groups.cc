#include "bench/plan/sub_groups.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tensorferry::bench {

namespace {

constexpr double page = 4096;
// Each tensor of a shard begins at a page (optim/sub_groups.py).
constexpr double held_pages = 6 * page;
constexpr double scratch_pages = 4 * page;
constexpr double cut_elements = 4096;
constexpr double master_block = 16384;
constexpr double stored_elements = 512 * 4096;   // of a weight on the drive, in one piece
constexpr double packed_moment = 1 + 4.0 / 256;  // bytes: a code, and a scale for each 256

// Cuts weights into shards and collects them, as optim/sub_groups.py does.
class Cutter {
 public:
  Cutter(const Task& task, const Costs& costs, const Settings& settings, double processors_shared)
      : task_(task), costs_(costs), settings_(settings), shared_(processors_shared) {}

  void add(const Weight& weight) {
    const ElementBytes each = element_bytes(task_, settings_, weight.on_drive);
    const bool cuts = task_.precision == Precision::bf16 && !weight.on_drive;
    double most = stored_elements;
    if (!weight.on_drive) {
      const double room = settings_.buffer_bytes - held_pages - scratch_pages;
      most = std::floor(room / (each.held + each.scratch / settings_.buffer_count));
      const double unit = cuts && most >= master_block ? master_block : cut_elements;
      most = std::max(std::floor(most / unit), 1.0) * unit;
      // As few pieces as fit, all about as long.
      const double pieces = std::ceil(weight.elements / most);
      most = std::ceil(weight.elements / (pieces * unit)) * unit;
    }
    const double seconds = step_cost(task_, costs_, settings_, cuts) * shared_;
    double left = weight.elements;
    while (left > 0) {
      place(each, std::min(most, left), seconds);
      left -= most;
    }
  }

  [[nodiscard]] const std::vector<SubGroup>& groups() const { return groups_; }
  [[nodiscard]] double largest() const { return largest_; }

 private:
  // optim/step.py gives memory back after each sub-group that took some.
  [[nodiscard]] double taking_seconds() const {
    const bool takes = task_.optimizer == OptimizerKind::sgd || settings_.offload_gradients;
    return takes ? costs_.taking_seconds : 0;
  }

  void place(const ElementBytes& each, double elements, double seconds) {
    const double held = std::ceil(elements * each.held) + held_pages;
    const double scratch = std::ceil(elements * each.scratch) + scratch_pages;
    const double share = held + std::ceil(scratch / settings_.buffer_count);
    if (groups_.empty() || filled_ + share > settings_.buffer_bytes) {
      groups_.emplace_back();
      groups_.back().compute = (costs_.group_seconds + taking_seconds()) * shared_;
      filled_ = 0;
    }
    filled_ += share;
    largest_ = std::max(largest_, filled_);
    SubGroup& group = groups_.back();
    group.elements += elements;
    group.held += held;
    group.scratch += scratch;
    group.record += elements * (each.master + each.moments);
    group.read += elements * each.read;
    group.written += elements * each.written;
    group.compute += elements * seconds;
  }

  const Task& task_;
  const Costs& costs_;
  const Settings& settings_;
  double shared_;
  double filled_ = 0;
  double largest_ = 0;
  std::vector<SubGroup> groups_;
};

}  // namespace

double moment_count(OptimizerKind kind) { return kind == OptimizerKind::sgd ? 1 : 2; }

bool has_master(Precision precision) { return precision != Precision::fp32; }

std::vector<Weight> weights_of(const Task& task, double ranks, double share_on_drive) {
  std::vector<Weight> weights;
  double due = 0;
  double taken = 0;
  for (const Tensors& tensors : task.model.tensors) {
    // Of very many that are alike, fewer are looked at, each for several.
    const double count = std::min(tensors.count, simulated_max);
    const double elements = std::ceil(tensors.elements * tensors.count / count / ranks);
    for (int i = 0; i < count; ++i) {
      due += elements * share_on_drive;
      const bool on_drive = share_on_drive >= 1 || taken + elements / 2 <= due;
      taken += on_drive && share_on_drive > 0 ? elements : 0;
      weights.push_back({elements, on_drive && share_on_drive > 0});
    }
  }
  return weights;
}

double step_cost(const Task& task, const Costs& costs, const Settings& settings, bool cuts) {
  double seconds = task.optimizer == OptimizerKind::sgd ? costs.sgd_seconds : costs.adam_seconds;
  if (has_master(task.precision)) seconds += costs.master_seconds;
  if (cuts) seconds += costs.cut_seconds;
  if (settings.moments_in_8_bits) seconds += costs.pack_seconds;
  return seconds;
}

SubGroups cut(const std::vector<Weight>& weights, const Task& task, const Costs& costs,
              const Settings& settings, double processors_shared) {
  Cutter cutter(task, costs, settings, processors_shared);
  for (const Weight& weight : weights) cutter.add(weight);
  return {cutter.groups(), cutter.largest()};
}

ElementBytes element_bytes(const Task& task, const Settings& settings, bool weight_on_drive) {
  const double value = bytes_of(task.precision);
  const bool master = has_master(task.precision);
  const bool cuts = task.precision == Precision::bf16 && !weight_on_drive;
  const double size = 4;  // masters are in fp32, and so is what has none
  const double own = moment_count(task.optimizer);
  // Room is made for all that an optimizer of torch may have.
  const double most = task.optimizer == OptimizerKind::sgd ? 3 : own;
  const bool packs = settings.moments_in_8_bits;
  ElementBytes each;
  each.master = cuts ? 2 : master ? 4 : 0;
  each.moments = packs ? own * packed_moment : own * size;
  each.held = each.master + (packs ? each.moments : most * size);
  each.read = each.written = each.master + each.moments;
  if (settings.offload_gradients) {
    each.held += size;
    each.read += value;
  }
  if (weight_on_drive) {
    each.held += value;
    each.read += master ? 0 : value;  // the master has it
    each.written += value;
  }
  each.scratch = (cuts ? 4 : 0) + (packs ? own * size : 0);
  if (master && !settings.offload_gradients) each.scratch += size;
  return each;
}

}  // namespace tensorferry::bench
