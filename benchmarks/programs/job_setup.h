// What the kinds of job share: memory, files, the clock, and threads that work together.
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "job_options.h"
#include "job_report.h"
#include "tensorferry/tensorferry.h"

inline constexpr std::size_t KiB = 1024;
inline constexpr std::size_t MiB = 1024 * KiB;

// The memory of one job.
class Memory {
 public:
  Memory(MemoryKind kind, std::size_t bytes);  // throws std::system_error and tensorferry::Error
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

  // Touches every page. Random bytes, because some drives compress or detect zeros.
  void fill(std::uint64_t seed) const;

 private:
  std::optional<tensorferry::PinnedBuffer> pinned_;
  void* mapped_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  std::span<std::byte> bytes_;
};

// Extends a file to at least `bytes`, with data.
void prepare_file(const std::string& path, std::size_t bytes, std::uint64_t seed);

[[nodiscard]] tensorferry::File open_for(const Job& job, const std::string& path);

[[nodiscard]] tensorferry::Operation begin_transfer(tensorferry::Handle& handle,
                                                    Direction direction,
                                                    std::span<std::byte> memory,
                                                    const tensorferry::File& file,
                                                    std::uint64_t offset);

// Notes the engine, the counters and how `file` was opened.
void describe(Result& result, const Job& job, const tensorferry::Handle& handle,
              const tensorferry::File& file);

using Clock = std::chrono::steady_clock;

[[nodiscard]] double since(Clock::time_point begin);

// What the whole process has used so far: all threads, including the kernel's for io_uring.
struct Used {
  double cpu_seconds = 0;
  double context_switches = 0;  // voluntary and not
};
[[nodiscard]] Used used_so_far();

// One repetition; those with a negative number are warm-ups, which record nothing.
template <class Work>
void measure(Result& result, int repetition, Work work) {
  const Used before = used_so_far();
  const auto begin = Clock::now();
  work();
  const double took = since(begin);
  if (repetition < 0) return;
  const Used after = used_so_far();
  result.seconds.push_back(took);
  result.cpu_seconds.push_back(after.cpu_seconds - before.cpu_seconds);
  result.context_switches.push_back(after.context_switches - before.context_switches);
}

// Threads that work at the same time, as often as asked. They live as long as the team, because
// fio starts its own before its clock starts.
class Team {
 public:
  // `work(i)` is the work of thread i; the caller of run() is thread 0.
  Team(unsigned threads, std::function<void(unsigned)> work);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Returns when all threads have done their work. Throws what one of them threw.
  void run();

 private:
  void work_as(unsigned thread) noexcept;

  const std::function<void(unsigned)> work_;
  std::barrier<> gate_;
  std::atomic<bool> ended_ = false;
  std::mutex mutex_;
  std::exception_ptr error_;  // under mutex_
  std::vector<std::jthread> others_;
};
