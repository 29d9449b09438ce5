// `tensorferry sweep`: measures every point of a space of settings, with one log for each.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "bench/measure/sweep.h"
#include "bench/run/interrupt.h"
#include "bench/run/process.h"
#include "bench/run/results.h"
#include "bench/run/scratch.h"
#include "bench/run/sizes.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "tensorferry/error.h"

namespace tensorferry::cli {

namespace {

namespace fs = std::filesystem;

using bench::Direction;
using bench::Json;

struct SweepArguments {
  bench::SweepOptions sweep;
  std::string space_file;
  std::vector<std::string> engines;
  std::string json;
  bool no_read = false;
  bool no_write = false;
  bool no_sudo = false;
  bool restart = false;
  bool gpu = false;
  bool gds = false;
};

constexpr const char* sweep_footer =
    R"(The space in --sweep_config is JSON; every combination is a point:
  {"block_size": ["128K", "1M"], "queue_depth": [4, 32], "overlap_events": [true, false],
   "io_parallel": [1, 8], "single_submit": [false], "engine": ["io_uring", "libaio"]}

To continue an interrupted sweep, run it again with the same arguments. All results are in
results.json and results.csv in the log directory.

Examples:
  tensorferry sweep --nvme_dir /mnt/nvme/test_io
  tensorferry sweep --nvme_dir /mnt/nvme/test_io --io_size 1G --loops 3 --log_dir /results/aio_perf
  tensorferry sweep --nvme_dir /mnt/nvme0 /mnt/nvme1 --no_read --no_sudo
)";

std::string drop_text(bench::CacheDrop drop) {
  switch (drop) {
    case bench::CacheDrop::as_root:
      return "sync and page-cache drop between points";
    case bench::CacheDrop::by_sudo:
      return "sync and, by sudo, page-cache drop between points";
    case bench::CacheDrop::not_allowed:
      return "sync between points, without page-cache drop; reads are direct anyway, if the file "
             "system has O_DIRECT";
  }
  return {};
}

// The options of the sweep, with the space from its file and the engines.
bench::SweepOptions complete(const SweepArguments& options) {
  bench::SweepOptions sweep = options.sweep;
  if (!options.space_file.empty()) {
    sweep.space = bench::parse_space(bench::read_json(options.space_file));
    if (!sweep.space.engines.empty()) {
      if (options.gds) {
        throw Error({.operation = "read the space",
                     .path = options.space_file,
                     .code = EINVAL,
                     .hint = "it names engines, and --gds names one too; remove one of them"});
      }
      sweep.engines = sweep.space.engines;
    }
  }
  if (options.gpu || options.gds) {
    (void)bench::FilledMemory(bench::MemoryKind::gpu, 1,
                              bench::data_seed);  // fails before the first point
    sweep.memory = bench::MemoryKind::gpu;
  }
  if (options.gds) {
    sweep.engines = {EngineKind::gds};
    if (const auto refused = bench::try_engine(EngineKind::gds)) throw Error(*refused);
  }
  if (!options.engines.empty()) {
    sweep.engines.clear();
    for (const std::string& name : options.engines) {
      sweep.engines.push_back(parse_engine_kind(name));
    }
  }
  std::vector<std::string> directories;
  for (const std::string& one : sweep.directories) {
    const auto same = [&](const std::string& other) {
      std::error_code ignored;
      return fs::equivalent(one, other, ignored);
    };
    if (std::ranges::none_of(directories, same)) directories.push_back(one);
  }
  sweep.directories = std::move(directories);
  if (options.no_read) std::erase(sweep.directions, Direction::read);
  if (options.no_write) std::erase(sweep.directions, Direction::write);
  return sweep;
}

Json settings_of(const bench::SweepOptions& sweep, bench::CacheDrop drop) {
  Json settings = {{"directories", Json::array()},
                   {"engines", Json::array()},
                   {"memory", to_string(sweep.memory)},
                   {"io_bytes", sweep.io_bytes},
                   {"loops", sweep.loops},
                   {"directions", Json::array()},
                   {"space", to_json(sweep.space)},
                   {"drop_caches", drop != bench::CacheDrop::not_allowed}};
  for (const std::string& directory : sweep.directories) {
    settings["directories"].push_back(fs::weakly_canonical(directory).string());
  }
  for (const EngineKind engine : sweep.engines) settings["engines"].push_back(to_string(engine));
  for (const Direction one : sweep.directions) settings["directions"].push_back(to_string(one));
  return settings;
}

Error refused(const std::string& path, const std::string& hint) {
  return Error({.operation = "begin a sweep", .path = path, .code = EEXIST, .hint = hint});
}

// The finished points of an interrupted sweep to continue. Removes the logs of a sweep to replace.
// Refuses to replace other files, and an unfinished sweep without `restart`.
Json finished_before(const std::string& results_file, const Json& settings, bool restart) {
  if (!fs::exists(results_file)) return Json::array();
  const auto before = [&results_file]() -> std::optional<bench::EarlierSweep> {
    try {
      return bench::earlier_sweep(bench::read_json(results_file));
    } catch (const Error&) {
      return {};
    }
  }();
  if (!before) {
    throw refused(results_file, "this file is not from a sweep; choose another --log_dir");
  }
  const bool unfinished = !before->complete && !before->points.empty();
  if (unfinished && !restart && before->settings != settings) {
    throw refused(results_file,
                  "it is from an interrupted sweep with other settings; continue with those, "
                  "choose another --log_dir, or discard it with --restart");
  }
  Json points = Json::array();
  for (const auto& [entry, log, measured] : before->points) {
    if (unfinished && !restart) {
      if (measured && fs::exists(log)) points.push_back(entry);
    } else if (log.ends_with(".txt") &&
               log.starts_with(fs::path(results_file).parent_path().string())) {
      std::error_code ignored;
      fs::remove(log, ignored);
    }
  }
  return points;
}

class Sweep {
 public:
  Sweep(const bench::SweepOptions& options, bench::CacheDrop drop, std::string json)
      : options_(options),
        drop_(drop),
        json_(std::move(json)),
        self_(fs::read_symlink("/proc/self/exe").string()),
        results_file_((fs::path(options.log_directory) / "results.json").string()) {
    std::vector<bench::Volume> volumes;
    std::map<std::string, std::uint64_t> needed;  // by file system
    for (const std::string& directory : options.directories) {
      volumes.push_back(bench::volume_of(directory));
      std::uint64_t& bytes = needed[volumes.back().mount_point];
      bytes += options.io_bytes * options.directions.size();
      scratch_.push_back(std::make_unique<bench::Scratch>(directory, bytes));
    }
    if (!json_.empty()) bench::check_writable(json_);
    results_ = bench::begin_results("sweep", own_arguments(), volumes);
    results_["settings"] = settings_of(options, drop);
    results_["points"] = Json::array();
    fs::create_directories(options.log_directory);
  }

