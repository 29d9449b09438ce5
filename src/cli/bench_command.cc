// `tensorferry bench`: the latency and the bandwidth of a drive.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "bench/measure/latency.h"
#include "bench/measure/statistics.h"
#include "bench/run/interrupt.h"
#include "bench/run/results.h"
#include "bench/run/scratch.h"
#include "bench/run/sizes.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/table.h"

namespace tensorferry::cli {

namespace {

using bench::Direction;
using bench::MiB;
using bench::Series;

constexpr const char* usual_directory = "/mnt/nvme";

struct BenchArguments {
  std::string directory;
  bench::LatencyOptions latency{
      .sizes = {2 * MiB, 8 * MiB, 32 * MiB},
      .iterations = 200,
      .handle = {.block_bytes = 2 * MiB, .queue_depth = 64, .workers = 16},
      .memory = bench::MemoryKind::pinned,
      .seed = 1};
  std::string json;
};

constexpr const char* bench_footer =
    R"(It touches only its own files, in a new directory that it removes at the end.

Examples:
  tensorferry bench                                     in /mnt/nvme if it exists, else here
  tensorferry bench --nvme-path /mnt/my-nvme --sizes 2M 8M 32M 256M --iterations 100 --threads 8
  tensorferry bench --pageable --json pageable.json     tensors that are not page-locked
)";

// The directory to measure: as given, else /mnt/nvme, else the working directory. Prints a default.
std::string choose_directory(const std::string& wanted) {
  if (!wanted.empty()) return wanted;
  if (std::filesystem::is_directory(usual_directory) && access(usual_directory, W_OK) == 0) {
    fmt::print("Measuring {} (choose another directory with --nvme-path)\n", usual_directory);
    return usual_directory;
  }
  fmt::print(
      "Measuring the working directory, because {} is missing or not writable (choose another "
      "directory with --nvme-path)\n",
      usual_directory);
  return ".";
}

std::string percentiles(const bench::Summary& summary, int digits) {
  std::string text = fmt::format("{{'50th': {:.{}f}, '90th': {:.{}f}, '99th': {:.{}f}", summary.p50,
                                 digits, summary.p90, digits, summary.p99, digits);
  if (summary.p999) text += fmt::format(", '99.9th': {:.{}f}", *summary.p999, digits);
  return text + "}";
}

std::string interval(const std::optional<bench::Interval>& ci95, int digits) {
  if (!ci95) return "needs two samples or more";
  return fmt::format("({:.{}f}, {:.{}f})", ci95->low, digits, ci95->high, digits);
}

void print_series(const Series& series) {
  const bench::Summary& latency = series.latency_seconds;
  const bench::Summary& bandwidth = series.mb_per_second;
  fmt::print("{} Statistics:\n", series.direction == Direction::read ? "Read" : "Write");
  fmt::print("  Latency Mean: {:.9f}s\n", latency.mean);
  fmt::print("  Latency Median: {:.9f}s\n", latency.median);
  fmt::print("  Latency Std Dev: {:.9f}s\n", latency.standard_deviation);
  fmt::print("  Latency 95% CI: {}\n", interval(latency.ci95, 9));
  fmt::print("  Latency Percentiles: {}\n", percentiles(latency, 9));
  fmt::print("  Bandwidth Mean: {:.3f} MB/s\n", bandwidth.mean);
  fmt::print("  Bandwidth Median: {:.3f} MB/s\n", bandwidth.median);
  fmt::print("  Bandwidth Std Dev: {:.3f} MB/s\n", bandwidth.standard_deviation);
  fmt::print("  Bandwidth 95% CI: {}\n", interval(bandwidth.ci95, 3));
  fmt::print("  Bandwidth Percentiles: {}\n", percentiles(bandwidth, 3));
  fmt::print("  CPU: {:.4f} seconds per GB\n", series.cpu_seconds_per_gb());
  fmt::print("  Engine: {} ({}), {}\n", series.engine, series.engine_reason,
             series.direct ? "direct" : "through the page cache");
  if (series.cold) fmt::print("  Cold: {}\n", series.cold->words);
  std::fflush(stdout);
}

void print_summary(const std::vector<Series>& all) {
  std::vector<std::vector<std::string>> rows;
  for (const Series& series : all) {
    const bench::Summary& latency = series.latency_seconds;
    const bench::Summary& bandwidth = series.mb_per_second;
    const int decimals = decimals_for(bandwidth.mean, 0);
    rows.push_back(
        {bench::size_text(series.bytes), std::string(to_string(series.direction)),
         fmt::format("{:.{}f}", bandwidth.mean, decimals),
         bandwidth.ci95 ? fmt::format("±{:.{}f}", bandwidth.ci95->high - bandwidth.mean, decimals)
                        : "",
         fmt::format("{:.3f}", latency.p50 * 1e3), fmt::format("{:.3f}", latency.p90 * 1e3),
         fmt::format("{:.3f}", latency.p99 * 1e3),
         fmt::format("{:.4f}", series.cpu_seconds_per_gb())});
  }
  fmt::print("\n{}", table({{"size"},
                            {""},
                            {"MB/s", Align::right},
                            {"95 % CI", Align::right},
                            {"p50 ms", Align::right},
                            {"p90 ms", Align::right},
                            {"p99 ms", Align::right},
                            {"CPU s/GB", Align::right}},
                           rows));
}

Series measure(bench::LatencyFile& file, Direction direction, std::uint64_t bytes,
               unsigned iterations) {
  const auto begin = bench::Clock::now();
  Progress progress(fmt::format("{} {}", direction == Direction::read ? "Reads" : "Writes",
                                bench::size_text(bytes)),
                    iterations);
  return file.measure(direction, [&](std::uint64_t moved) {
    const double seconds = bench::seconds_between(begin, bench::Clock::now());
    progress.show(moved / bytes,
                  number_text(static_cast<double>(moved) / 1e9 / seconds, 2) + " GB/s");
  });
}

bench::Json settings_of(const BenchArguments& options, const std::string& directory) {
  const bench::LatencyOptions& latency = options.latency;
  return {{"directory", directory},
          {"sizes", latency.sizes},
          {"iterations", latency.iterations},
          {"workers", latency.handle.workers},
          {"queue_depth", latency.handle.queue_depth},
          {"block_bytes", latency.handle.block_bytes},
          {"engine", to_string(latency.handle.engine)},
          {"polling", to_string(latency.handle.polling)},
          {"memory", to_string(latency.memory)},
          {"seed", latency.seed}};
}

int run_bench(const BenchArguments& options) {
  const bench::LatencyOptions& latency = options.latency;
  const std::string directory = choose_directory(options.directory);
  std::uint64_t needed = 0;
  for (const std::uint64_t size : latency.sizes) {
    needed = std::max(needed, bench::LatencyFile::file_bytes(latency, size));
  }
  bench::catch_interrupts();
  const bench::Scratch scratch(directory, needed);
  const bench::Volume volume = bench::volume_of(scratch.path());
  bench::Json results = bench::begin_results("bench", own_arguments(), std::span(&volume, 1));
  results["settings"] = settings_of(options, std::filesystem::absolute(directory).string());
  results["series"] = bench::Json::array();
  if (!options.json.empty()) bench::check_writable(options.json);
  const auto save = [&] {
    if (!options.json.empty()) bench::write_json(options.json, results);
  };

  std::vector<Series> all;
  bool complete = false;
  try {
    for (const std::uint64_t size : latency.sizes) {
      fmt::print("\n{} tensors of {}, {}\n", latency.iterations, bench::size_text(size),
                 to_string(latency.memory));
      std::fflush(stdout);
      bench::LatencyFile file(latency, size, scratch.file("tensors"), volume);
      if (latency.memory == bench::MemoryKind::pinned && !file.lock_problem().empty()) {
        fmt::print(
            "Note: the memory could not be page-locked, so reads and writes may be slower: {}\n",
            file.lock_problem());
      }
      for (const Direction direction : {Direction::write, Direction::read}) {
        all.push_back(measure(file, direction, size, latency.iterations));
        print_series(all.back());
        if (!options.json.empty()) results["series"].push_back(to_json(all.back()));
      }
    }
    complete = true;
  } catch (const bench::Interrupted&) {
    fmt::print(stderr, "tensorferry bench: interrupted after {} of {} series\n", all.size(),
               2 * latency.sizes.size());
  } catch (...) {
    if (!all.empty()) save();  // keep the finished series
    throw;
  }
  results["complete"] = complete;
  if (!all.empty()) print_summary(all);
  if (!options.json.empty() && !all.empty()) {
    save();
    fmt::print("\n{}", results_line(options.json));
  }
  return complete ? exit_ok : exit_failed;
}

}  // namespace

