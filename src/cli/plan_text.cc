#include "cli/plan_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "bench/run/json.h"
#include "bench/run/sizes.h"
#include "cli/table.h"

namespace tensorferry::cli {

namespace {

using bench::Choice;
using bench::Machine;
using bench::Precision;
using bench::Settings;
using bench::Task;

std::string size_of(double bytes) {
  return bytes < 1 ? "" : bench::rounded_size(static_cast<std::uint64_t>(bytes));
}

// Decimal, as what drives move is told.
std::string moved(double bytes) { return bytes < 1 ? "" : bench::rounded_count(bytes) + "B"; }

std::string seconds_text(double seconds) {
  constexpr double minute = 60;
  constexpr double hour = 60 * minute;
  if (seconds >= 10 * hour) return fmt::format("{:.0f} h", seconds / hour);
  if (seconds >= 10 * minute) return fmt::format("{:.0f} min", seconds / minute);
  if (seconds >= 1) return number_text(seconds, 0) + " s";
  return number_text(seconds * 1e3, 0) + " ms";
}

std::string life_text(double days) {
  constexpr double year = 365;
  if (days <= 0) return "";
  if (days >= 2 * year) return fmt::format("{:.1f} years", days / year);
  return fmt::format("{:.{}f} days", days, days < 10 ? 1 : 0);
}

const char* dtype_of(Precision precision) {
  return precision == Precision::fp32   ? "torch.float32"
         : precision == Precision::bf16 ? "torch.bfloat16"
                                        : "torch.float16";
}

std::string plural(double count, const char* what) {
  return fmt::format("{:.0f} {}{}", count, what, count == 1 ? "" : "s");
}

std::uint64_t whole(double bytes) { return static_cast<std::uint64_t>(bytes); }

}  // namespace

std::string plan_head(const Task& task, const Machine& machine) {
  std::string text = fmt::format(
      "{} parameters{} in {}{}\n", bench::rounded_count(task.model.parameters()),
      task.model.name.empty() ? "" : " (" + task.model.name + ")", to_string(task.precision),
      task.trains
          ? fmt::format(", trained by {}, {} token{} a step in {}", to_string(task.optimizer),
                        bench::rounded_count(task.tokens_per_step),
                        task.tokens_per_step == 1 ? "" : "s",
                        task.accumulation == 1 ? "one pass"
                                               : fmt::format("{:.0f} passes", task.accumulation))
          : fmt::format(", inference of {}", plural(task.batch, "sequence")));
  if (task.model.experts > 0) {
    text += fmt::format("{:.0f} of {:.0f} experts compute with a token: {} parameters\n",
                        task.model.experts_chosen, task.model.experts,
                        bench::rounded_count(task.model.active_parameters()));
  }
  text += fmt::format("{} on {}; each node: {} of memory, {}", plural(machine.ranks, "rank"),
                      plural(machine.nodes(), "node"), size_of(machine.memory_bytes),
                      plural(machine.drives, "drive"));
  if (machine.drives > 0) {
    text += fmt::format(", each reads {}/s and writes {}/s, and moves {}/s when it does both",
                        moved(machine.drive.read), moved(machine.drive.write),
                        moved(machine.drive.both));
  }
  if (machine.has_gpu())
    text += fmt::format("; each rank: a GPU of {}", size_of(machine.gpu_memory_bytes));
  text += "\n";
  if (machine.flops <= 0) text += "Computation of passes is not counted: give --flops.\n";
  return text;
}

std::string choices_table(const Task& task, const Machine& machine,
                          const std::vector<Choice>& choices) {
  std::vector<Column> columns{{"each rank"}};
  for (const Choice& choice : choices) columns.push_back({choice.name, Align::right});
  std::vector<std::vector<std::string>> rows;
  const auto row = [&](const char* name, const auto& text_of) {
    std::vector<std::string> cells{name};
    bool any = false;
    for (const Choice& choice : choices) {
      cells.push_back(text_of(choice));
      any = any || !cells.back().empty();
    }
    if (any) rows.push_back(cells);
  };
  row(task.trains ? "a step with its passes" : "a pass",
      [](const Choice& one) { return seconds_text(one.forecast.seconds()); });
  if (task.trains) {
    row("  passes", [](const Choice& one) { return seconds_text(one.forecast.pass_seconds); });
    row("  optimizer", [](const Choice& one) { return seconds_text(one.forecast.step_seconds); });
  }
  row("limit", [](const Choice& one) { return one.forecast.limit; });
  const auto alone = [&](const char* name, double bench::Forecast::* part) {
    row(name, [part](const Choice& one) {
      const double seconds = one.forecast.*part;
      return seconds > 0 ? seconds_text(seconds) : "";
    });
  };
  alone("  compute of passes, alone", &bench::Forecast::compute_seconds);
  alone("  compute of the optimizer, alone", &bench::Forecast::stepping_seconds);
  alone("  drive, alone", &bench::Forecast::drive_seconds);
  alone("  copies, alone", &bench::Forecast::copy_seconds);
  alone("  network, alone", &bench::Forecast::network_seconds);
  row("tokens per second, all ranks",
      [](const Choice& one) { return bench::rounded_count(one.forecast.tokens_per_second); });
  row("read from the drive",
      [](const Choice& one) { return moved(one.forecast.step_read + one.forecast.pass_read); });
  row("written to the drive", [](const Choice& one) {
    return moved(one.forecast.step_written + one.forecast.pass_written);
  });
  if (machine.has_gpu()) {
    row("memory of the GPU", [](const Choice& one) { return size_of(one.forecast.gpu_bytes); });
  }
  row("memory", [](const Choice& one) { return size_of(one.forecast.memory_bytes); });
  row("room on the drive", [](const Choice& one) { return size_of(one.forecast.drive_bytes); });
  row("each drive takes a day",
      [](const Choice& one) { return moved(one.forecast.written_bytes_per_day); });
  row("and lasts", [](const Choice& one) { return life_text(one.forecast.drive_days); });
  return table(columns, rows);
}

std::string places_table(const Machine& machine, const Choice& choice) {
  std::vector<Column> columns{{"of each rank"}};
  if (machine.has_gpu()) columns.push_back({"GPU", Align::right});
  columns.push_back({"memory", Align::right});
  columns.push_back({"drive", Align::right});
  std::vector<std::vector<std::string>> rows;
  const auto add = [&](const std::string& what, double gpu, double memory, double drive) {
    std::vector<std::string> cells{what};
    if (machine.has_gpu()) cells.push_back(size_of(gpu));
    cells.push_back(size_of(memory));
    cells.push_back(size_of(drive));
    rows.push_back(cells);
  };
  double process = choice.forecast.memory_bytes;
  for (const bench::Item& item : choice.forecast.items) {
    add(item.what, item.gpu, item.memory, item.drive);
    process -= item.memory;
  }
  add("Python and torch", 0, process, 0);
  add("together", choice.forecast.gpu_bytes, choice.forecast.memory_bytes,
      choice.forecast.drive_bytes);
  return table(columns, rows);
}

std::string shortage_text(const Task& task, const Machine& machine, const Choice& choice) {
  const bool steps_adam = task.trains && task.optimizer != bench::OptimizerKind::sgd;
  std::string text;
  for (const bench::Shortage& one : choice.forecast.shortages) {
    text += fmt::format("{}: {} are missing: it needs {} and there are {}; most of it are {}.\n",
                        one.place, size_of(one.needed_bytes - one.there_bytes),
                        size_of(one.needed_bytes), size_of(one.there_bytes), one.holds);
    if (one.holds == "activations" && task.activations == bench::Activations::kept) {
      text += "  Fewer tokens in a pass (--accumulation), or --activations recomputed, help.\n";
    } else if (machine.drives == 0 && one.holds != "activations") {
      text += "  A drive helps: give --drives and how fast they are.\n";
    } else if (one.place == "memory of the GPU") {
      text += "  More ranks help, or GPUs with more memory.\n";
    } else if (one.place == "memory of a node") {
      text += "  More nodes help, or nodes with more memory.\n";
    } else if (steps_adam && !choice.settings.moments_in_8_bits) {
      text += "  More or larger drives help, or --moments int8.\n";
    } else {
      text += "  More or larger drives help.\n";
    }
  }
  return text;
}

std::string changes_table(const Task& task, double seconds,
                          const std::vector<bench::Change>& changes) {
  std::vector<std::vector<std::string>> rows;
  for (const bench::Change& change : changes) {
    const bool fits = change.seconds > 0;
    std::string gain = fits ? "fits" : "does not fit";
    if (fits && seconds > 0) {
      const double ratio = change.seconds / seconds;
      gain = std::abs(ratio - 1) < 0.005 ? "nothing" : fmt::format("{:.2f}x", ratio);
    }
    rows.push_back({change.what, fits ? seconds_text(change.seconds) : "", gain,
                    life_text(change.drive_days)});
  }
  return table({{"with"},
                {task.trains ? "a step" : "a pass", Align::right},
                {"of the time", Align::right},
                {"drives last", Align::right}},
               rows);
}

std::string python_lines(const Task& task, const Machine& machine, const Settings& settings,
                         const std::string& nvme_path) {
  const bool on_gpu = machine.has_gpu();
  const char* limit = on_gpu ? "max_gpu_bytes" : "max_cpu_bytes";
  std::string text;
  if (machine.drives > 1) {
    text += fmt::format("# nvme_path: a list, of a directory on each of the {:.0f} drives\n",
                        machine.drives);
  }
  // A GPU gets weights of the drive from offload.parameters().
  text += fmt::format("model.to({}{})\n", on_gpu && !settings.offload_weights ? "\"cuda\", " : "",
                      dtype_of(task.precision));
  if (machine.ranks > 1) {
    text += "# here torch.distributed.fsdp.fully_shard() for each layer and for the model\n";
  }
  if (settings.one_budget) {
    text += fmt::format("budget = tensorferry.MemoryBudget({})\n", whole(settings.weight_bytes));
  }
  if (settings.offload_weights) {
    text +=
        fmt::format("weights = tensorferry.offload.parameters(model, {:?}, {}{}={})\n", nvme_path,
                    on_gpu ? "device=\"cuda\", " : "", limit,
                    settings.one_budget ? "budget" : std::to_string(whole(settings.weight_bytes)));
  }
  if (!task.trains) return text;
  std::string options;
  const auto option = [&options](const std::string& word) { options += ", " + word; };
  if (settings.buffer_bytes != Settings{}.buffer_bytes) {
    option(fmt::format("buffer_bytes={}", whole(settings.buffer_bytes)));
  }
  if (settings.buffer_count != Settings{}.buffer_count) {
    option(fmt::format("buffer_count={}", whole(settings.buffer_count)));
  }
  if (settings.offload_gradients) option("offload_gradients=True");
  if (settings.moments_in_8_bits) option("moments=\"int8\"");
  if (settings.one_budget) {
    option(fmt::format("{}=budget", limit));
  } else {
    if (settings.cpu_state_bytes >= 1) {
      option(fmt::format("max_cpu_bytes={}", whole(settings.cpu_state_bytes)));
    }
    if (settings.gpu_state_bytes >= 1) {
      option(fmt::format("max_gpu_bytes={}", whole(settings.gpu_state_bytes)));
    }
  }
  if (task.optimizer == bench::OptimizerKind::sgd) {
    const bool half = task.precision != Precision::fp32;
    return text + fmt::format(
                      "optimizer = tensorferry.optim.offload(torch.optim.SGD("
                      "model.parameters(), lr=1e-2, momentum=0.9), {:?}{}{})\n",
                      nvme_path, half ? ", master_weights=True" : "", options);
  }
  return text + fmt::format(
                    "optimizer = tensorferry.optim.{}(model.parameters(), lr=1e-4, "
                    "nvme_path={:?}{})\n",
                    task.optimizer == bench::OptimizerKind::adam ? "Adam" : "AdamW", nvme_path,
                    options);
}

std::string activation_lines(const Task& task, const std::string& nvme_path) {
  if (!task.trains || task.activations == bench::Activations::kept) return {};
  if (task.activations == bench::Activations::recomputed) {
    return "# and call each layer by torch.utils.checkpoint.checkpoint()\n";
  }
  return fmt::format(
      "activations = tensorferry.offload.activations({:?})\n"
      "# and each forward pass: with activations:\n",
      nvme_path);
}

bench::Json deepspeed_config(const Task& task, const Settings& settings,
                             const std::string& nvme_path) {
  bench::Json config;
  config["train_micro_batch_size_per_gpu"] = 1;
  config["gradient_accumulation_steps"] = whole(task.accumulation);
  if (task.optimizer == bench::OptimizerKind::sgd) {
    config["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", 1e-2}, {"momentum", 0.9}}}};
  } else {
    const bool adam = task.optimizer == bench::OptimizerKind::adam;
    config["optimizer"] = {{"type", adam ? "Adam" : "AdamW"}, {"params", {{"lr", 1e-4}}}};
    // What torch takes by default, and DeepSpeed does not.
    bench::Json& params = config["optimizer"]["params"];
    if (adam) params["adam_w_mode"] = false;
    if (!adam) params["weight_decay"] = 1e-2;
  }
  if (task.precision == Precision::bf16) config["bf16"] = {{"enabled", true}};
  if (task.precision == Precision::fp16) config["fp16"] = {{"enabled", true}};
  bench::Json& zero = config["zero_optimization"];
  zero["stage"] = 3;
  zero["offload_optimizer"] = {{"device", "nvme"},
                               {"nvme_path", nvme_path},
                               {"buffer_count", whole(settings.buffer_count)},
                               {"pin_memory", true},
                               {"fast_init", true}};
  if (settings.offload_weights) {
    // The memory for weights is all three together, in elements.
    const double elements = std::max(settings.weight_bytes / bytes_of(task.precision) - 1, 0.0);
    zero["offload_param"] = {
        {"device", "nvme"}, {"nvme_path", nvme_path},        {"buffer_count", 1},
        {"buffer_size", 1}, {"max_in_cpu", whole(elements)}, {"pin_memory", true}};
  }
  return config;
}

std::string initialize_line(const Machine& machine, const Settings& settings,
                            const std::string& file) {
  const bool other_buffers = settings.buffer_bytes != Settings{}.buffer_bytes;
  const bool own_gradients = settings.offload_gradients != settings.offload_weights;
  if (settings.moments_in_8_bits || other_buffers || own_gradients ||
      settings.gpu_state_bytes >= 1 || (settings.one_budget && machine.has_gpu()) ||
      (settings.offload_weights && !settings.one_budget && settings.cpu_state_bytes >= 1)) {
    return {};
  }
  std::string limit;
  if (settings.one_budget) limit = fmt::format(", max_cpu_bytes={}", whole(settings.weight_bytes));
  if (!settings.offload_weights && settings.cpu_state_bytes >= 1) {
    limit = fmt::format(", max_cpu_bytes={}", whole(settings.cpu_state_bytes));
  }
  return fmt::format("model, optimizer = tensorferry.initialize(model, {:?}{})\n", file, limit);
}

}  // namespace tensorferry::cli
