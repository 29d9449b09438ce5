#include "bench/measure/sweep.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "bench/run/process.h"
#include "bench/run/results.h"
#include "bench/run/sizes.h"
#include "tensorferry/error.h"

namespace tensorferry::bench {

namespace {

namespace fs = std::filesystem;

constexpr const char* drop_caches = "/proc/sys/vm/drop_caches";

Error invalid(const std::string& hint) {
  return Error({.operation = "read the space", .code = EINVAL, .hint = hint});
}

std::uint64_t parse_bytes(const std::string& key, const Json& value) {
  std::optional<std::uint64_t> bytes;
  if (value.is_string()) bytes = parse_size(value.get<std::string>());
  if (value.is_number_unsigned()) bytes = value.get<std::uint64_t>();
  if (!bytes || *bytes == 0 || *bytes > GiB) {
    throw invalid(fmt::format("{}: {} must be a size up to 1G, such as \"256K\" or 1048576", key,
                              value.dump()));
  }
  return *bytes;
}

unsigned parse_count(const std::string& key, const Json& value, unsigned max) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() == 0 ||
      value.get<std::uint64_t>() > max) {
    throw invalid(fmt::format("{}: {} must be a number from 1 to {}", key, value.dump(), max));
  }
  return value.get<unsigned>();
}

bool parse_flag(const std::string& key, const Json& value) {
  if (!value.is_boolean()) {
    throw invalid(fmt::format("{}: {} must be true or false", key, value.dump()));
  }
  return value.get<bool>();
}

EngineKind parse_engine(const Json& value) {
  if (!value.is_string())
    throw invalid("engine: " + value.dump() + " must be a name, such as \"io_uring\"");
  return parse_engine_kind(value.get<std::string>());
}

template <class Value>
void add_once(std::vector<Value>& values, Value value) {
  if (std::ranges::find(values, value) == values.end()) values.push_back(value);
}

void apply(SweepSpace& space, const std::string& key, const Json& value) {
  if (key == "block_size") {
    add_once(space.block_bytes, parse_bytes(key, value));
  } else if (key == "queue_depth") {
    add_once(space.queue_depth, parse_count(key, value, 4096));
  } else if (key == "io_parallel") {
    add_once(space.workers, parse_count(key, value, 256));
  } else if (key == "overlap_events") {
    add_once(space.overlap, parse_flag(key, value) ? Overlap::on : Overlap::off);
  } else if (key == "sequential_requests") {
    add_once(space.overlap, parse_flag(key, value) ? Overlap::off : Overlap::on);
  } else if (key == "single_submit") {
    add_once(space.submit, parse_flag(key, value) ? Submit::single : Submit::batch);
  } else if (key == "threads") {  // DeepSpeed's own spaces have it, always 1
    if (parse_count(key, value, 256) != 1) {
      throw invalid("threads: must be 1; io_parallel sets the number of workers");
    }
  } else if (key == "engine") {
    add_once(space.engines, parse_engine(value));
  } else {
    throw invalid(key +
                  ": unknown key; use block_size, queue_depth, overlap_events, "
                  "sequential_requests, io_parallel, single_submit and engine");
  }
}

// The name of a folder for a directory: "/mnt/nvme 0" becomes "mnt_nvme_0".
std::string folder_name(const std::string& directory) {
  std::string name = fs::weakly_canonical(directory).string();
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '.'; }, '_');
  name.erase(0, name.find_first_not_of('_'));
  return name.empty() ? "root" : name;
}

// Why a program failed: the signal, its complaint, or its last line.
std::string reason_of(int status, const std::string& log) {
  constexpr int by_signal = 128;
  if (status > by_signal) return fmt::format("killed by signal {}", status - by_signal);
  std::ifstream lines(log);
  std::string last;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("tensorferry")) return line;
    if (!line.empty()) last = line;
  }
  return fmt::format("exit {}: {}", status, last.empty() ? "it printed nothing" : last);
}

}  // namespace

