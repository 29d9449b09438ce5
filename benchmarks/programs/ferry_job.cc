// Runs one job over the public API, as fio runs one, and prints one line of JSON. compare.py
// calls it; `ferry_job --help` lists the options.
//
// It times the transfer alone. Before the clock starts it prepares files, allocates memory and
// makes --warm-up repetitions, which set up the rings, register the buffers and touch the slots, as
// fio does before its own clock starts. There are two, because in a virtual machine the first two
// reads into new memory are slower, and fio has few buffers to warm up.
// Reads are cold: they are direct, or `direct` is false.
#include <fcntl.h>
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
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "job_options.h"
#include "tensorferry/tensorferry.h"

namespace {

using tensorferry::Access;
using tensorferry::File;
using tensorferry::Handle;

constexpr std::size_t KiB = 1024;
constexpr std::size_t MiB = 1024 * KiB;
constexpr std::size_t page_bytes = 4096;
// torch puts a large tensor on a multiple of 64 bytes, seldom on one that O_DIRECT accepts.
constexpr std::size_t ordinary_offset = 64;

// --- memory and files ----------------------------------------------------------------------------

// The memory of one job.
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

  // Touches every page. Random bytes, because some drives compress or detect zeros.
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

// Extends the file to at least `bytes`, with data.
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
  double open_close_seconds = 0;     // path: open(O_DIRECT) and close, the median
  std::vector<double> resident_kib;  // queue: after each repetition
  std::vector<double> descriptors;   // the same
  std::int64_t end_ns = 0;           // of the monotonic clock
  std::string engine, engine_reason, direct_reason;
  bool direct = false;
  std::uint64_t request_bytes = 0;  // the mean
  unsigned queue_depth = 0;         // of all workers together
  tensorferry::Stats stats;
};

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// User and system time of all threads, including the kernel's threads for io_uring.
double process_cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// One repetition; untimed ones record nothing.
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

tensorferry::Operation begin_transfer(Handle& handle, Direction direction,
                                      std::span<std::byte> memory, const File& file,
                                      std::uint64_t offset) {
  return direction == Direction::read ? handle.read(memory, file, offset)
                                      : handle.write(memory, file, offset);
}

void transfer(Handle& handle, Direction direction, std::span<std::byte> memory, const File& file,
              std::uint64_t offset = 0) {
  begin_transfer(handle, direction, memory, file, offset).wait();
}

// Prints "ready" and waits for a line, so that several jobs can begin together.
void wait_to_start() {
  std::puts("ready");
  std::fflush(stdout);
  while (std::getchar() != '\n' && std::feof(stdin) == 0) {
  }
}

void describe(Result& result, const Job& job, const Handle& handle, const File& file) {
  result.engine = handle.engine();
  result.engine_reason = handle.engine_reason();
  result.direct = file.direct();
  result.direct_reason = file.direct_reason();
  result.stats = handle.stats();
  const std::uint64_t moved = result.stats.read_bytes + result.stats.written_bytes;
  result.request_bytes = moved / std::max<std::uint64_t>(result.stats.requests, 1);
  result.queue_depth = job.options.queue_depth != 0
                           ? job.options.queue_depth
                           : tensorferry::device_of(file.path()).queue_depth;
}

File open_for(const Job& job) {
  return File::open(job.path, job.direction == Direction::read ? Access::read : Access::write);
}

// The load of ordinary memory's slots without slots: copies as many bytes between memory that is in
// no cache and a few megabytes that it uses repeatedly.
class Copies {
 public:
  Copies(Direction direction, std::size_t bytes)
      : direction_(direction), users_(bytes), slots_(slots_bytes()) {}

  [[nodiscard]] std::jthread start() {
    return std::jthread([this](const std::stop_token& stop) {
      constexpr std::size_t block = 512 * KiB;
      for (std::size_t at = 0; at + block <= users_.size() && !stop.stop_requested(); at += block) {
        const std::span user = std::span(users_).subspan(at, block);
        const std::span slot = std::span(slots_).subspan(at % slots_.size(), block);
        if (direction_ == Direction::read) {
          tensorferry::copy(user, slot, tensorferry::Destination::cold);
        } else {
          tensorferry::copy(slot, user);
        }
      }
    });
  }

 private:
  // As much as a handle has in flight in its slots.
  static std::size_t slots_bytes() {
    const auto cache = static_cast<std::size_t>(std::max(::sysconf(_SC_LEVEL3_CACHE_SIZE), 0L));
    return std::max(cache / 4 / MiB, std::size_t{4}) * MiB;
  }

  const Direction direction_;
  std::vector<std::byte> users_, slots_;
};

// One transfer, or one per thread at the same time, each of its own part of the file.
void transfer_all(Handle& handle, const Job& job, std::span<std::byte> memory, const File& file) {
  std::vector<std::future<void>> others;
  for (unsigned i = 1; i < job.threads; ++i) {
    others.push_back(std::async(std::launch::async, [&, at = i * job.bytes] {
      transfer(handle, job.direction, memory.subspan(at, job.bytes), file, job.offset + at);
    }));
  }
  transfer(handle, job.direction, memory.first(job.bytes), file, job.offset);
  for (std::future<void>& other : others) other.get();
}

