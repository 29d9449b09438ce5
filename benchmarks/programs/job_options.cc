#include "job_options.h"

#include <getopt.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <utility>
#include <vector>

extern const char usage[] =
    R"(ferry_job --file PATH [options]: runs one job and prints one line of JSON

  --direction read|write
  --mode one       one operation of --bytes at --offset, --repeat times; with --threads N that many
                   at a time, each on its own part of the file
         sync      --count synchronous calls of --bytes at random offsets of an open File
         path      the same by path; also measures opening and closing
         many      one read_many or write_many of --count tensors of 4 to 64 KiB
         queue     --count operations of --bytes at random offsets, --in-flight (64) at a time
         drives    --bytes of each --file, in operations of --piece-bytes (8M), all queued at once;
                   give --bytes once for each file, or once for all
         swap      a SwapSpace in the directories --file: put (write) or get (read) --count tensors
  --threads N      as many threads share the handle (sync, path, queue); each makes --count
  --memory pinned|ordinary|fresh
                   pinned: page-locked. ordinary: as torch allocates it, touched, on a multiple of
                   64 (not 512) bytes. fresh: the same, but new and untouched for each repetition
  --new-file       write new files, PATH.0, PATH.1, ... (mode one)
  --bytes N  --file-bytes N  --count N  --repeat N  --warm-up N  --seed N   N may end in K, M or G
  --engine auto|io_uring|libaio|threads  --block-bytes N  --queue-depth N  --workers N
  --submit batch|single  --overlap on|off
  --beside PATH    another thread reads this file all the time, with the same handle (drives)
  --beside-copies  another thread copies as many bytes in memory meanwhile (mode one)
  --wait-to-start  print "ready" before the timed repetitions and wait for a line (mode one)
)";

namespace {

constexpr std::size_t KiB = 1024;
constexpr std::size_t MiB = 1024 * KiB;

std::size_t parse_size(const std::string& text) {
  std::size_t end = 0;
  std::size_t value = std::stoull(text, &end);
  const std::string unit = text.substr(end);
  if (unit == "K") return value * KiB;
  if (unit == "M") return value * MiB;
  if (unit == "G") return value * 1024 * MiB;
  if (!unit.empty()) throw std::invalid_argument(text + " is not a size: write 4096, 4K, 2M or 1G");
  return value;
}

template <class Choice>
Choice parse_choice(const std::string& text,
                    std::initializer_list<std::pair<const char*, Choice>> choices) {
  for (const auto& [name, choice] : choices) {
    if (text == name) return choice;
  }
  throw std::invalid_argument("unknown choice: " + text + "; --help lists the choices");
}

void apply(Job& job, const std::string& name, const std::string& value) {
  const auto number = [&] { return static_cast<unsigned>(parse_size(value)); };
  if (name == "file") job.paths.push_back(value);
  if (name == "direction") {
    job.direction =
        parse_choice<Direction>(value, {{"read", Direction::read}, {"write", Direction::write}});
  }
  if (name == "mode") {
    job.mode = parse_choice<Mode>(value, {{"one", Mode::one},
                                          {"sync", Mode::sync},
                                          {"path", Mode::path},
                                          {"many", Mode::many},
                                          {"queue", Mode::queue},
                                          {"drives", Mode::drives},
                                          {"swap", Mode::swap}});
  }
  if (name == "memory") {
    job.memory = parse_choice<MemoryKind>(value, {{"pinned", MemoryKind::pinned},
                                                  {"ordinary", MemoryKind::ordinary},
                                                  {"fresh", MemoryKind::fresh}});
  }
  if (name == "new-file") job.file_state = FileState::created;
  if (name == "bytes") job.sizes.push_back(parse_size(value));
  if (name == "piece-bytes") job.piece_bytes = parse_size(value);
  if (name == "in-flight") job.in_flight = number();
  if (name == "beside") job.beside = value;
  if (name == "file-bytes") job.file_bytes = parse_size(value);
  if (name == "offset") job.offset = parse_size(value);
  if (name == "threads") job.threads = number();
  if (name == "beside-copies") job.beside_copies = true;
  if (name == "wait-to-start") job.wait_to_start = true;
  if (name == "count") job.count = parse_size(value);
  if (name == "repeat") job.repeat = number();
  if (name == "warm-up") job.warm_up = number();
  if (name == "seed") job.seed = parse_size(value);
  if (name == "engine") job.options.engine = tensorferry::parse_engine_kind(value);
  if (name == "block-bytes") job.options.block_bytes = parse_size(value);
  if (name == "queue-depth") job.options.queue_depth = number();
  if (name == "workers") job.options.workers = number();
  if (name == "submit") {
    using tensorferry::Submit;
    job.options.submit =
        parse_choice<Submit>(value, {{"batch", Submit::batch}, {"single", Submit::single}});
  }
  if (name == "overlap") {
    using tensorferry::Overlap;
    job.options.overlap =
        parse_choice<Overlap>(value, {{"on", Overlap::on}, {"off", Overlap::off}});
  }
}

bool makes_sense(const Job& job) {
  const bool several_files = job.mode == Mode::drives || job.mode == Mode::swap;
  const bool writes_new_file = job.file_state == FileState::created;
  return !job.paths.empty() &&
         (several_files || (job.paths.size() == 1 && job.sizes.size() <= 1)) &&
         std::find(job.sizes.begin(), job.sizes.end(), 0) == job.sizes.end() && job.repeat != 0 &&
         job.threads != 0 && job.count != 0 && job.in_flight != 0 && job.piece_bytes != 0 &&
         (!writes_new_file || (job.mode == Mode::one && job.direction == Direction::write));
}

}  // namespace

std::optional<Job> parse(int argument_count, char** arguments) {
  static const char* const with_value[] = {
      "file",   "direction", "mode",   "memory",  "bytes",       "file-bytes",  "count",
      "repeat", "warm-up",   "seed",   "engine",  "block-bytes", "queue-depth", "workers",
      "submit", "overlap",   "offset", "threads", "in-flight",   "piece-bytes", "beside"};
  std::vector<option> known;
  known.reserve(std::size(with_value) + 4);
  for (const char* name : with_value) known.push_back({name, required_argument, nullptr, 0});
  for (const char* name : {"new-file", "wait-to-start", "beside-copies"}) {
    known.push_back({name, no_argument, nullptr, 0});
  }
  known.push_back({nullptr, 0, nullptr, 0});

  Job job;
  int index = 0;
  int found = 0;
  while ((found = getopt_long(argument_count, arguments, "", known.data(), &index)) != -1) {
    if (found != 0) return std::nullopt;
    apply(job, known[static_cast<std::size_t>(index)].name, optarg != nullptr ? optarg : "");
  }
  return makes_sense(job) && optind == argument_count ? std::optional(job) : std::nullopt;
}
