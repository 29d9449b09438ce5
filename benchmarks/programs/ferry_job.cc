// Runs one job over the public API, as fio runs one, and prints one line of JSON. compare.py
// calls it; `ferry_job --help` lists the options.
//
// It times the transfer alone. Before the clock starts it prepares files, allocates memory and
// makes --warm-up repetitions, which set up the rings, register the buffers and touch the slots, as
// fio does before its own clock starts. There are two, because in a virtual machine the first two
// reads into new memory are slower, and fio has few buffers to warm up.
// Reads are cold: they are direct, or `direct` is false.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
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

#include "drive_jobs.h"
#include "job_options.h"
#include "job_report.h"
#include "job_setup.h"
#include "tensorferry/tensorferry.h"

namespace {

using tensorferry::Access;
using tensorferry::File;
using tensorferry::Handle;

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
Result run_one(const Job& job) {
  const std::size_t bytes = job.bytes() * job.threads;
  prepare_file(job.path(), job.offset + bytes, job.seed);
  Handle handle(job.options);
  auto memory = std::make_unique<Memory>(job.memory, bytes);
  if (job.memory != MemoryKind::fresh) memory->fill(job.seed);
  const File file = open_for(job, job.path());
  std::optional<Copies> copies;
  if (job.beside_copies) copies.emplace(job.direction, bytes);
  Team team(job.threads, [&](unsigned thread) {
    const std::size_t at = thread * job.bytes();
    transfer(handle, job.direction, memory->bytes().subspan(at, job.bytes()), file,
             job.offset + at);
  });

  Result result;
  result.bytes_per_repetition = bytes;
  result.operations_per_repetition = job.threads;
  for (int i = -static_cast<int>(job.warm_up); i < static_cast<int>(job.repeat); ++i) {
    if (job.memory == MemoryKind::fresh) {
      memory.reset();
      memory = std::make_unique<Memory>(job.memory, bytes);
    }
    if (i == 0 && job.wait_to_start) wait_to_start();
    const std::jthread beside = copies ? copies->start() : std::jthread();
    measure(result, i, [&] { team.run(); });
  }
  result.end_ns = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  describe(result, job, handle, file);
  return result;
}

// Each repetition writes its own file, PATH.0, PATH.1, ...: reusing the blocks of a file just
// removed would be another measurement. The caller removes them.
Result run_new_files(const Job& job) {
  Handle handle(job.options);
  const Memory memory(job.memory, job.bytes());
  memory.fill(job.seed);
  const auto create = [&](const std::string& name) {
    const std::string path = job.path() + "." + name;
    if (access(path.c_str(), F_OK) == 0) throw std::runtime_error(path + " exists");
    return File::open(path, Access::write);
  };
  const File first = create("warm-up");
  transfer(handle, job.direction, memory.bytes().first(std::min(job.bytes(), 16 * MiB)), first);

  Result result;
  result.bytes_per_repetition = job.bytes();
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
    const int descriptor = open(job.path().c_str(), flags);
    if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "open");
    close(descriptor);
    took = since(begin);
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

// The part of one thread in a job of many small operations.
struct Caller {
  std::span<std::byte> memory;
  std::mt19937_64 random;
  std::vector<double> call_seconds;  // of this repetition
};

// One for each thread, with `bytes` of the memory.
std::vector<Caller> callers(const Job& job, const Memory& memory, std::size_t bytes) {
  std::vector<Caller> found(job.threads);
  for (unsigned i = 0; i < job.threads; ++i) {
    found[i].memory = memory.bytes().subspan(i * bytes, bytes);
    found[i].random.seed(job.seed + (std::uint64_t{i} << 32));
    found[i].call_seconds.reserve(job.count);
  }
  return found;
}

// Moves the times of the last repetition into the result, unless it was a warm-up.
void take_calls(Result& result, int repetition, std::vector<Caller>& callers) {
  for (Caller& caller : callers) {
    if (repetition >= 0) {
      result.call_seconds.insert(result.call_seconds.end(), caller.call_seconds.begin(),
                                 caller.call_seconds.end());
    }
    caller.call_seconds.clear();
  }
}

// Every thread makes --count calls, one after the other.
Result run_sync(const Job& job) {
  const std::size_t file_bytes = std::max(job.file_bytes, job.bytes());
  prepare_file(job.path(), file_bytes, job.seed);
  Handle handle(job.options);
  const Memory memory(job.memory, job.bytes() * job.threads);
  memory.fill(job.seed);
  const File file = open_for(job, job.path());
  std::vector<Caller> all = callers(job, memory, job.bytes());
  Team team(job.threads, [&](unsigned thread) {
    Caller& caller = all[thread];
    std::uniform_int_distribution<std::uint64_t> pick(0, file_bytes / job.bytes() - 1);
    for (std::size_t n = 0; n < job.count; ++n) {
      const std::uint64_t offset = pick(caller.random) * job.bytes();
      const auto begin = Clock::now();
      if (job.mode == Mode::path) {
        transfer_now(handle, job.direction, caller.memory, job.path(), offset);
      } else {
        transfer_now(handle, job.direction, caller.memory, file, offset);
      }
      caller.call_seconds.push_back(since(begin));
    }
  });

  Result result;
  result.operations_per_repetition = job.count * job.threads;
  result.bytes_per_repetition = job.bytes() * result.operations_per_repetition;
  result.call_seconds.reserve(result.operations_per_repetition * job.repeat);
  for (int i = -static_cast<int>(job.warm_up); i < static_cast<int>(job.repeat); ++i) {
    measure(result, i, [&] { team.run(); });
    take_calls(result, i, all);
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

// Every thread makes --count operations and keeps --in-flight of them running; leaks would show
// after a million of them.
Result run_queue(const Job& job) {
  const std::size_t file_bytes = std::max(job.file_bytes, job.bytes());
  prepare_file(job.path(), file_bytes, job.seed);
  Handle handle(job.options);
  const Memory memory(job.memory, job.bytes() * job.in_flight * job.threads);
  memory.fill(job.seed);
  const File file = open_for(job, job.path());
  std::vector<Caller> all = callers(job, memory, job.bytes() * job.in_flight);
  Team team(job.threads, [&](unsigned thread) {
    Caller& caller = all[thread];
    std::uniform_int_distribution<std::uint64_t> pick(0, file_bytes / job.bytes() - 1);
    std::vector<std::optional<tensorferry::Operation>> operations(job.in_flight);
    Clock::time_point begin;
    for (std::size_t n = 0; n < job.count + job.in_flight; ++n) {
      const std::size_t slot = n % job.in_flight;
      if (operations[slot]) {
        operations[slot]->wait();
        if (job.in_flight == 1) caller.call_seconds.push_back(since(begin));
      }
      if (n >= job.count) continue;
      const std::uint64_t offset = pick(caller.random) * job.bytes();
      if (job.in_flight == 1) begin = Clock::now();
      operations[slot] =
          begin_transfer(handle, job.direction,
                         caller.memory.subspan(slot * job.bytes(), job.bytes()), file, offset);
    }
  });

  Result result;
  result.operations_per_repetition = job.count * job.threads;
  result.bytes_per_repetition = job.bytes() * result.operations_per_repetition;
  for (int i = -static_cast<int>(job.warm_up); i < static_cast<int>(job.repeat); ++i) {
    measure(result, i, [&] { team.run(); });
    take_calls(result, i, all);
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
  prepare_file(job.path(), total, job.seed);

  Handle handle(job.options);
  const Memory memory(job.memory, total);
  if (job.memory != MemoryKind::fresh) memory.fill(job.seed);
  const File file = open_for(job, job.path());
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
  result.operations_per_repetition = job.count;
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
    case Mode::drives:
      return run_drives(job);
    case Mode::swap:
      return run_swap(job);
  }
  throw std::logic_error("this mode has no runner");
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
