// `tensorferry tune`: finds settings, says them as DeepSpeed reads them, and keeps them.
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

struct Options {
  std::string directory;
  bench::TuneOptions tune;
  std::string config;
  std::string json;
  unsigned seconds = 25;
  bool no_profile = false;
};

constexpr const char* footer =
    R"(The profile is kept for the drive; every Handle() takes it from then on where its
arguments leave the choice. TENSORFERRY_PROFILES says where profiles are; set to nothing it
switches them off.

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
      "Round {}: {:3} candidates, {} passes of {}, {:.1f} s; best: {}, {}{}; {} stay", number,
      round.candidates.size(), best.scores.size(), bench::size_text(round.transfer_bytes),
      round.seconds, describe(best.point), figure_of(best, objective),
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

// Returns where the profile is, or nothing if it is not kept, and says so.
std::string keep_profile(const bench::Volume& volume, const bench::Point& point) {
  std::string path = profile_path(volume.device);
  if (path.empty()) {
    fmt::print("\nNo profile was kept: {}\n",
               volume.device.name.empty()
                   ? volume.file_system + " has no block device"
                   : "there is no place for profiles (TENSORFERRY_PROFILES)");
    return {};
  }
  try {
    save_profile(volume.device, {.engine = point.engine,
                                 .block_bytes = point.block_bytes,
                                 .queue_depth = point.queue_depth,
                                 .workers = point.workers});
  } catch (const Error& error) {
    fmt::print("\nNo profile was kept: {}\n", error.what());
    return {};
  }
  fmt::print("\nKept for {} in {}; every Handle() on it takes these settings from now on.\n",
             volume.device.name, path);
  return path;
}

// Runs the tuner, shows how it narrows, and puts the rounds into the results.
bench::Tuned search(const bench::TuneOptions& options, const bench::Volume& volume,
                    const std::string& file, bench::Json& results) {
  constexpr std::uint64_t percent = 100;
  const auto candidates = bench::candidates_for(volume, bench::working_engines());
  for (const bench::Point& point : candidates) {
    results["grid"].push_back(
        to_json(Candidate{.point = point, .scores = {}, .figures = {}}, options.objective));
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

// Also by a link, and also where there is none yet.
bool same_file(const std::string& one, const std::string& other) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::equivalent(one, other, error)) return true;
  const fs::path plain = fs::weakly_canonical(fs::absolute(one), error);
  return !error && plain == fs::weakly_canonical(fs::absolute(other), error);
}

int run(const Options& options) {
  bench::catch_interrupts();
  const bench::Scratch scratch(options.directory, bench::tune_bytes);
  const bench::Volume volume = bench::volume_of(options.directory);
  // An unusable file should be known before half a minute is spent.
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
    if (!options.json.empty()) bench::write_json(options.json, results);  // the way so far
    throw;
  }
  print_choice(tuned, objective);
  results["best"] = to_json(tuned.best, objective);
  results["default"] = to_json(tuned.usual, objective);
  results["seconds"] = tuned.seconds;
  if (!options.config.empty()) {
    bench::write_config(options.config, tuned.best.point);
    fmt::print("\nWritten into \"aio\" of {}\n", options.config);
  }
  if (!options.no_profile) {
    const std::string path = keep_profile(volume, tuned.best.point);
    if (!path.empty()) results["profile"] = path;
  }
  results["complete"] = true;
  if (!options.json.empty()) {
    bench::write_json(options.json, results);
    fmt::print("Results: {} (`tensorferry report {}` makes a page of them)\n", options.json,
               options.json);
  }
  return exit_ok;
}

}  // namespace

Command add_tune(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* app =
      program.add_subcommand("tune", "Find the best settings for a drive and keep them");
  app->footer(footer);
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
                                                           " is not an objective: choose read, "
                                                           "write, balanced or latency");
           }
           options->tune.objective = found->second;
         },
         "what to be best at: read, write, balanced (both) or latency (of 1 MiB reads)")
      ->type_name("NAME")
      ->default_str("balanced");
  add_count(*app, "--seconds", options->seconds, 5, 600, "how long to measure at most");
  app->add_option("--write-config", options->config,
                  "put the settings into \"aio\" of this DeepSpeed configuration")
      ->type_name("FILE");
  app->add_flag("--no-profile", options->no_profile, "do not keep the settings for the drive");
  app->add_option("--json", options->json, "write the results, the way to them included")
      ->type_name("FILE");
  app->final_callback([options] {
    if (!options->json.empty() && !options->config.empty() &&
        same_file(options->json, options->config)) {
      throw CLI::ValidationError("--json", "names the same file as --write-config");
    }
  });
  return {app, [options] { return run(*options); }};
}

}  // namespace tensorferry::cli