Command add_bench(CLI::App& program) {
  auto options = std::make_shared<BenchArguments>();
  CLI::App* app = program.add_subcommand(
      "bench", "Measure latency and bandwidth of writes and reads, tensor by tensor");
  app->footer(bench_footer);
  bench::LatencyOptions& latency = options->latency;
  app->add_option("--nvme-path", options->directory,
                  "a directory on the drive; by default /mnt/nvme if it exists, else here")
      ->type_name("DIR");
  add_sizes(*app, "--sizes", latency.sizes, "sizes of the tensors");
  add_count(*app, "--iterations", latency.iterations, 1, 10'000'000,
            "tensors per size and direction");
  add_count(*app, "--threads", latency.handle.workers, 1, 256, "threads that transfer");
  add_count(*app, "--queue-depth", latency.handle.queue_depth, 1, 4096,
            "requests in flight per thread");
  add_size(*app, "--block-size", latency.handle.block_bytes, "bytes per request");
  add_engine(*app, latency.handle.engine);
  add_polling(*app, latency.handle.polling);
  app->add_flag_callback(
      "--pinned", [&latency] { latency.memory = bench::MemoryKind::pinned; },
      "page-locked tensors (default)");
  app->add_flag_callback(
         "--pageable", [&latency] { latency.memory = bench::MemoryKind::pageable; },
         "ordinary tensors")
      ->excludes("--pinned");
  app->add_flag_callback(
         "--gpu", [&latency] { latency.memory = bench::MemoryKind::gpu; },
         "tensors of the first GPU; with --engine gds by GPUDirect Storage")
      ->excludes("--pinned")
      ->excludes("--pageable");
  app->add_option("--seed", latency.seed, "of the random data in the tensors")
      ->type_name("N")
      ->capture_default_str();
  app->add_option("--json", options->json, "write the results, with every sample")
      ->type_name("FILE");
  return {app, [options] { return run_bench(*options); }};
}

}  // namespace tensorferry::cli
