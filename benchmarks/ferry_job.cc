// Runs one job over the public API, as fio runs one, and prints one line of JSON. compare.py and
// bench.py call it; `ferry_job --help` lists the options.
//
// Timed is the transfer alone. Before the clock starts files are prepared, memory is allocated and
// --warm-up repetitions are made, which set up the rings, register the buffers and touch the slots,
// as fio does before its own clock starts. Two of them, because the first two reads into memory
// that a virtual machine has just got are slower, and fio's few buffers are past that at once.
// Reads are cold: they are direct, or `direct` says false.
#include <fcntl.h>
#include <getopt.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "tensorferry/tensorferry.h"

namespace {

using tensorferry::Access;
using tensorferry::File;
using tensorferry::Handle;

constexpr std::size_t KiB = 1024;
constexpr std::size_t MiB = 1024 * KiB;
constexpr std::size_t page_bytes = 4096;
// Where torch puts a large tensor: on a multiple of 64, seldom on one that O_DIRECT accepts.
constexpr std::size_t ordinary_offset = 64;

enum class Direction { read, write };
enum class Mode { one, sync, path, many };
enum class MemoryKind { pinned, ordinary, fresh };
enum class FileState { existing, created };

struct Job {
  std::string path;
  Direction direction = Direction::read;
  Mode mode = Mode::one;
  MemoryKind memory = MemoryKind::pinned;
  FileState file_state = FileState::existing;
  std::size_t bytes = 256 * MiB;
  std::size_t file_bytes = 0;  // 0: as many as the job needs
  std::size_t count = 1000;    // calls per repetition (sync, path), tensors (many)
  unsigned repeat = 1;
  unsigned warm_up = 2;  // untimed repetitions
  std::uint64_t seed = 1;
  tensorferry::HandleOptions options;
};

const char usage[] =
    R"(ferry_job --file PATH [options]: runs one job and prints one line of JSON

  --direction read|write
  --mode one       one operation of --bytes, --repeat times
         sync      --count synchronous calls of --bytes at random offsets of an open File
         path      the same by path, and what opening and closing costs
         many      one read_many or write_many of --count tensors of 4 to 64 KiB
  --memory pinned|ordinary|fresh
                   page-locked; allocated, touched and on a multiple of 64 (not 512) bytes, as torch
                   gives it; the same, but mapped anew and untouched for each repetition
  --new-file       write files that do not exist yet, PATH.0, PATH.1, ... (mode one)
  --bytes N  --file-bytes N  --count N  --repeat N  --warm-up N  --seed N   N may end in K, M or G
  --engine auto|io_uring|libaio|threads  --block-bytes N  --queue-depth N  --workers N
  --submit batch|single  --overlap on|off
)";

// --- options -------------------------------------------------------------------------------------

std::size_t parse_size(const std::string& text) {
  std::size_t end = 0;
  std::size_t value = std::stoull(text, &end);
  const std::string unit = text.substr(end);
  if (unit == "K") return value * KiB;
  if (unit == "M") return value * MiB;
  if (unit == "G") return value * 1024 * MiB;
  if (!unit.empty()) throw std::invalid_argument("not a size: " + text);
  return value;
}

template <class Choice>
Choice parse_choice(const std::string& text,
                    std::initializer_list<std::pair<const char*, Choice>> choices) {
  for (const auto& [name, choice] : choices) {
    if (text == name) return choice;
  }
  throw std::invalid_argument("unknown choice: " + text);
}

