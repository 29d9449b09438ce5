// `tensorferry plan`: what fits where, how long a step takes, and what more would bring.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>

#include "bench/plan/choices.h"
#include "bench/plan/plan_results.h"
#include "bench/run/interrupt.h"
#include "bench/run/results.h"
#include "bench/run/sizes.h"
#include "bench/run/volume.h"
#include "cli/commands.h"
#include "cli/plan_check.h"
#include "cli/plan_text.h"
#include "tensorferry/error.h"

namespace tensorferry::cli {

namespace {

using bench::Machine;

struct PlanArguments {
  bench::Task task;
  Machine machine;
  bench::Wishes wishes;
  double parameters = 0;
  unsigned layers = 0;
  std::string model;
  unsigned ranks = 1;
  unsigned gpus_per_node = 0;
  unsigned drives = 1;
  unsigned accumulation = 0;
  unsigned batch = 1;
  double tokens_per_step = 0;
  bool inference = false;
  bool separate = false;
  std::uint64_t memory = 0;
  std::uint64_t gpu_memory = 0;
  std::string profile;
  std::string check;
  std::string costs;
  std::string nvme_path;
  std::string config;
  std::string json;
};

constexpr const char* plan_footer =
    R"(Counts and rates are decimal: 70B parameters, a drive that reads 7G, of 3.84T. Memory is
binary: 512G, 64M. It changes nothing, and measures only with --check: for half a minute.

Examples:
  tensorferry plan --parameters 70B --ranks 16 --gpus-per-node 8 --gpu-memory 80G --memory 512G \
    --drives 4 --drive-read 7G --drive-write 5G --tokens-per-step 4M --flops 400T
  tensorferry plan --model config.json --profile /mnt/nvme --tokens-per-step 16K --flops 50T
  tensorferry plan --model config.json --profile /mnt/nvme --inference
  tensorferry plan --model config.json --profile /mnt/nvme --write-config ds_config.json
  tensorferry plan --model config.json --check /mnt/nvme --json here.json
)";

// An option that takes a count or a rate: 70B, 7G, 3.84T.
CLI::Option* add_number(CLI::App& app, const std::string& name, double& value,
                        const std::string& description) {
  return app
      .add_option_function<std::string>(
          name,
          [name, &value](const std::string& text) {
            const auto count = bench::parse_count(text);
            if (!count) {
              throw CLI::ValidationError(name, text + " is not a number; write 70B, 7G or 3.84T");
            }
            if (*count == 0) throw CLI::ValidationError(name, "must not be 0");
            constexpr double most = 1e18;
            if (*count > most) throw CLI::ValidationError(name, text + " is more than 1e18");
            value = *count;
          },
          description)
      ->type_name("NUMBER");
}

// A setting of memory that may be 0, and that is chosen if it is not given.
CLI::Option* add_wish(CLI::App& app, const std::string& name, std::optional<double>& value,
                      const std::string& description, std::uint64_t least = 0) {
  return app
      .add_option_function<std::string>(
          name,
          [name, &value, least](const std::string& text) {
            const auto bytes = bench::parse_size(text);
            if (!bytes) {
              throw CLI::ValidationError(name, text + " is not a size; write 4K, 2M or 1G");
            }
            if (*bytes < least) throw CLI::ValidationError(name, "must not be 0");
            value = static_cast<double>(*bytes);
          },
          description)
      ->type_name("SIZE");
}

// One of some words.
template <typename Value>
CLI::Option* add_word(CLI::App& app, const std::string& name,
                      const std::vector<std::pair<const char*, Value>>& words,
                      const std::function<void(Value)>& take, const std::string& description) {
  std::string known;
  for (const auto& [word, value] : words) {
    known += (known.empty() ? "" : word == words.back().first ? " or " : ", ") + std::string(word);
  }
  return app
      .add_option_function<std::string>(
          name,
          [name, words, take, known](const std::string& text) {
            for (const auto& [word, value] : words) {
              if (text == word) {
                take(value);
                return;
              }
            }
            throw CLI::ValidationError(name, text + " is not known; choose " + known);
          },
          description + ": " + known)
      ->type_name("NAME");
}

bench::Model model_of(const PlanArguments& options) {
  if (!options.model.empty())
    return bench::model_of(bench::read_json(options.model), options.model);
  return bench::model_of(options.parameters, options.layers);
}

// Flags that contradict each other.
void check_together(const PlanArguments& options) {
  const bench::Wishes& wishes = options.wishes;
  const auto refuse = [](const std::string& why) { throw CLI::ValidationError(why); };
  if (options.parameters <= 0 && options.model.empty()) {
    throw CLI::RequiredError("--parameters or --model");
  }
  if (options.parameters > bench::parameters_max) {
    refuse(fmt::format("--parameters: no model has more than {:.0e}", bench::parameters_max));
  }
  if (options.layers > 0 && !options.model.empty()) {
    refuse("--layers needs --parameters: a model has its own");
  }
  if (options.batch > 1 && !options.inference) refuse("--batch needs --inference");
  if (options.drives == 0) {
    const char* const why = " needs a drive, and --drives is 0";
    if (wishes.offload_weights == true) refuse(std::string("--weights drive") + why);
    if (wishes.offload_gradients == true) refuse(std::string("--gradients drive") + why);
    if (options.task.activations == bench::Activations::drive) {
      refuse(std::string("--activations drive") + why);
    }
    if (!options.config.empty()) refuse(std::string("--write-config") + why);
  }
  if (options.inference && !options.config.empty()) {
    refuse("--write-config writes how to train, and --inference does not train");
  }
  if (wishes.moments_in_8_bits && options.task.optimizer == bench::OptimizerKind::sgd) {
    refuse("--moments int8 needs adamw or adam, and --optimizer is sgd");
  }
  if (wishes.gpu_state_bytes.value_or(0) > 0 && options.gpu_memory == 0) {
    refuse("--max-gpu-bytes needs a GPU: give --gpu-memory");
  }
}

// What somebody has measured stands for what nobody has said.
void take(double& number, double measured) {
  if (number <= 0) number = measured;
}

// Speeds and free room from a results file of `bench`: of the sizes that moved fastest.
void take_bench(PlanArguments& options, Machine& machine) {
  const auto refuse = [&options](const std::string& why) {
    throw Error({.operation = "read", .path = options.profile, .code = EBADMSG, .hint = why});
  };
  const bench::Json results = bench::read_json(options.profile);
  double read = 0;
  double write = 0;
  try {
    if (results.at("command") != "bench") refuse("it is no results file of `tensorferry bench`");
    for (const bench::Json& one : results.at("series")) {
      if (!one.at("direct").get<bool>()) continue;  // that was the page cache
      constexpr double megabyte = 1e6;
      const double speed = one.at("bandwidth_mb_per_second").at("median").get<double>() * megabyte;
      double& fastest = one.at("direction") == "read" ? read : write;
      fastest = std::max(fastest, speed);
    }
    const bench::Json& place = results.at("places").at(0);
    if (options.nvme_path.empty()) options.nvme_path = place.at("directory").get<std::string>();
    take(machine.drive_bytes, place.at("file_system").at("free_bytes").get<double>());
  } catch (const bench::Json::exception&) {
    refuse("it is no results file of `tensorferry bench`");
  }
  take(machine.drive.read, read);
  take(machine.drive.write, write);
  const bool needs = machine.drives > 0 && options.check.empty();
  if (needs && (machine.drive.read <= 0 || machine.drive.write <= 0)) {
    refuse("it has no reads and writes past the page cache: give --drive-read and --drive-write");
  }
}

// Speeds as `tune` has stored them, and the room that is free; or those of a file of `bench`.
void take_profile(PlanArguments& options, Machine& machine) {
  if (options.profile.empty()) return;
  if (std::filesystem::is_regular_file(options.profile)) {
    take_bench(options, machine);
    return;
  }
  const bench::Volume volume = bench::volume_of(options.profile);
  if (const auto& profile = volume.device.profile) {
    take(machine.drive.read, static_cast<double>(profile->read_bytes_per_second));
    take(machine.drive.write, static_cast<double>(profile->write_bytes_per_second));
  }
  take(machine.drive_bytes, static_cast<double>(volume.free_bytes));
  const bool needs = machine.drives > 0 && options.check.empty();
  if (needs && (machine.drive.read <= 0 || machine.drive.write <= 0)) {
    throw std::runtime_error(fmt::format(
        "there is no profile with speeds for the drive of {}: run `tensorferry tune {}`, or give "
        "--drive-read and --drive-write, or as --profile what `tensorferry bench --json` wrote",
        options.profile, options.profile));
  }
}

// How fast the drives are must be known by now.
void require_speeds(Machine& machine) {
  if (machine.drive.read <= 0 || machine.drive.write <= 0) {
    if (machine.drives == 0) return;  // what a first one would bring stays unknown
    throw std::runtime_error(
        "how fast are the drives? Give --drive-read and --drive-write, or --profile with a "
        "directory on a drive that `tensorferry tune` has measured, or --check with one to measure "
        "now");
  }
  // One after the other, unless it is known better.
  if (machine.drive.both <= 0) {
    machine.drive.both = 2 / (1 / machine.drive.read + 1 / machine.drive.write);
  }
}

// What the options say together.
void complete(PlanArguments& options) {
  bench::Task& task = options.task;
  Machine& machine = options.machine;
  task.model = model_of(options);
  task.trains = !options.inference;
  task.batch = options.batch;
  machine.ranks = options.ranks;
  const unsigned node = options.gpus_per_node == 0 ? options.ranks : options.gpus_per_node;
  machine.ranks_per_node = std::min(node, options.ranks);
  machine.drives = options.drives;
  task.tokens_per_step = options.tokens_per_step > 0
                             ? options.tokens_per_step
                             : machine.ranks * std::max(options.accumulation, 1U);  // one each
  machine.gpu_memory_bytes = static_cast<double>(options.gpu_memory);
  machine.memory_bytes = static_cast<double>(options.memory);
  if (options.memory == 0) {
    machine.memory_bytes = bench::machine_facts().at("memory_bytes").get<double>();
  }
  options.wishes.one_budget = !options.separate;
  take_profile(options, machine);
  if (options.check.empty()) require_speeds(machine);
}

// Into as many passes as its activations need, if nobody has said how many.
void divide(PlanArguments& options, const bench::Costs& costs) {
  bench::Task& task = options.task;
  task.accumulation = std::max(options.accumulation, 1U);
  if (options.accumulation > 0 || !task.trains) return;
  const auto too_many = [&] {
    const bench::Choice first = bench::choose(task, options.machine, costs, options.wishes).front();
    return std::ranges::any_of(first.forecast.shortages, [](const bench::Shortage& one) {
      return one.holds == "activations";
    });
  };
  const double most = task.tokens_per_step / options.machine.ranks;
  while (task.accumulation * 2 <= most && too_many()) task.accumulation *= 2;
}

std::string nvme_path_of(const PlanArguments& options) {
  if (!options.nvme_path.empty()) return options.nvme_path;
  if (!options.check.empty()) return options.check;
  return options.profile.empty() ? "/mnt/nvme" : options.profile;
}

const bench::Choice& recommended(const std::vector<bench::Choice>& choices) {
  return choices.size() > 1 ? choices[1] : choices.front();
}

void print_settings(const PlanArguments& options, const bench::Choice& choice) {
  const std::string path = nvme_path_of(options);
  const bench::Task& task = options.task;
  if (task.trains ? !choice.settings.offload_states : !choice.settings.offload_weights) {
    fmt::print("\nEverything fits into memory: torch does it without a drive.\n");
    return;
  }
  const std::string around = activation_lines(task, path);
  fmt::print("\n{}: the lines that set it up\n{}{}", choice.name,
             python_lines(task, options.machine, choice.settings, path), around);
  if (options.config.empty()) return;
  bench::write_json(options.config, deepspeed_config(task, choice.settings, path));
  const std::string line = initialize_line(options.machine, choice.settings, options.config);
  fmt::print("\nWrote {}. {}\n{}{}", options.config,
             line.empty() ? "It has no keys for some of these settings: use the lines above."
                          : "In place of the lines above:",
             line, line.empty() ? "" : around);
}

// What was measured stands for what nobody has said.
void take_unsaid(Machine& machine, const Checked& checked) {
  bench::Channel& drive = machine.drive;
  if (drive.read <= 0 && drive.write <= 0 && drive.both <= 0) drive.both = checked.drive.both;
  take(drive.read, checked.drive.read);
  take(drive.write, checked.drive.write);
  take(machine.flops, checked.flops);
}

// The plan against what this machine does: the same settings, with what was measured.
void print_check(const PlanArguments& options, const bench::Costs& costs, const Checked& checked,
                 const bench::Choice& fastest) {
  fmt::print("\n{}", check_table(options.machine, costs, checked));
  Machine here = options.machine;
  here.drive = checked.drive;
  here.flops = checked.flops;
  const double planned = fastest.forecast.seconds();
  const double found = forecast(options.task, here, checked.costs, fastest.settings).seconds();
  if (!fastest.forecast.fits() || planned <= 0) return;
  fmt::print(
      "With the costs of this machine and its drive {} of the fastest takes {:.3g} s; the plan "
      "says {:.3g} s: {:.2f}x\n",
      options.task.trains ? "a step" : "a pass", found, planned, found / planned);
}

// Measures this machine, for what nobody has said and to compare.
std::optional<Checked> check(PlanArguments& options, const bench::Costs& costs) {
  if (options.check.empty()) return {};
  Machine& machine = options.machine;
  Checked checked = check_machine(options.check, options.task.precision, machine.has_gpu(), costs);
  if (!machine.has_gpu()) checked.flops /= machine.ranks_per_node;  // ranks share the processors
  take_unsaid(machine, checked);
  require_speeds(machine);
  return checked;
}

int run_plan(PlanArguments options) {
  bench::catch_interrupts();
  const bench::Task& task = options.task;
  bench::Costs costs = options.gpu_memory > 0 ? bench::gpu_costs() : bench::Costs{};
  if (!options.costs.empty()) {
    bench::take_costs(costs, bench::read_json(options.costs), options.costs);
  }
  complete(options);
  if (!options.json.empty()) bench::check_writable(options.json);
  if (!options.config.empty()) bench::check_writable(options.config);
  const std::optional<Checked> checked = check(options, costs);
  divide(options, costs);
  const auto choices = bench::choose(task, options.machine, costs, options.wishes);
  const bool fits = choices.front().forecast.fits();
  const auto more = bench::changes(task, options.machine, costs, options.wishes);

  fmt::print("{}", plan_head(task, options.machine));
  fmt::print("\n{}", choices_table(task, options.machine, choices));
  fmt::print("\n{}\n{}", recommended(choices).name,
             places_table(options.machine, recommended(choices)));
  if (!fits) fmt::print("\n{}", shortage_text(task, options.machine, choices.front()));
  fmt::print("\n{}", changes_table(task, fits ? choices.front().forecast.seconds() : 0, more));
  if (checked) print_check(options, costs, *checked, choices.front());
  if (fits) print_settings(options, recommended(choices));
  if (!options.json.empty()) {
    bench::Json results = bench::begin_results("plan", own_arguments(), {});
    results["settings"] = {
        {"task", to_json(task)}, {"machine", to_json(options.machine)}, {"costs", to_json(costs)}};
    results["choices"] = bench::Json::array();
    for (const bench::Choice& choice : choices) results["choices"].push_back(to_json(choice));
    results["changes"] = bench::Json::array();
    for (const bench::Change& change : more) results["changes"].push_back(to_json(change));
    results["by_drives"] = bench::Json::array();
    if (options.machine.drives > 0) {
      for (const auto& one : bench::by_drives(task, options.machine, costs, options.wishes)) {
        results["by_drives"].push_back(to_json(one));
      }
    }
    if (checked) results["check"] = checked->json;
    results["complete"] = true;
    bench::write_json(options.json, results);
    fmt::print("\n{}", results_line(options.json));
  }
  return fits ? exit_ok : exit_failed;
}

void add_job(CLI::App& app, PlanArguments& options) {
  using bench::OptimizerKind;
  using bench::Precision;
  bench::Task& task = options.task;
  CLI::Option* parameters =
      add_number(app, "--parameters", options.parameters, "number of parameters of the model");
  app.add_option("--model", options.model, "config.json of a model of transformers")
      ->type_name("FILE")
      ->excludes(parameters);
  add_count(app, "--layers", options.layers, 0, 100'000,
            "layers of a model that --parameters describes; 0: the usual number");
  add_word<Precision>(
      app, "--dtype",
      {{"bf16", Precision::bf16}, {"fp16", Precision::fp16}, {"fp32", Precision::fp32}},
      [&task](Precision value) { task.precision = value; }, "format of the weights")
      ->default_str("bf16");
  add_word<OptimizerKind>(
      app, "--optimizer",
      {{"adamw", OptimizerKind::adamw}, {"adam", OptimizerKind::adam}, {"sgd", OptimizerKind::sgd}},
      [&task](OptimizerKind value) { task.optimizer = value; }, "optimizer that trains the model")
      ->default_str("adamw");
  add_number(app, "--tokens-per-step", options.tokens_per_step,
             "tokens of all ranks together; by default each rank has one");
  add_count(app, "--accumulation", options.accumulation, 0, 1'000'000,
            "passes for each step; 0: as many as activations need");
  add_word<bench::Activations>(
      app, "--activations",
      {{"kept", bench::Activations::kept},
       {"recomputed", bench::Activations::recomputed},
       {"drive", bench::Activations::drive}},
      [&task](bench::Activations value) { task.activations = value; },
      "where activations stay until the backward pass")
      ->default_str("kept");
  add_number(app, "--activation-bytes", task.activation_bytes,
             "for each token, of all layers; by default what those of transformers take");
  app.add_flag("--inference", options.inference, "plan a model that runs, not one that trains");
  add_count(app, "--batch", options.batch, 1, 1'000'000, "sequences of inference at once");
}

void add_machine(CLI::App& app, PlanArguments& options) {
  Machine& machine = options.machine;
  add_count(app, "--ranks", options.ranks, 1, 1'000'000, "processes, one for each GPU");
  add_count(app, "--gpus-per-node", options.gpus_per_node, 0, 1024,
            "ranks on a node; 0: all on one");
  add_count(app, "--drives", options.drives, 0, 1024, "drives in each node");
  add_number(app, "--drive-read", machine.drive.read, "bytes per second that each drive reads");
  add_number(app, "--drive-write", machine.drive.write, "bytes per second that each drive writes");
  add_number(app, "--drive-both", machine.drive.both,
             "bytes per second of both at once; by default as one after the other");
  add_number(app, "--drive-size", machine.drive_bytes, "bytes that are free on each drive");
  add_number(app, "--endurance", machine.endurance_bytes,
             "bytes that may be written to each drive in its life (TBW)");
  app.add_option("--profile", options.profile,
                 "a directory on the drive, where `tune` has run, or a file of `bench --json`")
      ->type_name("DIR");
  app.add_option_function<std::string>(
         "--memory",
         [&options](const std::string& text) {
           const auto bytes = bench::parse_size(text);
           if (!bytes || *bytes == 0) {
             throw CLI::ValidationError("--memory", text + " is not a size; write 512G");
           }
           options.memory = *bytes;
         },
         "memory of each node; by default that of this machine")
      ->type_name("SIZE");
  app.add_option_function<std::string>(
         "--gpu-memory",
         [&options](const std::string& text) {
           const auto bytes = bench::parse_size(text);
           if (!bytes) {
             throw CLI::ValidationError("--gpu-memory", text + " is not a size; write 80G");
           }
           options.gpu_memory = *bytes;
         },
         "memory of each GPU; by default a rank has no GPU")
      ->type_name("SIZE");
  add_number(app, "--flops", machine.flops,
             "floating-point operations per second that each rank reaches");
  add_number(app, "--network", machine.network, "bytes per second between ranks, of each");
  app.add_option("--check", options.check,
                 "a directory on the drive: measure this machine, and compare the plan with it")
      ->type_name("DIR");
  app.add_option("--costs", options.costs, "costs that --check has measured, in place of ours")
      ->type_name("FILE");
}

void add_settings(CLI::App& app, PlanArguments& options) {
  bench::Wishes& wishes = options.wishes;
  add_wish(app, "--buffer-bytes", wishes.buffer_bytes,
           "bytes of each buffer of the optimizer; by default 64M", 1);
  app.add_option_function<unsigned>(
         "--buffer-count", [&wishes](unsigned count) { wishes.buffer_count = count; },
         "number of buffers of the optimizer; by default 4")
      ->check(CLI::Range(1, 4096).description(""))
      ->type_name("N");
  add_wish(app, "--max-cpu-bytes", wishes.cpu_state_bytes, "states that stay in memory");
  add_wish(app, "--max-gpu-bytes", wishes.gpu_state_bytes, "states that stay on the GPU");
  add_wish(app, "--weight-bytes", wishes.weight_bytes, "memory for weights on the drive");
  add_word<bool>(
      app, "--moments", {{"fp32", false}, {"int8", true}},
      [&wishes](bool value) { wishes.moments_in_8_bits = value; }, "format of the moments of Adam")
      ->default_str("fp32");
  add_word<bool>(
      app, "--gradients", {{"memory", false}, {"drive", true}},
      [&wishes](bool value) { wishes.offload_gradients = value; },
      "where gradients are; by default where it is faster");
  add_word<bool>(
      app, "--weights", {{"memory", false}, {"drive", true}},
      [&wishes](bool value) { wishes.offload_weights = value; },
      "where weights are; by default where it is faster");
  app.add_flag("--separate", options.separate,
               "give weights and states a limit each, not one MemoryBudget");
}

}  // namespace

Command add_plan(CLI::App& program) {
  auto options = std::make_shared<PlanArguments>();
  CLI::App* app = program.add_subcommand(
      "plan", "Plan what fits where, how long a step takes and what more drives bring");
  app->footer(plan_footer);
  add_job(*app, *options);
  add_machine(*app, *options);
  add_settings(*app, *options);
  app->add_option("--nvme-path", options->nvme_path,
                  "the directory in the settings; by default that of --profile, else /mnt/nvme")
      ->type_name("DIR");
  app->add_option("--write-config", options->config,
                  "write a DeepSpeed configuration that tensorferry.initialize() takes")
      ->type_name("FILE");
  app->add_option("--json", options->json, "write the plan to this file")->type_name("FILE");
  app->final_callback([options] { check_together(*options); });
  return {app, [options] { return run_plan(*options); }};
}

}  // namespace tensorferry::cli
