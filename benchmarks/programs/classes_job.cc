// Reads of one thread beside a saturating write of another handle, on one file each, and prints one
// line of JSON: how long the reads took, and how fast the write was. `classes_job --help` lists the
// options.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tensorferry/tensorferry.h"

namespace {

using namespace tensorferry;
using Clock = std::chrono::steady_clock;
constexpr std::size_t MiB = std::size_t{1} << 20;

struct Job {
  std::string directory;
  std::size_t read_bytes = 0;    // of each read; 0: no reads
  bool writes = false;           // a saturating write beside
  bool classes = false;          // reads are urgent, the write is in the background
  std::uint64_t rate = 0;        // of the write
  double pause_seconds = 0.005;  // between reads
  double seconds = 3;
  std::size_t file_bytes = 1024 * MiB;
};

Job parse(int argc, char** argv) {
  Job job;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&] {
      if (++i == argc) throw std::runtime_error(word + " needs a value");
      return std::string(argv[i]);
    };
    if (word == "--directory")
      job.directory = value();
    else if (word == "--read-bytes")
      job.read_bytes = std::stoull(value());
    else if (word == "--write")
      job.writes = true;
    else if (word == "--classes")
      job.classes = true;
    else if (word == "--rate")
      job.rate = std::stoull(value());
    else if (word == "--pause")
      job.pause_seconds = std::stod(value());
    else if (word == "--seconds")
      job.seconds = std::stod(value());
    else if (word == "--file-bytes")
      job.file_bytes = std::stoull(value());
    else {
      throw std::runtime_error(
          "usage: classes_job --directory FOLDER [--read-bytes N] [--write] [--classes] [--rate N] "
          "[--pause SECONDS] [--seconds SECONDS] [--file-bytes N]");
    }
  }
  if (job.directory.empty()) throw std::runtime_error("--directory is missing");
  return job;
}

// A file of so many bytes, all written, so that neither reads nor writes meet holes.
std::string prepare(const Job& job, const char* name) {
  const std::string path = job.directory + "/" + name;
  if (::access(path.c_str(), F_OK) == 0) return path;
  Handle handle;
  const PinnedBuffer memory(8 * MiB);
  const File file = File::open(path, Access::write);
  for (std::size_t at = 0; at < job.file_bytes; at += memory.bytes().size()) {
    handle.write_now(memory.bytes(), file, at);
  }
  handle.sync(file).wait();
  return path;
}

// Overwrites its file again and again, with `in_flight` writes of 16 MiB under way.
class Writer {
 public:
  explicit Writer(const Job& job)
      : job_(job), file_(File::open(prepare(job, "written"), Access::write)) {
    HandleOptions options;
    options.rate = job.rate;
    if (job.classes) options.priority = Priority::background;
    handle_.emplace(options);
  }

  void run(const std::atomic<bool>& over) {
    constexpr std::size_t piece = 16 * MiB;
    constexpr std::size_t in_flight = 4;
    const PinnedBuffer memory(piece * in_flight);
    std::deque<Operation> under_way;
    for (std::size_t i = 0; !over; ++i) {
      if (under_way.size() == in_flight) {
        under_way.front().wait();
        under_way.pop_front();
      }
      const auto from = memory.bytes().subspan(i % in_flight * piece, piece);
      under_way.push_back(handle_->write(from, file_, i * piece % job_.file_bytes));
    }
    handle_->cancel_all();
    for (const Operation& one : under_way) {
      while (!one.done()) std::this_thread::yield();
      (void)one.error();
    }
  }
  [[nodiscard]] std::uint64_t bytes() const { return handle_->stats().written_bytes; }

 private:
  const Job& job_;
  const File file_;
  std::optional<Handle> handle_;
};

// Reads at random places, one at a time, and returns the seconds of each.
std::vector<double> read(const Job& job, Clock::time_point end) {
  HandleOptions options;
  if (job.classes) options.priority = Priority::urgent;
  Handle handle(options);
  const File file = File::open(prepare(job, "read"), Access::read);
  const PinnedBuffer memory(job.read_bytes);
  std::mt19937_64 dice(1);
  std::vector<double> seconds;
  while (Clock::now() < end) {
    const std::uint64_t at = dice() % (job.file_bytes / job.read_bytes) * job.read_bytes;
    const auto begin = Clock::now();
    handle.read_now(memory.bytes(), file, at);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    std::this_thread::sleep_for(std::chrono::duration<double>(job.pause_seconds));
  }
  return seconds;
}

double quantile(std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const auto at = static_cast<std::size_t>(share * static_cast<double>(values.size()));
  return values.at(std::min(at, values.size() - 1));
}

void run(const Job& job) {
  if (job.read_bytes > 0) prepare(job, "read");
  Writer writer(job);
  std::atomic<bool> over{false};
  std::thread beside;
  if (job.writes) beside = std::thread([&] { writer.run(over); });
  const auto until = [](double seconds) {
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  };
  const auto pass = [&](Clock::time_point end) {
    if (job.read_bytes > 0) return read(job, end);
    std::this_thread::sleep_until(end);
    return std::vector<double>();
  };
  (void)pass(until(0.5));
  const std::uint64_t before = writer.bytes();
  const auto begin = Clock::now();
  std::vector<double> reads = pass(until(job.seconds));
  const double took = std::chrono::duration<double>(Clock::now() - begin).count();
  const double written = static_cast<double>(writer.bytes() - before) / took;
  over = true;
  if (beside.joinable()) beside.join();
  std::printf(
      "{\"reads\": %zu, \"read_p50\": %.9f, \"read_p99\": %.9f, \"written_per_second\": %.0f}\n",
      reads.size(), quantile(reads, 0.5), quantile(reads, 0.99), written);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "classes_job: %s\n", error.what());
    return 1;
  }
  return 0;
}