  // Returns false if it was interrupted.
  [[nodiscard]] bool run(bool restart) {
    results_["points"] = finished_before(results_file_, settings(), restart);
    const std::size_t before = points().size();
    const std::vector<bench::Job> jobs = jobs_of(options_);
    if (before > 0) {
      fmt::print(
          "Continuing an interrupted sweep: {} of {} points are done (--restart discards "
          "them)\n",
          before, jobs.size());
    }
    try {
      Progress progress("Sweep", jobs.size());
      for (const bench::Job& job : jobs) {
        const bool known =
            std::ranges::any_of(points(), [&](const Json& entry) { return describes(entry, job); });
        if (known) continue;
        points().push_back(measure(job, progress));
        save();
        progress.show(points().size(), note_of(points().back()));
      }
    } catch (const bench::Interrupted&) {
      save();
      return false;
    }
    results_["complete"] = true;
    save();
    return true;
  }

  [[nodiscard]] const Json& points() const { return results_.at("points"); }
  [[nodiscard]] const std::string& results_file() const { return results_file_; }

 private:
  [[nodiscard]] Json& points() { return results_["points"]; }
  [[nodiscard]] const Json& settings() const { return results_.at("settings"); }

  [[nodiscard]] static std::string note_of(const Json& point) {
    if (!point.contains("gb_per_second")) return "failed";
    return number_text(point.at("gb_per_second").get<double>(), 2) + " GB/s";
  }

  // A point that fails does not stop the sweep.
  Json measure(const bench::Job& job, Progress& progress) {
    Json entry;
    try {
      entry = try_to_measure(job, progress);
    } catch (const bench::Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      entry = failed_job(job, error.what());
    }
    if (entry.at("status") == "failed") {
      progress.say("failed: " + entry.at("error").get<std::string>());
    }
    return entry;
  }

  Json try_to_measure(const bench::Job& job, Progress& progress) {
    const auto found = std::ranges::find(options_.directories, job.directory);
    const bench::Scratch& scratch =
        *scratch_.at(static_cast<std::size_t>(found - options_.directories.begin()));
    const std::string file = scratch.file(std::string(to_string(job.direction)) + "_data");
    if (!fs::exists(file)) {
      bench::extend(File::open(file, Access::write), options_.io_bytes, bench::data_seed,
                    EngineKind::automatic);
    }
    const auto command = command_of(job, options_, file);
    progress.say(bench::shell_line(command));
    bench::settle(drop_);
    return run_job(job, options_, command, self_, scratch.file("seconds.json"));
  }

  void save() const {
    bench::write_json(results_file_, results_);
    bench::write_text((fs::path(options_.log_directory) / "results.csv").string(),
                      bench::to_csv(points()));
    if (!json_.empty()) bench::write_json(json_, results_);
  }