void apply(Job& job, const std::string& name, const std::string& value) {
  const auto number = [&] { return static_cast<unsigned>(parse_size(value)); };
  if (name == "file") job.path = value;
  if (name == "direction") {
    job.direction =
        parse_choice<Direction>(value, {{"read", Direction::read}, {"write", Direction::write}});
  }
  if (name == "mode") {
    job.mode = parse_choice<Mode>(
        value,
        {{"one", Mode::one}, {"sync", Mode::sync}, {"path", Mode::path}, {"many", Mode::many}});
  }
  if (name == "memory") {
    job.memory = parse_choice<MemoryKind>(value, {{"pinned", MemoryKind::pinned},
                                                  {"ordinary", MemoryKind::ordinary},
                                                  {"fresh", MemoryKind::fresh}});
  }
  if (name == "new-file") job.file_state = FileState::created;
  if (name == "bytes") job.bytes = parse_size(value);
  if (name == "file-bytes") job.file_bytes = parse_size(value);
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

std::optional<Job> parse(int argument_count, char** arguments) {
  static const char* const with_value[] = {"file",        "direction",  "mode",   "memory",
                                           "bytes",       "file-bytes", "count",  "repeat",
                                           "warm-up",     "seed",       "engine", "block-bytes",
                                           "queue-depth", "workers",    "submit", "overlap"};
  std::vector<option> known;
  known.reserve(std::size(with_value) + 2);
  for (const char* name : with_value) known.push_back({name, required_argument, nullptr, 0});
  known.push_back({"new-file", no_argument, nullptr, 0});
  known.push_back({nullptr, 0, nullptr, 0});

  Job job;
  int index = 0;
  int found = 0;
  while ((found = getopt_long(argument_count, arguments, "", known.data(), &index)) != -1) {
    if (found != 0) return std::nullopt;
    apply(job, known[static_cast<std::size_t>(index)].name, optarg != nullptr ? optarg : "");
  }
  const bool writes_new_file = job.file_state == FileState::created;
  if (job.path.empty() || optind != argument_count || job.bytes == 0 || job.repeat == 0 ||
      (writes_new_file && (job.mode != Mode::one || job.direction != Direction::write))) {
    return std::nullopt;
  }
  return job;
}

// --- memory and files ----------------------------------------------------------------------------

// The memory of one job, of the kind it asks for.
class Memory {
 public:
  Memory(MemoryKind kind, std::size_t bytes) {
    if (kind == MemoryKind::pinned) {
      pinned_.emplace(bytes);
      bytes_ = pinned_->bytes();
      return;
    }
    mapped_bytes_ = bytes + page_bytes;
    mapped_ =
        mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    bytes_ = {static_cast<std::byte*>(mapped_) + ordinary_offset, bytes};
  }
  ~Memory() {
    if (mapped_bytes_ != 0) munmap(mapped_, mapped_bytes_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

  // Touches every page. Random, for drives that compress or look for zeros.
  void fill(std::uint64_t seed) const {
    std::mt19937_64 random(seed);
    std::vector<std::uint64_t> pattern(MiB / sizeof(std::uint64_t));
    std::generate(pattern.begin(), pattern.end(), random);
    for (std::size_t at = 0; at < bytes_.size(); at += MiB) {
      std::memcpy(bytes_.data() + at, pattern.data(), std::min(MiB, bytes_.size() - at));
    }
  }

 private:
  std::optional<tensorferry::PinnedBuffer> pinned_;
  void* mapped_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  std::span<std::byte> bytes_;
};

// Makes the file at least `bytes` long, with data in all of it.
void prepare_file(const Job& job, std::size_t bytes) {
  const File file = File::open(job.path, Access::read_write);
  if (file.size() >= bytes) return;
  const Memory memory(MemoryKind::pinned, std::min(bytes, 256 * MiB));
  memory.fill(job.seed);
  Handle handle;
  for (std::size_t at = 0; at < bytes; at += memory.bytes().size()) {
    const std::size_t length = std::min(memory.bytes().size(), bytes - at);
    handle.write(memory.bytes().first(length), file, at).wait();
  }
  handle.sync(file).wait();
}

// --- measuring -----------------------------------------------------------------------------------

struct Result {
  std::vector<double> seconds;      // per repetition
  std::vector<double> cpu_seconds;  // the same
  std::size_t bytes_per_repetition = 0;
  std::vector<double> call_seconds;  // sync and path: every call
  double open_close_seconds = 0;     // path: open(O_DIRECT) and close, the mean
  std::string engine, engine_reason, direct_reason;
  bool direct = false;
  std::size_t block_bytes = 0;
  tensorferry::Stats stats;
};

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// User and system time of all threads, those that the kernel adds for io_uring included.
double process_cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// One repetition; those that warm up leave no trace.
template <class Work>
void measure(Result& result, int repetition, Work work) {
  const double cpu_begin = process_cpu_seconds();
  const auto begin = Clock::now();
  work();
  const double took = since(begin);
  if (repetition < 0) return;
  result.seconds.push_back(took);
  result.cpu_seconds.push_back(process_cpu_seconds() - cpu_begin);
}

void transfer(Handle& handle, Direction direction, std::span<std::byte> memory, const File& file) {
  if (direction == Direction::read) {
    handle.read(memory, file).wait();
  } else {
    handle.write(memory, file).wait();
  }
}

void describe(Result& result, const Job& job, const Handle& handle, const File& file) {
  result.engine = handle.engine();
  result.engine_reason = handle.engine_reason();
  result.direct = file.direct();
  result.direct_reason = file.direct_reason();
  result.block_bytes = job.options.block_bytes != 0 ? job.options.block_bytes : file.block_bytes();
  result.stats = handle.stats();
}

File open_for(const Job& job) {
  return File::open(job.path, job.direction == Direction::read ? Access::read : Access::write);
}

Result run_one(const Job& job) {
  prepare_file(job, job.bytes);
  Handle handle(job.options);
  auto memory = std::make_unique<Memory>(job.memory, job.bytes);
  if (job.memory != MemoryKind::fresh) memory->fill(job.seed);
  const File file = open_for(job);

  Result result;
  result.bytes_per_repetition = job.bytes;
  for (int i = -static_cast<int>(job.warm_up); i < static_cast<int>(job.repeat); ++i) {
    if (job.memory == MemoryKind::fresh) {
      memory.reset();
      memory = std::make_unique<Memory>(job.memory, job.bytes);
    }
    measure(result, i, [&] { transfer(handle, job.direction, memory->bytes(), file); });
  }
  describe(result, job, handle, file);
  return result;
}

// Each repetition writes a file of its own, PATH.0, PATH.1, ..., because one that takes the blocks
// of a file just removed is another measurement. They are left to the caller to remove.
Result run_new_files(const Job& job) {
  Handle handle(job.options);
  const Memory memory(job.memory, job.bytes);
  memory.fill(job.seed);
  const auto create = [&](const std::string& name) {
    const std::string path = job.path + "." + name;
    if (access(path.c_str(), F_OK) == 0) throw std::runtime_error(path + " exists");
    return File::open(path, Access::write);
  };
  const File first = create("warm-up");
  transfer(handle, job.direction, memory.bytes().first(std::min(job.bytes, 16 * MiB)), first);

  Result result;
  result.bytes_per_repetition = job.bytes;
  for (unsigned i = 0; i < job.repeat; ++i) {
    const File file = create(std::to_string(i));
    measure(result, 0, [&] { transfer(handle, job.direction, memory.bytes(), file); });
  }
  describe(result, job, handle, first);
  return result;
}

template <class Where>
void transfer_now(Handle& handle, Direction direction, std::span<std::byte> memory,
                  const Where& where, std::uint64_t offset) {
  if (direction == Direction::read) {
    handle.read_now(memory, where, offset);
  } else {
    handle.write_now(memory, where, offset);
  }
}

double open_close_seconds(const Job& job) {
  const int flags = (job.direction == Direction::read ? O_RDONLY : O_WRONLY) | O_DIRECT | O_CLOEXEC;
  const auto begin = Clock::now();
  for (std::size_t i = 0; i < job.count; ++i) {
    const int descriptor = open(job.path.c_str(), flags);
    if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "open");
    close(descriptor);
  }
  return since(begin) / static_cast<double>(job.count);
}

Result run_sync(const Job& job) {
  const std::size_t file_bytes = std::max(job.file_bytes, job.bytes);
  prepare_file(job, file_bytes);
  Handle handle(job.options);
  const Memory memory(job.memory, job.bytes);
  memory.fill(job.seed);
  const File file = open_for(job);
  std::mt19937_64 random(job.seed);
  std::uniform_int_distribution<std::uint64_t> pick(0, file_bytes / job.bytes - 1);
  const auto call = [&] {
    const std::uint64_t offset = pick(random) * job.bytes;
    if (job.mode == Mode::path) {
      transfer_now(handle, job.direction, memory.bytes(), job.path, offset);
    } else {
      transfer_now(handle, job.direction, memory.bytes(), file, offset);
    }
  };

  Result result;
  result.bytes_per_repetition = job.bytes * job.count;
  result.call_seconds.reserve(job.count * job.repeat);
  for (int i = -static_cast<int>(job.warm_up); i < static_cast<int>(job.repeat); ++i) {
    measure(result, i, [&] {
      for (std::size_t n = 0; n < job.count; ++n) {
        const auto begin = Clock::now();
        call();
        const double took = since(begin);
        if (i >= 0) result.call_seconds.push_back(took);
      }
    });
  }
  if (job.mode == Mode::path) result.open_close_seconds = open_close_seconds(job);
  describe(result, job, handle, file);
  return result;
}

Result run_many(const Job& job) {
  std::mt19937_64 random(job.seed);
  std::uniform_int_distribution<std::size_t> pages(1, 16);
  std::vector<std::size_t> sizes(job.count);
  for (std::size_t& size : sizes) size = pages(random) * 4 * KiB;
  const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
  prepare_file(job, total);

  Handle handle(job.options);
  const Memory memory(job.memory, total);
  if (job.memory != MemoryKind::fresh) memory.fill(job.seed);
  const File file = open_for(job);
  std::vector<tensorferry::ReadTransfer> reads;
  std::vector<tensorferry::WriteTransfer> writes;
  std::uint64_t at = 0;
  for (const std::size_t size : sizes) {
    reads.push_back({memory.bytes().subspan(at, size), file, at});
    writes.push_back({memory.bytes().subspan(at, size), file, at});
    at += size;
  }

  Result result;
  result.bytes_per_repetition = total;
  for (int i = -static_cast<int>(job.warm_up); i < static_cast<int>(job.repeat); ++i) {
    measure(result, i, [&] {
      if (job.direction == Direction::read) {
        handle.read_many(reads).wait();
      } else {
        handle.write_many(writes).wait();
      }
    });
  }
  describe(result, job, handle, file);
  return result;
}

Result run(const Job& job) {
  switch (job.mode) {
    case Mode::one:
      return job.file_state == FileState::created ? run_new_files(job) : run_one(job);
    case Mode::many:
      return run_many(job);
    case Mode::sync:
    case Mode::path:
      return run_sync(job);
  }
  throw std::logic_error("a mode without a runner");
}

// --- the line of JSON ----------------------------------------------------------------------------

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string list(const std::vector<double>& values) {
  std::string out = "[";
  for (const double value : values) out += (out.size() > 1 ? ", " : "") + number(value);
  return out + "]";
}

std::string stats_json(const tensorferry::Stats& stats) {
  std::string out = "{";
  const auto add = [&out](const char* name, std::uint64_t value) {
    out += quoted(name) + ": " + std::to_string(value) + ", ";
  };
  add("operations", stats.operations);
  add("failed_operations", stats.failed_operations);
  add("inline_operations", stats.inline_operations);
  add("requests", stats.requests);
  add("read_bytes", stats.read_bytes);
  add("written_bytes", stats.written_bytes);
  add("bounced_bytes", stats.bounced_bytes);
  add("fixed_requests", stats.fixed_requests);
  add("retries", stats.retries);
  add("short_transfers", stats.short_transfers);
  add("refused_submissions", stats.refused_submissions);
  add("fallbacks", stats.fallbacks);
  add("latency_ns_p50", stats.latency_ns_p50);
  add("latency_ns_p99", stats.latency_ns_p99);
  out += "\"fallback_reasons\": [";
  for (std::size_t i = 0; i < stats.fallback_reasons.size(); ++i) {
    out += (i > 0 ? ", " : "") + quoted(stats.fallback_reasons[i]);
  }
  return out + "], \"cpu_seconds\": " + number(stats.cpu_seconds) + "}";
}

void print(Result& result) {
  const double total_seconds = std::accumulate(result.seconds.begin(), result.seconds.end(), 0.0);
  const double cpu = std::accumulate(result.cpu_seconds.begin(), result.cpu_seconds.end(), 0.0);
  const double gigabytes = static_cast<double>(result.bytes_per_repetition) *
                           static_cast<double>(result.seconds.size()) / 1e9;
  std::string out = "{\"engine\": " + quoted(result.engine) +
                    ", \"engine_reason\": " + quoted(result.engine_reason) +
                    ", \"direct\": " + (result.direct ? "true" : "false") +
                    ", \"direct_reason\": " + quoted(result.direct_reason) +
                    ", \"block_bytes\": " + std::to_string(result.block_bytes) +
                    ", \"bytes\": " + std::to_string(result.bytes_per_repetition) +
                    ", \"seconds\": " + list(result.seconds) +
                    ", \"cpu_seconds\": " + list(result.cpu_seconds) +
                    ", \"gb_per_second\": " + number(gigabytes / total_seconds) +
                    ", \"cpu_seconds_per_gb\": " + number(cpu / gigabytes);
  if (std::vector<double>& calls = result.call_seconds; !calls.empty()) {
    std::sort(calls.begin(), calls.end());
    const double sum = std::accumulate(calls.begin(), calls.end(), 0.0);
    out += ", \"call_us\": {\"mean\": " + number(sum * 1e6 / static_cast<double>(calls.size())) +
           ", \"p50\": " + number(calls[calls.size() / 2] * 1e6) +
           ", \"p99\": " + number(calls[calls.size() * 99 / 100] * 1e6) + "}" +
           ", \"open_close_us\": " + number(result.open_close_seconds * 1e6);
  }
  std::printf("%s, \"stats\": %s}\n", out.c_str(), stats_json(result.stats).c_str());
}

}  // namespace

int main(int argument_count, char** arguments) {
  try {
    const std::optional<Job> job = parse(argument_count, arguments);
    if (!job) {
      std::fputs(usage, stderr);
      return 2;
    }
    Result result = run(*job);
    print(result);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ferry_job: %s\n", error.what());
    return 1;
  }
}
