// `tensorferry tune`: finds settings, prints them as DeepSpeed reads them, and keeps them.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <system_error>

#include "bench/measure/tune.h"
#include "bench/run/interrupt.h"
#include "bench/run/results.h"
#include "bench/run/scratch.h"
#include "bench/run/sizes.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "tensorferry/device.h"
#include "tensorferry/error.h"

namespace tensorferry::cli {

namespace {

using bench::Candidate;
using bench::Objective;

struct TuneArguments {
  std::string directory;
  bench::TuneOptions tune;
  std::string config;
  std::string json;
  unsigned seconds = 25;
  bool no_profile = false;
};

constexpr const char* tune_footer =
    R"(It stores a profile for the drive. Every Handle() on the drive then takes from it the
settings that its arguments leave open. TENSORFERRY_PROFILES names the directory of profiles; an
empty value switches them off.

Examples:
  tensorferry tune /mnt/nvme
  tensorferry tune /mnt/nvme --objective read --write-config ds_config.json
  tensorferry tune /mnt/nvme --json tune.json && tensorferry report tune.json
)";

std::string describe(const bench::Point& point) {
  return fmt::format("{}, {} blocks, depth {}, {} worker{}", to_string(point.engine),
                     bench::size_text(point.block_bytes), point.queue_depth, point.workers,
                     point.workers == 1 ? "" : "s");
}

std::string figure_of(const Candidate& candidate, Objective objective) {
  if (candidate.figures.empty()) return "not measured";
  if (objective == Objective::latency) {
    return fmt::format("{:.1f} us per 1 MiB read", candidate.figure() * 1e6);
  }
  return number_text(candidate.figure() / 1e9, 2) + " GB/s";
}

std::string round_text(const bench::Round& round, std::size_t number, Objective objective) {
  const Candidate& best = round.candidates.front();
  std::size_t kept = 0;
  for (const Candidate& one : round.candidates) kept += one.kept ? 1 : 0;
  return fmt::format(
      "Round {}: {:3} candidates{}, {} passes of {}, {:.1f} s; best: {}, {}{}; {} stay", number,
      round.candidates.size(),
      round.left_out > 0 ? fmt::format(" (no time for {} more)", round.left_out) : "",
      best.scores.size(), bench::size_text(round.transfer_bytes), round.seconds,
      describe(best.point), figure_of(best, objective),
      best.scores.size() > 1 ? fmt::format(" ±{:.1f} %", best.margin() / best.score() * 100) : "",
      kept);
}

void print_choice(const bench::Tuned& tuned, Objective objective) {
  fmt::print("\nBest for {}: {}: {}\n", to_string(objective), describe(tuned.best.point),
             figure_of(tuned.best, objective));
  fmt::print("The defaults:  {}: {}\n", describe(tuned.usual.point),
             figure_of(tuned.usual, objective));
  fmt::print("\n{}\n", bench::Json{{"aio", aio_block(tuned.best.point)}}.dump(2));
}

void print_polling(const bench::Tuned& tuned) {
  if (!tuned.polling.empty()) fmt::print("\n");
  for (const bench::PollingTrial& trial : tuned.polling) {
    fmt::print("With polling for {}: {}\n", to_string(trial.polling),
               trial.problem.empty()
                   ? fmt::format("{:.2f}x, for a core per worker; Handle(polling='{}') chooses it",
                                 trial.gain, to_string(trial.polling))
                   : "not measured: " + trial.problem);
  }
}

// Stores the profile and returns its path, or prints why it cannot and returns an empty path.
std::string keep_profile(const bench::Volume& volume, const Candidate& best) {
  std::string path = profile_path(volume.device);
  if (path.empty()) {
    fmt::print("\nNo profile was kept: {}\n",
               volume.device.name.empty()
                   ? volume.file_system + " has no block device"
                   : "there is no directory for profiles; set TENSORFERRY_PROFILES");
    return {};
  }
  try {
    save_profile(volume.device, profile_of(best));
  } catch (const Error& error) {
    fmt::print("\nNo profile was kept: {}\n", error.what());
    return {};
  }
  fmt::print("\nKept for {} in {}; every new Handle() on this drive takes these settings.\n",
             volume.device.name, path);
  return path;
}

// Runs the tuner, prints its rounds and adds them to the results.
bench::Tuned search(const bench::TuneOptions& options, const bench::Volume& volume,
                    const std::string& file, bench::Json& results) {
  constexpr std::uint64_t percent = 100;
  const auto candidates = bench::candidates_for(volume, bench::working_engines());
  for (const bench::Point& point : candidates) {
    Candidate candidate;
    candidate.point = point;
    results["grid"].push_back(to_json(candidate, options.objective));
  }
  Progress progress("Tune", percent);
  return bench::tune(
      options, volume, candidates, file,
      [&](const bench::TuneStep& step) {
        progress.show(static_cast<std::uint64_t>(step.share * percent),
                      fmt::format("round {}, {} candidates", step.round, step.candidates));
      },
      [&](const bench::Round& round) {
        results["rounds"].push_back(to_json(round, options.objective));
        progress.say(round_text(round, results["rounds"].size(), options.objective));
      });
}

// Follows links, also if the files do not exist yet.
bool same_file(const std::string& one, const std::string& other) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::equivalent(one, other, error)) return true;
  const fs::path plain = fs::weakly_canonical(fs::absolute(one), error);
  return !error && plain == fs::weakly_canonical(fs::absolute(other), error);
}

