// `tensorferry verify`: do the bytes that it writes come back?
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <optional>
#include <random>

#include "bench/run/interrupt.h"
#include "bench/run/sizes.h"
#include "bench/run/workload.h"
#include "bench/verify/verify.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/table.h"

namespace tensorferry::cli {

namespace {

struct VerifyArguments {
  std::string directory;
  std::uint64_t bytes = 64 * bench::MiB;
  double duration_s = 0;
  EngineKind engine = EngineKind::automatic;
  std::optional<std::uint64_t> seed;
  bool keep = false;
  std::string file;  // to check
};

constexpr const char* verify_footer = R"(It touches only its own files.
Exit status: 0 all bytes came back, 1 some did not or verify failed, 2 wrong usage.

Examples:
  tensorferry verify /mnt/nvme
  tensorferry verify /mnt/nvme --size 4G --duration 3600     for an hour
  tensorferry verify /mnt/nvme --keep                        cut the power after this one, then
  tensorferry verify --check FILE                            check the file that it named
)";

class Bar {
 public:
  // Counts in units of `unit` bytes or milliseconds, which people can read.
  explicit Bar(std::uint64_t unit) : unit_(unit) {}

  void show(const bench::VerifyProgress& now) {
    if (!bar_) bar_.emplace("Verify", now.total / unit_);
    const double elapsed = bench::seconds_between(begin_, bench::Clock::now());
    bar_->show(now.done / unit_,
               fmt::format("{:.1f} GB/s", static_cast<double>(now.bytes_moved) / elapsed / 1e9));
  }

  // Ends the line, so that other output can follow.
  void end() { bar_.reset(); }

 private:
  const std::uint64_t unit_;
  const bench::Clock::time_point begin_ = bench::Clock::now();
  std::optional<Progress> bar_;
};

void print_failure(const bench::VerifyFailure& failure) {
  fmt::print(stderr, "{}: {}: offset {}, length {}: {}\n", failure.kind, failure.path,
             failure.offset, failure.length, failure.explanation);
}

int check(const std::string& path) {
  Bar bar(bench::MiB);
  const bench::FileCheck checked =
      bench::check_file(path, [&](const bench::VerifyProgress& now) { bar.show(now); });
  bar.end();
  for (const bench::VerifyFailure& failure : checked.failures) print_failure(failure);
  if (checked.bad_blocks > 0) {
    fmt::print(stderr, "{} of {} blocks are bad (generation {}).\n", checked.bad_blocks,
               checked.blocks, checked.generation);
    return exit_failed;
  }
  fmt::print("{}: all {} blocks are right (generation {}).\n", path, checked.blocks,
             checked.generation);
  return exit_ok;
}

void print_table(const bench::VerifyResult& result) {
  std::vector<std::vector<std::string>> rows;
  for (const bench::EnginePair& pair : result.pairs) {
    const char* verdict = pair.failure ? "FAILED" : pair.generations > 0 ? "ok" : "not tried";
    rows.push_back({std::string(to_string(pair.writer)), std::string(to_string(pair.reader)),
                    std::to_string(pair.generations),
                    bench::rounded_size(pair.generations * result.file_bytes), verdict});
  }
  fmt::print("{}", table({{"written by"},
                          {"read by"},
                          {"generations", Align::right},
                          {"each way", Align::right},
                          {"result"}},
                         rows));
  for (const bench::SkippedEngine& engine : result.skipped) {
    fmt::print("skipped: {}: {}\n", to_string(engine.engine), engine.reason);
  }
}

// Prints the verdict and returns the exit status.
int conclude(const bench::VerifyResult& result, const bench::VerifyOptions& verify_options,
             double seconds) {
  int status = exit_ok;
  for (const bench::EnginePair& pair : result.pairs) {
    if (!pair.failure) continue;
    std::fflush(stdout);  // the table comes first
    fmt::print(stderr, "\n");
    print_failure(*pair.failure);
    fmt::print(stderr, "Generation {}, written by {}, read by {}; seed {}.\n",
               pair.failure->generation, to_string(pair.writer), to_string(pair.reader),
               verify_options.seed);
    if (result.kept.empty())
      fmt::print(stderr, "To keep the file for a closer look, run this again with --keep.\n");
    status = exit_failed;
  }
  if (status == exit_ok) {
    fmt::print(
        "\nEvery byte came back as written: {} generations of {}, {} moved in {:.1f} s; "
        "seed {}.\n",
        result.generations, bench::rounded_size(result.file_bytes),
        bench::rounded_size(result.bytes_moved), seconds, verify_options.seed);
  }
  if (!result.kept.empty()) {
    fmt::print("Kept: {}\nCheck it later with: tensorferry verify --check {}\n", result.kept,
               result.kept);
  }
  return status;
}

int run_verify(const VerifyArguments& options) {
  bench::catch_interrupts();
  if (!options.file.empty()) return check(options.file);
  const bench::VerifyOptions verify_options{
      .directory = options.directory,
      .bytes = options.bytes,
      .duration = std::chrono::duration<double>(options.duration_s),
      .engine = options.engine,
      .seed = options.seed ? *options.seed : std::random_device()(),
      .leave = options.keep ? bench::Leave::file : bench::Leave::nothing};
  const auto begin = bench::Clock::now();
  Bar bar(options.duration_s > 0 ? 1000 : bench::MiB);
  const bench::VerifyResult result =
      bench::verify(verify_options, [&](const bench::VerifyProgress& now) { bar.show(now); });
  bar.end();
  const double seconds = bench::seconds_between(begin, bench::Clock::now());
  print_table(result);
  return conclude(result, verify_options, seconds);
}

}  // namespace

Command add_verify(CLI::App& program) {
  auto options = std::make_shared<VerifyArguments>();
  CLI::App* app = program.add_subcommand(
      "verify", "Write stamped blocks through every engine and check that they come back");
  app->footer(verify_footer);
  app->add_option("directory", options->directory, "the directory to write to")->type_name("DIR");
  add_size(*app, "--size", options->bytes, "bytes of the file, rounded up to whole 4K blocks");
  const auto* duration =
      app->add_option("--duration", options->duration_s,
                      "repeat for this long; without it, try every combination once")
          ->type_name("SECONDS");
  add_engine(*app, options->engine)
      ->description("auto (every one that works here), io_uring, libaio or threads");
  app->add_option("--seed", options->seed, "of the random data; a new one by default")
      ->type_name("NUMBER");
  app->add_flag("--keep", options->keep, "leave the file, to check it after a power cut");
  app->add_option("--check", options->file, "only check a file that --keep left")
      ->type_name("FILE");
  app->final_callback([app, options, duration] {
    constexpr double longest_s = 1e9;
    const bool sensible =
        options->duration_s > 0 && options->duration_s < longest_s;  // false for nan
    if (duration->count() > 0 && !sensible) {
      throw CLI::ValidationError("--duration must be a number of seconds above 0");
    }
    if (options->directory.empty() && options->file.empty()) {
      throw CLI::ValidationError("name a directory: tensorferry verify DIR");
    }
    if (options->file.empty()) return;
    for (const CLI::Option* option : app->get_options()) {
      if (option->count() == 0 || option->get_name() == "--check") continue;
      throw CLI::ValidationError("--check FILE cannot be combined with " + option->get_name());
    }
  });
  return {app, [options] { return run_verify(*options); }};
}

}  // namespace tensorferry::cli
