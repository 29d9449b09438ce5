// `tensorferry point`: one point of a sweep, in its own process. Its output is the log.
#include <fmt/format.h>

#include <memory>
#include <numeric>

#include "bench/measure/point.h"
#include "bench/run/interrupt.h"
#include "bench/run/process.h"
#include "bench/run/results.h"
#include "bench/run/sizes.h"
#include "cli/commands.h"

namespace tensorferry::cli {

namespace {

using bench::Direction;

struct PointArguments {
  bench::Point point;
  std::string read_file;
  std::string write_file;
  std::uint64_t io_bytes = 400 * bench::MiB;
  unsigned loops = 1;
  std::string json;
};

constexpr const char* point_footer =
    R"(`tensorferry sweep` runs this once for each of its points. You can repeat its command lines
with your own file. GB in the lines of speed is 1024^3 bytes, as in DeepSpeed's logs.

Example:
  tensorferry point --read_file /mnt/nvme/data --io_size 1G --block_size 512K --queue_depth 32 \
      --overlap_events --io_parallel 1
)";

void print_configuration(const PointArguments& options, Direction direction,
                         const std::string& path) {
  const bench::Point& point = options.point;
  fmt::print("Configuration: {} {}\n", to_string(direction), path);
  fmt::print("  io_size = {}\n  loops = {}\n", options.io_bytes, options.loops);
  fmt::print("  block_size = {}\n  queue_depth = {}\n  io_parallel = {}\n", point.block_bytes,
             point.queue_depth, point.workers);
  if (point.memory == bench::MemoryKind::gpu) fmt::print("  gpu = true\n");
  fmt::print("  single_submit = {}\n  overlap_events = {}\n", point.submit == Submit::single,
             point.overlap == Overlap::on);
}

void print_speed(const char* scope, const char* verb, const std::vector<double>& seconds,
                 std::uint64_t bytes) {
  const double mean =
      std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
  fmt::print("{} {} Latency = {} sec\n", scope, verb, mean);
  fmt::print("{} {} Speed = {} GB/sec\n", scope, verb,
             static_cast<double>(bytes) / static_cast<double>(bench::GiB) / mean);
}

int run_point(const PointArguments& options) {
  const Direction direction = options.write_file.empty() ? Direction::read : Direction::write;
  const std::string& path = direction == Direction::read ? options.read_file : options.write_file;
  const char* verb = direction == Direction::read ? "Read" : "Write";
  print_configuration(options, direction, path);
  std::fflush(stdout);
  bench::catch_interrupts();
  bench::end_with_parent();  // the sweep
  const bench::PointResult result =
      bench::run_point(options.point, direction, path, options.io_bytes, options.loops);
  fmt::print("  engine = {} ({}), {}\n", result.engine, result.engine_reason,
             result.direct ? "direct" : "through the page cache");
  for (std::size_t i = 0; i < result.seconds.size(); ++i) {
    fmt::print("Loop {}: {} Latency = {} sec\n", i, verb, result.seconds[i]);
  }
  print_speed("Task", verb, result.transfer_seconds, options.io_bytes);
  print_speed("E2E", verb, result.seconds, options.io_bytes);
  if (!options.json.empty()) {
    bench::write_json(options.json, {{"engine", result.engine},
                                     {"engine_reason", result.engine_reason},
                                     {"direct", result.direct},
                                     {"seconds", result.seconds}});
  }
  return exit_ok;
}

}  // namespace

Command add_point(CLI::App& program) {
  auto options = std::make_shared<PointArguments>();
  bench::Point& point = options->point;
  point.overlap = Overlap::off;
  CLI::App* app = program.add_subcommand("point", "Measure one point of a sweep");
  app->footer(point_footer);
  app->add_option("--read-file", options->read_file,
                  "the file to read, of at least --io-size bytes")
      ->type_name("FILE");
  app->add_option("--write-file", options->write_file, "the file to overwrite or create")
      ->type_name("FILE")
      ->excludes("--read-file");
  app->final_callback([options] {
    if (options->read_file.empty() && options->write_file.empty()) {
      throw CLI::RequiredError("--read-file or --write-file");
    }
  });
  add_size(*app, "--io-size", options->io_bytes, "bytes to move");
  add_count(*app, "--loops", options->loops, 1, 1'000'000, "how often to move them");
  add_size(*app, "--block-size", point.block_bytes, "bytes per request");
  add_count(*app, "--queue-depth", point.queue_depth, 1, 4096, "requests in flight per worker");
  add_count(*app, "--io-parallel", point.workers, 1, 256, "workers");
  app->add_flag_callback(
      "--overlap-events", [&point] { point.overlap = Overlap::on; },
      "refill the queue as requests complete");
  app->add_flag_callback(
         "--sequential-requests", [&point] { point.overlap = Overlap::off; },
         "submit a batch and drain it (default)")
      ->excludes("--overlap-events");
  app->add_flag_callback(
      "--single-submit", [&point] { point.submit = Submit::single; },
      "one system call per request");
  add_engine(*app, point.engine);
  add_polling(*app, point.polling);
  app->add_flag_callback(
      "--gpu", [&point] { point.memory = bench::MemoryKind::gpu; }, "a tensor of the first GPU");
  app->add_option("--json", options->json, "write the seconds of each loop")->type_name("FILE");
  return {app, [options] { return run_point(*options); }};
}

}  // namespace tensorferry::cli
