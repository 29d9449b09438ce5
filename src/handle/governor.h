// Holds background operations back where others use the same drive, and all operations of a class
// or a handle to a rate. Of each drive the process has one governor, for all its handles.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/alignment.h"
#include "handle/plan.h"
#include "tensorferry/options.h"
#include "tensorferry/priority.h"

namespace tensorferry::handle {

// Whether the process has used a class other than `normal`, or a rate. Until then nothing else
// here is looked at: a program that uses none of it pays for one branch.
namespace classes {
inline std::atomic<bool> used{false};
}
[[nodiscard]] inline bool classes_in_use() noexcept {
  return classes::used.load(std::memory_order_relaxed);
}
inline void use_classes() noexcept { classes::used.store(true, std::memory_order_relaxed); }

// The priority of an operation: as its call says, else as the thread's scope does, else that of the
// handle.
[[nodiscard]] inline Priority choose_priority(std::optional<Priority> asked, Priority of_handle) {
  if (asked && *asked != Priority::normal) use_classes();
  if (!classes_in_use()) return Priority::normal;
  return asked ? *asked : scope_priority().value_or(of_handle);
}

// A limit of bytes per second. Whoever starts a block when the rate is due starts all of it; the
// next one waits for as long as those bytes take. Thread-safe, without locks: a fork may come at
// any time.
class Rate {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Rate(std::uint64_t bytes_per_second = 0) noexcept
      : bytes_per_second_(bytes_per_second) {}

  void set(std::uint64_t bytes_per_second) noexcept;
  [[nodiscard]] std::uint64_t get() const noexcept { return bytes_per_second_.load(); }
  [[nodiscard]] bool limits() const noexcept { return get() > 0; }
  // How long until the next block may start; zero: now.
  [[nodiscard]] Clock::duration due_in(Clock::time_point now) const noexcept;
  void charge(std::uint64_t bytes, Clock::time_point now) noexcept;

  // That of a class, for the whole process.
  [[nodiscard]] static Rate& of(Priority priority) noexcept;

 private:
  std::atomic<std::uint64_t> bytes_per_second_;  // 0: no limit
  std::atomic<std::int64_t> next_{0};            // nanoseconds since the clock's epoch
};

// Of one drive. Thread-safe, without locks.
class Governor {
 public:
  using Clock = std::chrono::steady_clock;

  // The fewest and the most bytes that may be under way in the background beside others.
  static constexpr std::uint64_t limit_min = 1 * MiB;
  static constexpr std::uint64_t limit_max = 32 * MiB;

  // That of the drive with this number (Device::number), for the whole process. A child of fork()
  // begins with nothing under way.
  [[nodiscard]] static Governor& of(std::string_view number) noexcept;

  // Whether one more request may start in the background.
  [[nodiscard]] bool admits(Clock::time_point now) const noexcept {
    return under_way_.load(std::memory_order_relaxed) < limit(now);
  }
  // How many bytes may be under way in the background now.
  [[nodiscard]] std::uint64_t limit(Clock::time_point now) const noexcept;
  [[nodiscard]] std::uint64_t under_way() const noexcept { return under_way_.load(); }
  void background_begins(std::uint64_t bytes) noexcept { under_way_.fetch_add(bytes); }
  void background_ends(std::uint64_t bytes) noexcept { under_way_.fetch_sub(bytes); }

  // A request of this class begins, or has ended after so long. One with 0 bytes, such as a sync,
  // says nothing of what others suffer.
  void begins(Priority priority, Clock::time_point now) noexcept;
  void ended(Priority priority, Direction direction, std::uint64_t bytes, Clock::time_point begin,
             Clock::time_point now) noexcept;

  void forget() noexcept;

 private:
  void adapt(std::atomic<std::uint64_t>& shortest, std::uint64_t took) noexcept;

  // For each power of two of bytes.
  static constexpr std::size_t sizes = 32;
  std::array<std::array<std::atomic<std::uint64_t>, sizes>, 2> shortest_{};  // nanoseconds
  std::atomic<std::uint64_t> under_way_{0};
  std::atomic<std::uint64_t> limit_{6 * MiB};  // beside others
  std::atomic<std::int64_t> urgent_until_{0};  // since the clock's epoch
  std::atomic<std::int64_t> normal_until_{0};
};

// What one crew has under way in the background.
class Background {
 public:
  explicit Background(Governor& governor) noexcept : governor_(governor) {}

  [[nodiscard]] Governor& governor() const noexcept { return governor_; }
  [[nodiscard]] bool idle() const noexcept { return under_way_.load() == 0; }
  void begins(std::uint64_t bytes) noexcept {
    under_way_.fetch_add(bytes);
    governor_.background_begins(bytes);
  }
  void ends(std::uint64_t bytes) noexcept {
    under_way_.fetch_sub(bytes);
    governor_.background_ends(bytes);
  }

 private:
  Governor& governor_;
  std::atomic<std::uint64_t> under_way_{0};
};

}  // namespace tensorferry::handle
