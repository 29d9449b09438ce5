// What all handles of the process may have together: threads (workers and keepers), engines (of
// workers and lanes), and page-locked memory for slots (of workers, lanes and inline transfers).
// However many drives a program uses, it stays within these limits.
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>

namespace tensorferry::handle {

struct ProcessNeeds {
  unsigned threads = 0;
  unsigned engines = 0;
  std::size_t slot_bytes = 0;

  friend bool operator==(const ProcessNeeds&, const ProcessNeeds&) = default;
};

// The limits and what is in use. Thread-safe, and free of locks: a fork may come at any time.
class ProcessLimits {
 public:
  explicit ProcessLimits(const ProcessNeeds& max) noexcept : max_(max) {}

  // Those of this process: four threads and eight engines for each processor, at least 64 and 128;
  // 512 MiB of slots. A child of fork() begins with nothing in use: what its parent has stays
  // there.
  [[nodiscard]] static ProcessLimits& of_process() noexcept;

  // Forgets all shares, which must not end any more.
  void forget() noexcept {
    threads_ = 0;
    engines_ = 0;
    slot_bytes_ = 0;
  }

  [[nodiscard]] ProcessNeeds in_use() const noexcept {
    return {threads_.load(), engines_.load(), slot_bytes_.load()};
  }

 private:
  friend class ProcessShare;

  const ProcessNeeds max_;
  std::atomic<unsigned> threads_{0};
  std::atomic<unsigned> engines_{0};
  std::atomic<std::size_t> slot_bytes_{0};
};

// A share of the limits, which must outlive it; its destructor gives it back. An empty share has
// no limits.
class ProcessShare {
 public:
  ProcessShare() = default;
  // For a crew. Takes what is left of the wanted, but at least the least: a drive that comes late
  // works too, only with less. What a user chose is granted in full. Each worker needs a thread and
  // an engine: of both as many are granted. The bytes of slots are for each worker, and the least
  // of them is one slot: whole slots are granted, as many to each worker.
  ProcessShare(ProcessLimits& limits, unsigned workers, unsigned workers_min,
               std::size_t slot_bytes, std::size_t slot_bytes_min);
  ~ProcessShare();
  ProcessShare(ProcessShare&& other) noexcept;
  ProcessShare& operator=(ProcessShare&&) = delete;

  // All of it, or nothing: for what a handle can do without.
  [[nodiscard]] static std::optional<ProcessShare> try_take(ProcessLimits& limits,
                                                            const ProcessNeeds& needs) noexcept;
  // The same, from the limits of this share.
  [[nodiscard]] std::optional<ProcessShare> try_more(const ProcessNeeds& needs) const noexcept;

  [[nodiscard]] unsigned workers() const noexcept { return taken_.threads; }
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return taken_.slot_bytes; }  // of all

 private:
  ProcessShare(ProcessLimits& limits, const ProcessNeeds& taken) noexcept
      : limits_(&limits), taken_(taken) {}

  ProcessLimits* limits_ = nullptr;
  ProcessNeeds taken_;
};

}  // namespace tensorferry::handle
