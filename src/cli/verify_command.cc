// `tensorferry verify`: does what was written come back?
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <optional>
#include <random>

#include "bench/run/interrupt.h"
#include "bench/run/sizes.h"
#include "bench/verify/verify.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/table.h"

namespace tensorferry::cli {

namespace {

struct Options {
  std::string directory;
  std::uint64_t bytes = 64 * bench::MiB;
  double duration_s = 0;
  EngineKind engine = EngineKind::automatic;
  std::optional<std::uint64_t> seed;
  bool keep = false;
  std::string file;  // to check
};

constexpr const char* footer = R"(Only files that it made itself are touched.
Exit status: 0 all came back, 1 something did not, or could not be tried, 2 wrong usage.

Examples:
  tensorferry verify /mnt/nvme
  tensorferry verify /mnt/nvme --size 4G --duration 3600     an hour of it
  tensorferry verify /mnt/nvme --keep                        then cut the power, and after that
  tensorferry verify --check FILE                            with the file that was named
)";

class Bar {
 public:
  // Of `unit` bytes or milliseconds, so that people can read the numbers.
  explicit Bar(std::uint64_t unit) : unit_(unit) {}

  void show(const bench::VerifyProgress& now) {
    using Seconds = std::chrono::duration<double>;
    if (!bar_) bar_.emplace("Verify", now.total / unit_);
    const double elapsed = Seconds(Clock::now() - begin_).count();
    bar_->show(now.done / unit_,
               fmt::format("{:.1f} GB/s", static_cast<double>(now.bytes_moved) / elapsed / 1e9));
  }

  // Ends its line, so that others can follow.
  void end() { bar_.reset(); }

 private:
  using Clock = std::chrono::steady_clock;

  const std::uint64_t unit_;
  const Clock::time_point begin_ = Clock::now();
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
  fmt::print("{}: all {} blocks are as they were written (generation {}).\n", path, checked.blocks,
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

// The verdict, in words; the exit status.
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
    if (result.kept.empty()) fmt::print(stderr, "With --keep the file would stay.\n");
    status = exit_failed;
  }
  if (status == exit_ok) {
    fmt::print(
        "\nAll came back as it was written: {} generations of {}, {} moved in {:.1f} s; "
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

int run(const Options& options) {
  bench::catch_interrupts();
  if (!options.file.empty()) return check(options.file);
  const bench::VerifyOptions verify_options{
      .directory = options.directory,
      .bytes = options.bytes,
      .duration = std::chrono::duration<double>(options.duration_s),
      .engine = options.engine,
      .seed = options.seed ? *options.seed : std::random_device()(),
      .leave = options.keep ? bench::Leave::file : bench::Leave::nothing};
  const auto begin = std::chrono::steady_clock::now();
  Bar bar(options.duration_s > 0 ? 1000 : bench::MiB);
  const bench::VerifyResult result =
      bench::verify(verify_options, [&](const bench::VerifyProgress& now) { bar.show(now); });
  bar.end();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  print_table(result);
  return conclude(result, verify_options, taken.count());
}

}  // namespace

Command add_verify(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* app = program.add_subcommand(
      "verify", "Write stamped blocks through every engine and see that they come back");
  app->footer(footer);
  app->add_option("directory", options->directory, "where to write")->type_name("DIR");
  add_size(*app, "--size", options->bytes, "bytes of the file, in whole 4K blocks");
  const auto* duration =
      app->add_option("--duration", options->duration_s,
                      "repeat until then; without it, every combination has one turn")
          ->type_name("SECONDS");
  add_engine(*app, options->engine)
      ->description("auto: every one that works here; or io_uring, libaio or threads alone");
  app->add_option("--seed", options->seed, "of what is written; a new one by default")
      ->type_name("NUMBER");
  app->add_flag("--keep", options->keep, "leave the file, to be checked after a power cut");
  app->add_option("--check", options->file, "only check a file that was kept")->type_name("FILE");
  app->final_callback([app, options, duration] {
    constexpr double longest_s = 1e9;
    const bool sensible = options->duration_s > 0 && options->duration_s < longest_s;  // nan is not
    if (duration->count() > 0 && !sensible) {
      throw CLI::ValidationError("--duration: give a number of seconds above 0");
    }
    if (options->directory.empty() && options->file.empty()) {
      throw CLI::ValidationError("say where: tensorferry verify DIR");
    }
    if (options->file.empty()) return;
    for (const CLI::Option* option : app->get_options()) {
      if (option->count() == 0 || option->get_name() == "--check") continue;
      throw CLI::ValidationError("--check FILE reads that file and takes nothing else, such as " +
                                 option->get_name());
    }
  });
  return {app, [options] { return run(*options); }};
}

}  // namespace tensorferry::cli
