// What all handles of the process may have together: workers, each with a thread and an engine, and
// page-locked memory for slots. However many drives a program uses, it stays within these limits.
#pragma once

#include <atomic>
#include <cstddef>

namespace tensorferry::handle {

// The limits and what is in use. Thread-safe, and free of locks: a fork may come at any time.
class ProcessLimits {
 public:
  ProcessLimits(unsigned workers_max, std::size_t slot_bytes_max) noexcept
      : workers_max_(workers_max), slot_bytes_max_(slot_bytes_max) {}

  // Those of this process: two workers for each processor, at least 32; 512 MiB of slots.
  [[nodiscard]] static ProcessLimits& of_process() noexcept;

 private:
  friend class ProcessShare;

  const unsigned workers_max_;
  const std::size_t slot_bytes_max_;
  std::atomic<unsigned> workers_{0};
  std::atomic<std::size_t> slot_bytes_{0};
};

// The share of one crew; its destructor gives it back.
class ProcessShare {
 public:
  ProcessShare() = default;
  // Takes what is left of the wanted, but at least one worker and the least it needs for slots: a
  // drive that comes late works too, only with less. What a user chose is granted in full.
  ProcessShare(ProcessLimits& limits, unsigned workers, unsigned workers_min,
               std::size_t slot_bytes, std::size_t slot_bytes_min);
  ~ProcessShare();
  ProcessShare(ProcessShare&& other) noexcept;
  ProcessShare& operator=(ProcessShare&&) = delete;

  [[nodiscard]] unsigned workers() const noexcept { return workers_; }
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return slot_bytes_; }

 private:
  ProcessLimits* limits_ = nullptr;
  unsigned workers_ = 0;
  std::size_t slot_bytes_ = 0;
};

}  // namespace tensorferry::handle