  const bench::SweepOptions& options_;
  const bench::CacheDrop drop_;
  const std::string json_;
  const std::string self_;
  const std::string results_file_;
  std::vector<std::unique_ptr<bench::Scratch>> scratch_;  // one per directory
  Json results_;
};

std::vector<Json> best_first(const Json& points, Direction direction) {
  std::vector<Json> chosen;
  for (const Json& point : points) {
    if (point.at("direction") == to_string(direction) && point.at("status") == "ok") {
      chosen.push_back(point);
    }
  }
  std::ranges::sort(chosen, [](const Json& one, const Json& other) {
    return one.at("gb_per_second") > other.at("gb_per_second");
  });
  return chosen;
}

void print_best(const bench::SweepOptions& sweep, const Json& points, Direction direction) {
  constexpr std::size_t rows_max = 10;
  const std::vector<Json> best = best_first(points, direction);
  if (best.empty()) return;
  const bool directories = sweep.directories.size() > 1;
  const bool engines = sweep.engines.size() > 1;
  std::vector<Column> columns{{"GB/s", Align::right},
                              {"block", Align::right},
                              {"depth", Align::right},
                              {"workers", Align::right},
                              {"requests"},
                              {"submit"}};
  if (engines) columns.push_back({"engine"});
  if (directories) columns.push_back({"directory"});
  std::vector<std::vector<std::string>> rows;
  for (std::size_t i = 0; i < std::min(rows_max, best.size()); ++i) {
    const Json& point = best[i];
    rows.push_back({number_text(point.at("gb_per_second").get<double>(), 3),
                    bench::size_text(point.at("block_bytes").get<std::uint64_t>()),
                    point.at("queue_depth").dump(), point.at("workers").dump(),
                    point.at("overlap").get<std::string>(), point.at("submit").get<std::string>()});
    if (engines) rows.back().push_back(point.at("engine").get<std::string>());
    if (directories) rows.back().push_back(point.at("directory").get<std::string>());
  }
  fmt::print("\n{}, best first{}\n{}", direction == Direction::read ? "Read" : "Write",
             best.size() > rows_max
                 ? fmt::format(" ({} more in results.csv)", best.size() - rows_max)
                 : "",
             table(columns, rows));
}

int run_sweep(const SweepArguments& options) {
  const bench::SweepOptions sweep_options = complete(options);
  bench::catch_interrupts();
  const bench::CacheDrop drop =
      options.no_sudo ? bench::CacheDrop::not_allowed : bench::find_cache_drop();
  Sweep sweep(sweep_options, drop, options.json);
  fmt::print("{} points; {}\n", jobs_of(sweep_options).size(), drop_text(drop));
  std::fflush(stdout);
  const bool finished = sweep.run(options.restart);

  const Json& points = std::as_const(sweep).points();
  for (const Direction one : sweep_options.directions) print_best(sweep_options, points, one);
  const auto failed =
      std::ranges::count_if(points, [](const Json& one) { return one.at("status") == "failed"; });
  if (failed > 0) fmt::print("\n{} of {} points failed; see their logs\n", failed, points.size());
  fmt::print("\n{}", results_line(sweep.results_file()));
  if (!finished) {
    fmt::print(stderr, "tensorferry sweep: interrupted; run the same command again to continue\n");
  }
  return finished && failed == 0 ? exit_ok : exit_failed;
}

}  // namespace

Command add_sweep(CLI::App& program) {
  auto options = std::make_shared<SweepArguments>();
  bench::SweepOptions& sweep = options->sweep;
  CLI::App* app = program.add_subcommand(
      "sweep", "Measure every combination of block size, queue depth and so on");
  app->footer(sweep_footer);
  app->add_option("--nvme-dir", sweep.directories, "directories, one on each drive to measure")
      ->required()
      ->type_name("DIR");
  app->add_option("--sweep-config", options->space_file, "the settings to combine, as JSON")
      ->type_name("FILE");
  add_size(*app, "--io-size", sweep.io_bytes, "bytes to move per point");
  app->add_flag("--no-read", options->no_read, "skip the read phase");
  app->add_flag("--no-write", options->no_write, "skip the write phase")->excludes("--no-read");
  app->add_flag("--no-sudo", options->no_sudo, "do not drop the page cache");
  app->add_option("--log-dir", sweep.log_directory, "for logs and results")
      ->type_name("DIR")
      ->capture_default_str();
  add_count(*app, "--loops", sweep.loops, 1, 1'000'000, "how often to repeat each point");
  app->add_option("--engine", options->engines, "auto, io_uring, libaio, threads; or several")
      ->check(CLI::IsMember({"auto", "io_uring", "libaio", "threads"}).description(""))
      ->type_name("NAME");
  app->add_flag("--restart", options->restart, "discard the points of an interrupted sweep");
  app->add_flag("--gpu", options->gpu, "tensors of the first GPU");
  app->add_flag("--gds", options->gds, "the same by GPUDirect Storage (the engine gds)")
      ->excludes("--engine");
  app->add_option("--json", options->json, "also write the results to this file")
      ->type_name("FILE");
  return {app, [options] { return run_sweep(*options); }};
}

}  // namespace tensorferry::cli
