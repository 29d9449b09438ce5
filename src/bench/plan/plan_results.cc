#include "bench/plan/plan_results.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <utility>

#include "tensorferry/error.h"

namespace tensorferry::bench {

namespace {

struct NamedCost {
  const char* name;
  double Costs::* value;
};

constexpr std::array all_costs{
    NamedCost{"adam_seconds", &Costs::adam_seconds},
    NamedCost{"sgd_seconds", &Costs::sgd_seconds},
    NamedCost{"master_seconds", &Costs::master_seconds},
    NamedCost{"cut_seconds", &Costs::cut_seconds},
    NamedCost{"pack_seconds", &Costs::pack_seconds},
    NamedCost{"group_seconds", &Costs::group_seconds},
    NamedCost{"taking_seconds", &Costs::taking_seconds},
    NamedCost{"operation_seconds", &Costs::operation_seconds},
    NamedCost{"pass_seconds", &Costs::pass_seconds},
    NamedCost{"module_seconds", &Costs::module_seconds},
    NamedCost{"gradient_byte_seconds", &Costs::gradient_byte_seconds},
    NamedCost{"copy_read", &Costs::copy_read},
    NamedCost{"copy_write", &Costs::copy_write},
    NamedCost{"copy_both", &Costs::copy_both},
    NamedCost{"process_bytes", &Costs::process_bytes},
    NamedCost{"working_bytes", &Costs::working_bytes},
};

// A timeline of so many stages at most: more are all alike.
constexpr std::size_t timeline_max = 64;

Json timeline(const Course& course) {
  Json stages = Json::array();
  for (std::size_t i = 0; i < std::min(course.timings.size(), timeline_max); ++i) {
    const Timing& one = course.timings[i];
    stages.push_back({{"read", {one.read_begin, one.read_end}},
                      {"compute", {one.compute_begin, one.compute_end}},
                      {"write", {one.compute_end, one.write_end}}});
  }
  return stages;
}

// What has more than 63 bits stays at that.
Json whole(double number) {
  return static_cast<std::uint64_t>(std::llround(std::min(number, 9e18)));
}

}  // namespace

Json to_json(const Task& task) {
  return {{"architecture", task.model.name},
          {"parameters", whole(task.model.parameters())},
          {"active_parameters", whole(task.model.active_parameters())},
          {"layers", task.model.layers},
          {"dtype", to_string(task.precision)},
          {"optimizer", task.trains ? to_string(task.optimizer) : "none"},
          {"tokens_per_step", task.tokens_per_step},
          {"accumulation", task.accumulation},
          {"batch", task.batch},
          {"activations", to_string(task.activations)}};
}

Json to_json(const Machine& machine) {
  return {{"ranks", machine.ranks},
          {"ranks_per_node", machine.ranks_per_node},
          {"drives", machine.drives},
          {"drive_read", machine.drive.read},
          {"drive_write", machine.drive.write},
          {"drive_both", machine.drive.both},
          {"drive_bytes", machine.drive_bytes},
          {"endurance_bytes", machine.endurance_bytes},
          {"memory_bytes", machine.memory_bytes},
          {"gpu_memory_bytes", machine.gpu_memory_bytes},
          {"flops", machine.flops},
          {"network", machine.network}};
}

Json to_json(const Costs& costs) {
  Json json;
  for (const NamedCost& one : all_costs) json[one.name] = costs.*one.value;
  return json;
}

Json to_json(const Settings& settings) {
  return {{"buffer_bytes", whole(settings.buffer_bytes)},
          {"buffer_count", whole(settings.buffer_count)},
          {"moments", settings.moments_in_8_bits ? "int8" : "fp32"},
          {"offload_states", settings.offload_states},
          {"offload_gradients", settings.offload_gradients},
          {"offload_weights", settings.offload_weights},
          {"one_budget", settings.one_budget},
          {"weight_bytes", whole(settings.weight_bytes)},
          {"max_cpu_bytes", whole(settings.cpu_state_bytes)},
          {"max_gpu_bytes", whole(settings.gpu_state_bytes)}};
}

Json to_json(const Choice& choice) {
  const Forecast& of = choice.forecast;
  Json places = Json::array();
  for (const Item& item : of.items) {
    places.push_back({{"what", item.what},
                      {"gpu_bytes", whole(item.gpu)},
                      {"memory_bytes", whole(item.memory)},
                      {"drive_bytes", whole(item.drive)}});
  }
  Json shortages = Json::array();
  for (const Shortage& one : of.shortages) {
    shortages.push_back({{"place", one.place},
                         {"needed_bytes", whole(one.needed_bytes)},
                         {"there_bytes", whole(one.there_bytes)},
                         {"holds", one.holds}});
  }
  Json json{{"name", choice.name},
            {"settings", to_json(choice.settings)},
            {"places", places},
            {"gpu_bytes", whole(of.gpu_bytes)},
            {"memory_bytes", whole(of.memory_bytes)},
            {"drive_bytes", whole(of.drive_bytes)},
            {"step_read_bytes", whole(of.step_read)},
            {"step_written_bytes", whole(of.step_written)},
            {"pass_read_bytes", whole(of.pass_read)},
            {"pass_written_bytes", whole(of.pass_written)},
            {"step_seconds", of.step_seconds},
            {"pass_seconds", of.pass_seconds},
            {"compute_seconds", of.compute_seconds},
            {"stepping_seconds", of.stepping_seconds},
            {"drive_seconds", of.drive_seconds},
            {"copy_seconds", of.copy_seconds},
            {"network_seconds", of.network_seconds},
            {"limit", of.limit},
            {"tokens_per_second", of.tokens_per_second},
            {"written_bytes_per_day", of.written_bytes_per_day},
            {"sub_groups", whole(of.groups)},
            {"shortages", shortages},
            {"step", timeline(of.step)},
            {"pass", timeline(of.pass)}};
  if (of.drive_days > 0) json["drive_days"] = of.drive_days;
  return json;
}

Json to_json(const Change& change) {
  Json json{{"what", change.what}, {"fits", change.seconds > 0}};
  if (change.seconds > 0) json["seconds"] = change.seconds;
  if (change.drive_days > 0) json["drive_days"] = change.drive_days;
  return json;
}

Json to_json(const WithDrives& with_drives) {
  Json json{{"drives", with_drives.drives}, {"fits", with_drives.seconds > 0}};
  if (with_drives.seconds > 0) json["seconds"] = with_drives.seconds;
  if (with_drives.drive_days > 0) json["drive_days"] = with_drives.drive_days;
  return json;
}

void take_costs(Costs& costs, const Json& json, const std::string& path) {
  const auto failure = [&path](const std::string& hint) {
    return Error({.operation = "read", .path = path, .code = EBADMSG, .hint = hint});
  };
  const Json& holder = json.is_object() && json.contains("check") ? json["check"] : json;
  const Json& members = holder.is_object() && holder.contains("costs") ? holder["costs"] : holder;
  if (!members.is_object()) throw failure("it must be an object with costs");
  for (const auto& [name, value] : members.items()) {
    const auto known = std::ranges::find_if(
        all_costs, [&key = name](const NamedCost& one) { return key == one.name; });
    if (known == all_costs.end()) throw failure(fmt::format("{} is no cost", name));
    const bool is_speed = name.starts_with("copy_");  // others are seconds and bytes
    if (!value.is_number() || value.get<double>() < 0 || (is_speed && value == 0)) {
      throw failure(
          fmt::format("{} must be a number {} 0", name, is_speed ? "of more than" : "of at least"));
    }
    costs.*known->value = value.get<double>();
  }
}

}  // namespace tensorferry::bench