SweepSpace parse_space(const Json& json) {
  if (!json.is_object()) throw invalid("the space must be an object of lists");
  SweepSpace space{.block_bytes = {},
                   .queue_depth = {},
                   .overlap = {},
                   .workers = {},
                   .submit = {},
                   .engines = {}};
  for (const auto& [key, values] : json.items()) {
    // A single value counts as a list of one.
    const Json list = values.is_array() ? values : Json::array({values});
    if (list.empty()) throw invalid(key + ": the list is empty");
    for (const Json& value : list) apply(space, key, value);
  }
  const Point usual;
  if (space.block_bytes.empty()) space.block_bytes = {usual.block_bytes};
  if (space.queue_depth.empty()) space.queue_depth = {usual.queue_depth};
  if (space.overlap.empty()) space.overlap = {Overlap::off};
  if (space.workers.empty()) space.workers = {usual.workers};
  if (space.submit.empty()) space.submit = {usual.submit};
  return space;
}

Json to_json(const SweepSpace& space) {
  Json json = {{"block_size", space.block_bytes}, {"queue_depth", space.queue_depth}};
  for (const Overlap overlap : space.overlap) {
    json["overlap_events"].push_back(overlap == Overlap::on);
  }
  json["io_parallel"] = space.workers;
  for (const Submit submit : space.submit) {
    json["single_submit"].push_back(submit == Submit::single);
  }
  return json;
}

std::vector<Point> points_of(const SweepSpace& space) {
  std::vector<Point> points;
  for (const std::uint64_t block_bytes : space.block_bytes) {
    for (const unsigned queue_depth : space.queue_depth) {
      for (const Overlap overlap : space.overlap) {
        for (const unsigned workers : space.workers) {
          for (const Submit submit : space.submit) {
            points.push_back({.block_bytes = block_bytes,
                              .queue_depth = queue_depth,
                              .overlap = overlap,
                              .workers = workers,
                              .submit = submit,
                              .engine = EngineKind::automatic});
          }
        }
      }
    }
  }
  return points;
}

std::vector<Job> jobs_of(const SweepOptions& options) {
  std::vector<Job> jobs;
  std::vector<std::string> folders;
  for (const std::string& directory : options.directories) {
    std::string folder = folder_name(directory);
    while (std::ranges::find(folders, folder) != folders.end()) folder += "_";
    folders.push_back(folder);
    for (const EngineKind engine : options.engines) {
      fs::path logs = options.log_directory;
      if (options.directories.size() > 1) logs /= folder;
      if (options.engines.size() > 1) logs /= to_string(engine);
      for (const Direction direction : options.directions) {
        for (Point point : points_of(options.space)) {
          point.engine = engine;
          jobs.push_back(
              {.directory = directory,
               .direction = direction,
               .point = point,
               .log = (logs / to_string(direction) / log_name(direction, point)).string()});
        }
      }
    }
  }
  return jobs;
}

std::vector<std::string> command_of(const Job& job, const SweepOptions& options,
                                    const std::string& file) {
  const Point& point = job.point;
  std::vector<std::string> words{"tensorferry",
                                 "point",
                                 fmt::format("--{}_file", to_string(job.direction)),
                                 file,
                                 "--io_size",
                                 size_text(options.io_bytes),
                                 "--loops",
                                 std::to_string(options.loops),
                                 "--block_size",
                                 size_text(point.block_bytes),
                                 "--queue_depth",
                                 std::to_string(point.queue_depth),
                                 "--io_parallel",
                                 std::to_string(point.workers)};
  if (point.overlap == Overlap::on) words.emplace_back("--overlap_events");
  if (options.memory == MemoryKind::gpu) words.emplace_back("--gpu");
  if (point.submit == Submit::single) words.emplace_back("--single_submit");
  words.emplace_back("--engine");
  words.emplace_back(to_string(point.engine));
  return words;
}

namespace {

Json entry_of(const Job& job) {
  Json entry = {{"directory", job.directory},
                {"engine", to_string(job.point.engine)},
                {"direction", to_string(job.direction)}};
  entry.update(to_json(job.point));
  return entry;
}

}  // namespace

Json failed_job(const Job& job, const std::string& error) {
  Json entry = entry_of(job);
  entry.update({{"status", "failed"}, {"error", error}, {"command", ""}, {"log", job.log}});
  return entry;
}