Result run_one(const Job& job) {
  const std::size_t bytes = job.bytes * job.threads;
  prepare_file(job, job.offset + bytes);
  Handle handle(job.options);
  auto memory = std::make_unique<Memory>(job.memory, bytes);
  if (job.memory != MemoryKind::fresh) memory->fill(job.seed);
  const File file = open_for(job);
  std::optional<Copies> copies;
  if (job.beside_copies) copies.emplace(job.direction, bytes);

  Result result;
  result.bytes_per_repetition = bytes;
  for (int i = -static_cast<int>(job.warm_up); i < static_cast<int>(job.repeat); ++i) {
    if (job.memory == MemoryKind::fresh) {
      memory.reset();
      memory = std::make_unique<Memory>(job.memory, bytes);
    }
    if (i == 0 && job.wait_to_start) wait_to_start();
    const std::jthread beside = copies ? copies->start() : std::jthread();
    measure(result, i, [&] { transfer_all(handle, job, memory->bytes(), file); });
  }
  result.end_ns = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  describe(result, job, handle, file);
  return result;
}

// Each repetition writes its own file, PATH.0, PATH.1, ...: reusing the blocks of a file just
// removed would be another measurement. The caller removes them.
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
  std::vector<double> seconds(job.count);
  for (double& took : seconds) {
    const auto begin = Clock::now();
    const int descriptor = open(job.path.c_str(), flags);
    if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "open");
    close(descriptor);
    took = since(begin);
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
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

double resident_kib() {
  std::ifstream statm("/proc/self/statm");
  double total_pages = 0;
  double resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE)) / KiB;
}

double open_descriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<double>(std::distance(begin(entries), end(entries)));
}

// Keeps `in_flight` operations running; leaks would show after a million of them.
Result run_queue(const Job& job) {
  constexpr std::size_t in_flight = 64;
  const std::size_t file_bytes = std::max(job.file_bytes, job.bytes);
  prepare_file(job, file_bytes);
  Handle handle(job.options);
  const Memory memory(job.memory, job.bytes * in_flight);
  memory.fill(job.seed);
  const File file = open_for(job);
  std::mt19937_64 random(job.seed);
  std::uniform_int_distribution<std::uint64_t> pick(0, file_bytes / job.bytes - 1);

  Result result;
  result.bytes_per_repetition = job.bytes * job.count;
  for (int i = -static_cast<int>(job.warm_up); i < static_cast<int>(job.repeat); ++i) {
    measure(result, i, [&] {
      std::vector<std::optional<tensorferry::Operation>> operations(in_flight);
      for (std::size_t n = 0; n < job.count + in_flight; ++n) {
        std::optional<tensorferry::Operation>& operation = operations[n % in_flight];
        if (operation) operation->wait();
        if (n >= job.count) continue;
        operation = begin_transfer(handle, job.direction,
                                   memory.bytes().subspan(n % in_flight * job.bytes, job.bytes),
                                   file, pick(random) * job.bytes);
      }
    });
    if (i < 0) continue;
    result.resident_kib.push_back(resident_kib());
    result.descriptors.push_back(open_descriptors());
  }
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
    case Mode::queue:
      return run_queue(job);
    case Mode::many:
      return run_many(job);
    case Mode::sync:
    case Mode::path:
      return run_sync(job);
  }
  throw std::logic_error("this mode has no runner");
}

// --- the line of JSON ----------------------------------------------------------------------------

std::string json_text(const std::string& text) {
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
    out += json_text(name) + ": " + std::to_string(value) + ", ";
  };
  for (const auto& counter : tensorferry::stats_counters) add(counter.name, stats.*counter.value);
  add("latency_ns_p50", stats.latency_ns_p50);
  add("latency_ns_p99", stats.latency_ns_p99);
  out += "\"fallback_reasons\": [";
  for (std::size_t i = 0; i < stats.fallback_reasons.size(); ++i) {
    out += (i > 0 ? ", " : "") + json_text(stats.fallback_reasons[i]);
  }
  return out + "], \"cpu_seconds\": " + number(stats.cpu_seconds) + "}";
}

void print(Result& result) {
  const double total_seconds = std::accumulate(result.seconds.begin(), result.seconds.end(), 0.0);
  const double cpu = std::accumulate(result.cpu_seconds.begin(), result.cpu_seconds.end(), 0.0);
  const double gigabytes = static_cast<double>(result.bytes_per_repetition) *
                           static_cast<double>(result.seconds.size()) / 1e9;
  std::string out = "{\"engine\": " + json_text(result.engine) +
                    ", \"engine_reason\": " + json_text(result.engine_reason) +
                    ", \"direct\": " + (result.direct ? "true" : "false") +
                    ", \"direct_reason\": " + json_text(result.direct_reason) +
                    ", \"request_bytes\": " + std::to_string(result.request_bytes) +
                    ", \"queue_depth\": " + std::to_string(result.queue_depth) +
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
  if (result.end_ns != 0) out += ", \"end_ns\": " + std::to_string(result.end_ns);
  if (!result.resident_kib.empty()) {
    out += ", \"resident_kib\": " + list(result.resident_kib) +
           ", \"descriptors\": " + list(result.descriptors);
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
