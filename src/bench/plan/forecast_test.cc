// The formulas of docs/offload.md, and what must hold of any plan.
#include "bench/plan/forecast.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "bench/plan/choices.h"

namespace tensorferry::bench {
namespace {

constexpr double gigabyte = 1e9;

Task task_of(Precision precision, double parameters = 1e9) {
  Task task;
  task.model = model_of(parameters, 0);
  task.precision = precision;
  task.tokens_per_step = 1024;
  return task;
}

Machine machine_of() {
  Machine machine;
  machine.drive = {4 * gigabyte, 2 * gigabyte, 3 * gigabyte};
  machine.memory_bytes = 64 * gigabyte;
  machine.flops = 1e12;
  return machine;
}

double bytes_of_step(Precision precision, const Settings& settings) {
  const Task task = task_of(precision);
  const Forecast plan = forecast(task, machine_of(), {}, settings);
  return plan.step_written / task.model.parameters();
}

TEST(forecast, each_form_moves_the_bytes_that_the_documents_say) {
  EXPECT_NEAR(bytes_of_step(Precision::fp32, {}), 8, 0.01);
  EXPECT_NEAR(bytes_of_step(Precision::bf16, {}), 10, 0.01);
  EXPECT_NEAR(bytes_of_step(Precision::fp16, {}), 12, 0.01);
  EXPECT_NEAR(bytes_of_step(Precision::fp32, {.moments_in_8_bits = true}), 2.03, 0.01);
  EXPECT_NEAR(bytes_of_step(Precision::bf16, {.moments_in_8_bits = true}), 4.03, 0.01);
  EXPECT_NEAR(bytes_of_step(Precision::fp16, {.moments_in_8_bits = true}), 6.03, 0.01);
  // Whole masters and the weights themselves.
  EXPECT_NEAR(bytes_of_step(Precision::bf16, {.offload_weights = true}), 14, 0.01);
}

TEST(forecast, gradients_on_the_drive_are_written_once_and_read_once) {
  const Task task = task_of(Precision::bf16);
  const Forecast plan = forecast(task, machine_of(), {}, {.offload_gradients = true});
  const double bytes = 2 * task.model.parameters();
  EXPECT_NEAR(plan.pass_written, bytes, bytes * 0.01);
  EXPECT_NEAR(plan.step_read - plan.step_written, bytes, bytes * 0.01);
}

TEST(forecast, states_that_stay_do_not_move) {
  const Task task = task_of(Precision::fp32);
  const Forecast none = forecast(task, machine_of(), {}, {});
  const Forecast half = forecast(task, machine_of(), {}, {.cpu_state_bytes = 4 * gigabyte});
  const Forecast all = forecast(task, machine_of(), {}, {.cpu_state_bytes = 9 * gigabyte});
  EXPECT_NEAR(half.step_read / none.step_read, 0.5, 0.02);
  EXPECT_EQ(all.step_read, 0);
  EXPECT_LT(half.step_seconds, none.step_seconds);
  EXPECT_NEAR(all.memory_bytes - none.memory_bytes, 8 * gigabyte, 0.05 * gigabyte);
}

TEST(forecast, a_step_takes_at_least_the_drive_and_at_least_its_computation) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> share(0, 1);
  const auto number = [&random](double most) {
    return std::floor(1 + std::uniform_real_distribution<double>(0, most)(random));
  };
  for (int i = 0; i < 300; ++i) {
    const auto precision = static_cast<Precision>(random() % 3);
    Task task = task_of(precision, 1e6 * std::pow(1e4, share(random)));
    Machine machine = machine_of();
    machine.drive.both = 2 / (1 / machine.drive.read + 1 / machine.drive.write);
    machine.drives = number(8);
    machine.ranks = machine.ranks_per_node = number(8);
    Settings settings;
    settings.buffer_bytes = number(256) * (1 << 20);
    settings.buffer_count = number(8);
    settings.moments_in_8_bits = random() % 2 == 0;
    settings.offload_gradients = random() % 2 == 0;
    settings.cpu_state_bytes = share(random) * 10 * gigabyte;
    const Forecast plan = forecast(task, machine, {}, settings);
    const double rank = machine.drives / machine.ranks;
    const double drive =
        (plan.step_read / machine.drive.read + plan.step_written / machine.drive.write) / rank;
    EXPECT_GE(plan.step_seconds, drive * 0.99) << i;
    EXPECT_GE(plan.step_seconds, plan.stepping_seconds * 0.99) << i;
    EXPECT_GT(plan.memory_bytes, 0) << i;
    Machine faster = machine;
    faster.drives += 1;
    EXPECT_LE(forecast(task, faster, {}, settings).step_seconds, plan.step_seconds * 1.001) << i;
  }
}

TEST(forecast, weights_on_the_drive_are_read_there_and_back) {
  const Task task = task_of(Precision::bf16);
  const double weights = 2 * task.model.parameters();
  const Settings little{.offload_weights = true, .weight_bytes = 0.1 * gigabyte};
  EXPECT_NEAR(forecast(task, machine_of(), {}, little).pass_read, 2 * weights, 0.2 * weights);
  const Settings all{.offload_weights = true, .weight_bytes = 3 * gigabyte, .one_budget = true};
  const Forecast plan = forecast(task, machine_of(), {}, all);
  EXPECT_EQ(plan.pass_read, 0);
  EXPECT_LT(plan.step_read, 10 * task.model.parameters());  // the budget keeps states too
}

TEST(forecast, what_lacks_is_told) {
  Machine machine = machine_of();
  machine.memory_bytes = 1 * gigabyte;
  machine.drive_bytes = 1 * gigabyte;
  const Forecast plan = forecast(task_of(Precision::bf16), machine, {}, {});
  ASSERT_EQ(plan.shortages.size(), 2U);
  EXPECT_GT(plan.shortages[0].needed_bytes, machine.memory_bytes);
  EXPECT_EQ(plan.shortages[1].there_bytes, machine.drive_bytes);
}

TEST(forecast, the_choices_are_what_their_names_say) {
  Machine machine = machine_of();
  const auto choices = choose(task_of(Precision::bf16), machine, {}, {});
  ASSERT_EQ(choices.size(), 3U);
  for (const Choice& choice : choices) EXPECT_TRUE(choice.forecast.fits());
  EXPECT_LE(choices[0].forecast.seconds(), choices[1].forecast.seconds() * 1.001);
  EXPECT_LE(choices[2].forecast.memory_bytes, choices[0].forecast.memory_bytes);
  machine.memory_bytes = 1 * gigabyte;
  EXPECT_FALSE(choose(task_of(Precision::bf16, 1e11), machine, {}, {}).front().forecast.fits());
}

TEST(forecast, without_a_drive_everything_is_in_memory) {
  Machine machine = machine_of();
  machine.drives = 0;
  const Forecast plan = choose(task_of(Precision::bf16), machine, {}, {}).front().forecast;
  EXPECT_EQ(plan.drive_bytes, 0);
  EXPECT_EQ(plan.step_read, 0);
  EXPECT_EQ(plan.written_bytes_per_day, 0);  // and not 0 / 0
}

TEST(forecast, without_a_drive_a_first_one_counts_only_if_its_speed_is_known) {
  Machine machine = machine_of();
  machine.drives = 0;
  const Task task = task_of(Precision::bf16, 5e9);  // too large for the memory
  const auto with = changes(task, machine, {}, {});
  EXPECT_EQ(with.front().what, "one more drive in each node");
  EXPECT_GT(with.front().seconds, 0);
  machine.drive = {};
  const auto without = changes(task, machine, {}, {});
  EXPECT_EQ(without.front().what, "twice the memory");
}

double gpu_of(const Forecast& plan, const char* what) {
  for (const Item& item : plan.items) {
    if (item.what == what) return item.gpu;
  }
  return 0;
}

TEST(forecast, activations_on_the_drive_are_written_forward_and_read_back) {
  Task task = task_of(Precision::bf16);
  task.tokens_per_step = 8192;
  task.accumulation = 2;
  task.activation_bytes = 1e6;
  const Forecast kept = forecast(task, machine_of(), {}, {});
  task.activations = Activations::drive;
  const Forecast plan = forecast(task, machine_of(), {}, {});
  // The newest stay in half of 1 GiB, in each of both passes.
  const double bytes = 8.192 * gigabyte - (1 << 30);
  EXPECT_NEAR(plan.pass_written, bytes, bytes * 0.02);
  EXPECT_NEAR(plan.pass_read, bytes, bytes * 0.02);
  EXPECT_NEAR(plan.drive_bytes - kept.drive_bytes, bytes / 2, bytes * 0.02);
  EXPECT_NEAR(plan.memory_bytes - kept.memory_bytes, (1 << 30) - 4.096 * gigabyte, 0.01 * gigabyte);
  EXPECT_NEAR(plan.drive_seconds - kept.drive_seconds, 2 * bytes / (3 * gigabyte), 0.2);
  EXPECT_GT(plan.written_bytes_per_day, kept.written_bytes_per_day);
  Machine slow = machine_of();
  slow.drive = {0.1 * gigabyte, 0.1 * gigabyte, 0.1 * gigabyte};
  EXPECT_GT(forecast(task, slow, {}, {}).pass_seconds, 2 * bytes / (0.1 * gigabyte) * 0.95);
}

TEST(forecast, drives_bring_a_gpu_no_more_than_its_bus) {
  Machine machine = machine_of();
  machine.gpu_memory_bytes = 80 * gigabyte;
  machine.drives = 1000;
  const Costs costs = gpu_costs();
  const Forecast plan = forecast(task_of(Precision::fp16, 10e9), machine, costs, {});
  EXPECT_GE(plan.step_seconds, 0.99 * (plan.step_read + plan.step_written) / costs.copy_both);
}

TEST(forecast, a_budget_of_a_gpu_keeps_states_there) {
  Machine machine = machine_of();
  machine.gpu_memory_bytes = 80 * gigabyte;
  const Settings settings{
      .offload_weights = true, .weight_bytes = 6 * gigabyte, .one_budget = true};
  const Forecast plan = forecast(task_of(Precision::bf16), machine, gpu_costs(), settings);
  EXPECT_NEAR(gpu_of(plan, "masters") + gpu_of(plan, "moments"), 4 * gigabyte, 0.2 * gigabyte);
  EXPECT_EQ(plan.copy_seconds, 0);
}

TEST(forecast, several_ranks_can_have_weights_on_the_drive) {
  Machine machine = machine_of();
  machine.ranks = machine.ranks_per_node = 8;
  machine.memory_bytes = 512 * gigabyte;
  machine.gpu_memory_bytes = 24 * gigabyte;  // weights and gradients take 35
  Task task = task_of(Precision::bf16, 70e9);
  const Choice fastest = choose(task, machine, gpu_costs(), {}).front();
  EXPECT_TRUE(fastest.forecast.fits());
  EXPECT_TRUE(fastest.settings.offload_weights);
  // FSDP brings a layer at a time: a rank has room for its shards of three.
  const double layer = 2 * 70e9 / task.model.layers / 8;
  EXPECT_GE(fastest.settings.weight_bytes, 3 * layer);
}

TEST(forecast, weights_that_all_fit_into_memory_do_not_go_to_the_drive) {
  for (const Choice& choice : choose(task_of(Precision::bf16), machine_of(), {}, {})) {
    if (!choice.settings.offload_weights) continue;
    EXPECT_LT(choice.settings.weight_bytes, 2 * gigabyte) << choice.name;
  }
  Wishes wishes;
  wishes.offload_weights = true;  // whoever wants it gets it
  EXPECT_TRUE(
      choose(task_of(Precision::bf16), machine_of(), {}, wishes)[0].settings.offload_weights);
}

TEST(forecast, who_says_how_many_states_stay_shares_no_budget) {
  Wishes wishes;
  wishes.offload_weights = true;
  EXPECT_TRUE(
      choose(task_of(Precision::bf16), machine_of(), {}, wishes).front().settings.one_budget);
  wishes.cpu_state_bytes = 0;
  for (const Choice& choice : choose(task_of(Precision::bf16), machine_of(), {}, wishes)) {
    EXPECT_FALSE(choice.settings.one_budget);
    EXPECT_EQ(choice.settings.cpu_state_bytes, 0);
  }
}

TEST(forecast, without_a_drive_masters_are_whole) {
  const Forecast plan =
      forecast(task_of(Precision::bf16), machine_of(), {}, {.offload_states = false});
  for (const Item& item : plan.items) {
    if (item.what != "masters and moments") continue;
    EXPECT_NEAR(item.memory, 12 * gigabyte, 0.01 * gigabyte);
  }
}

TEST(forecast, a_huge_model_is_planned_in_no_time) {
  const Forecast plan = forecast(task_of(Precision::bf16, 1e15), machine_of(), {}, {});
  EXPECT_NEAR(plan.step_seconds, 1e15 * 20 / (3 * gigabyte), 1e15 * 20 / (3 * gigabyte) * 0.1);
}

}  // namespace
}  // namespace tensorferry::bench