Json run_job(const Job& job, const SweepOptions& options, const std::vector<std::string>& command,
             const std::string& program, const std::string& seconds_file) {
  fs::create_directories(fs::path(job.log).parent_path());
  write_text(job.log, "");  // a log that cannot be written fails here, with a reason
  std::error_code ignored;
  fs::remove(seconds_file, ignored);
  std::vector<std::string> words = command;
  words.front() = program;
  words.insert(words.end(), {"--json", seconds_file});
  int status = 0;
  try {
    status = run_process(words, job.log);
  } catch (...) {
    fs::remove(job.log, ignored);  // half a log would look like a whole one
    throw;
  }
  if (status != 0) {
    Json entry = failed_job(job, reason_of(status, job.log));
    entry["command"] = shell_line(command);
    return entry;
  }
  const Json measured = read_json(seconds_file);
  const auto seconds = measured.at("seconds").get<std::vector<double>>();
  const double total = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  const double bytes = static_cast<double>(options.io_bytes) * options.loops;
  Json entry = entry_of(job);
  entry.update({{"status", "ok"},
                {"engine_used", measured.at("engine")},
                {"seconds", seconds},
                {"gb_per_second", bytes / 1e9 / total},
                {"gib_per_second", bytes / static_cast<double>(GiB) / total},
                {"command", shell_line(command)},
                {"log", job.log}});
  return entry;
}

std::optional<EarlierSweep> earlier_sweep(const Json& results) {
  const auto text_in = [](const Json& json, const char* key) {
    const bool has = json.is_object() && json.contains(key) && json.at(key).is_string();
    return has ? json.at(key).get<std::string>() : std::string();
  };
  if (text_in(results, "command") != "sweep" || !results.contains("points") ||
      !results.at("points").is_array()) {
    return {};
  }
  EarlierSweep earlier;
  earlier.complete = results.contains("complete") && results.at("complete") == Json(true);
  if (results.contains("settings")) earlier.settings = results.at("settings");
  for (const Json& point : results.at("points")) {
    const bool measured = text_in(point, "status") == "ok" && point.contains("gb_per_second") &&
                          point.at("gb_per_second").is_number();
    earlier.points.push_back({.entry = point, .log = text_in(point, "log"), .measured = measured});
  }
  return earlier;
}

bool describes(const Json& entry, const Job& job) {
  const Json wanted = entry_of(job);
  return std::ranges::all_of(wanted.items(), [&](const auto& item) {
    return entry.contains(item.key()) && entry.at(item.key()) == item.value();
  });
}

std::string to_csv(const Json& points) {
  static constexpr const char* columns[] = {
      "directory", "engine", "direction", "block_bytes",   "queue_depth", "overlap",
      "workers",   "submit", "status",    "gb_per_second", "log"};
  std::string text;
  for (const char* column : columns) text += (text.empty() ? "" : ",") + std::string(column);
  text += '\n';
  for (const Json& point : points) {
    std::string line;
    for (const char* column : columns) {
      if (column != columns[0]) line += ',';
      if (!point.contains(column)) continue;
      const Json& value = point.at(column);
      std::string cell = value.is_string() ? value.get<std::string>() : value.dump();
      if (cell.find_first_of(",\"\r\n") != std::string::npos) {
        std::string quoted = "\"";
        for (const char c : cell) quoted += c == '"' ? "\"\"" : std::string(1, c);
        cell = quoted + "\"";
      }
      line += cell;
    }
    text += line + '\n';
  }
  return text;
}

CacheDrop find_cache_drop() {
  if (geteuid() == 0 && access(drop_caches, W_OK) == 0) return CacheDrop::as_root;
  if (run_process({"sudo", "-n", "true"}) == 0) return CacheDrop::by_sudo;
  return CacheDrop::not_allowed;
}

void settle(CacheDrop drop) {
  sync();
  if (drop == CacheDrop::as_root) std::ofstream(drop_caches) << "1\n";
  if (drop == CacheDrop::by_sudo) {
    // A refusal does not matter: reads are direct.
    [[maybe_unused]] const int status =
        run_process({"sudo", "-n", "sh", "-c", std::string("echo 1 > ") + drop_caches});
  }
}

}  // namespace tensorferry::bench