int run_tune(const TuneArguments& options) {
  bench::catch_interrupts();
  const bench::Scratch scratch(options.directory, bench::tune_bytes);
  const bench::Volume volume = bench::volume_of(options.directory);
  // Refuses an unusable file before it measures for half a minute.
  if (!options.config.empty()) bench::check_config(options.config);
  if (!options.json.empty()) bench::check_writable(options.json);
  const Objective objective = options.tune.objective;
  bench::Json results = bench::begin_results("tune", own_arguments(), std::span(&volume, 1));
  results["settings"] = {{"directory", volume.directory},
                         {"objective", to_string(objective)},
                         {"seconds_max", options.seconds}};
  results["grid"] = bench::Json::array();
  results["rounds"] = bench::Json::array();

  bench::TuneOptions tune_options = options.tune;
  tune_options.seconds_max = options.seconds;
  bench::Tuned tuned;
  try {
    tuned = search(tune_options, volume, scratch.file("data"), results);
  } catch (...) {
    if (!options.json.empty()) bench::write_json(options.json, results);  // the rounds so far
    throw;
  }
  print_choice(tuned, objective);
  results["best"] = to_json(tuned.best, objective);
  results["default"] = to_json(tuned.usual, objective);
  print_polling(tuned);
  for (const bench::PollingTrial& trial : tuned.polling) {
    results["polling"].push_back(to_json(trial));
  }
  results["seconds"] = tuned.seconds;
  if (!options.config.empty()) {
    bench::write_config(options.config, tuned.best.point);
    fmt::print("\nWrote them into \"aio\" of {}\n", options.config);
  }
  if (!options.no_profile) {
    const std::string path = keep_profile(volume, tuned.best);
    if (!path.empty()) results["profile"] = path;
  }
  results["complete"] = true;
  if (!options.json.empty()) {
    bench::write_json(options.json, results);
    fmt::print("{}", results_line(options.json));
  }
  return exit_ok;
}

}  // namespace

Command add_tune(CLI::App& program) {
  auto options = std::make_shared<TuneArguments>();
  CLI::App* app =
      program.add_subcommand("tune", "Find the best settings for a drive and keep them");
  app->footer(tune_footer);
  app->add_option("directory", options->directory, "a directory on the drive")
      ->required()
      ->type_name("DIR");
  static const std::map<std::string, Objective> objectives{{"read", Objective::read},
                                                           {"write", Objective::write},
                                                           {"balanced", Objective::balanced},
                                                           {"latency", Objective::latency}};
  app->add_option_function<std::string>(
         "--objective",
         [options](const std::string& name) {
           const auto found = objectives.find(name);
           if (found == objectives.end()) {
             throw CLI::ValidationError("--objective", name +
                                                           " is not an objective; choose read, "
                                                           "write, balanced or latency");
           }
           options->tune.objective = found->second;
         },
         "what to optimize: read, write, balanced or latency (of 1 MiB reads)")
      ->type_name("NAME")
      ->default_str("balanced");
  add_count(*app, "--seconds", options->seconds, 5, 600, "the longest time to measure");
  app->add_flag_callback(
      "--try-polling", [options] { options->tune.polling = {Polling::submission}; },
      "measure the best settings with polling for submission too");
  app->add_option("--write-config", options->config,
                  "write the settings into \"aio\" of this DeepSpeed configuration")
      ->type_name("FILE");
  app->add_flag("--no-profile", options->no_profile, "do not store a profile for the drive");
  app->add_option("--json", options->json, "write the results, with every round")
      ->type_name("FILE");
  app->final_callback([options] {
    if (!options->json.empty() && !options->config.empty() &&
        same_file(options->json, options->config)) {
      throw CLI::ValidationError("--json",
                                 "is the same file as that of --write-config; choose another");
    }
  });
  return {app, [options] { return run_tune(*options); }};
}

}  // namespace tensorferry::cli
