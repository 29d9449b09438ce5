// What a handle has done: counters, latencies, the reasons of fallbacks, and losses. Workers and
// inline callers report every completion here, and nowhere else. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "base/histogram.h"
#include "handle/plan.h"
#include "handle/trace.h"
#include "tensorferry/error.h"
#include "tensorferry/stats.h"

namespace tensorferry::handle {

class Ledger {
 public:
  using Counter = std::uint64_t Stats::*;

  Ledger() = default;
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  void add(Counter counter, std::uint64_t amount = 1) noexcept {
    std::atomic_ref(counts_.*counter).fetch_add(amount, std::memory_order_relaxed);
  }
  void add_moved(Direction direction, std::uint64_t bytes) noexcept {
    add(direction == Direction::read ? &Stats::read_bytes : &Stats::written_bytes, bytes);
  }
  [[nodiscard]] std::uint64_t value(Counter counter) const noexcept {
    return std::atomic_ref(counts_.*counter).load(std::memory_order_relaxed);
  }

  // Counts a request that ended and adds it to the trace.
  void request_ended(const EndedRequest& request) noexcept {
    add(&Stats::requests);
    if (Trace* trace = Trace::active()) trace->request(request, std::chrono::steady_clock::now());
  }
  // Counts a request that has to go to the kernel once more after this result.
  void request_repeats(std::int32_t result) noexcept {
    add(result > 0 ? &Stats::short_transfers : &Stats::retries);
  }
  // Counts an operation that ended, with its latency, and adds it to the trace.
  void operation_ended(const EndedOperation& operation) noexcept {
    add(&Stats::operations);
    if (operation.error != nullptr) add_failure(*operation.error);
    latency_ns_.record(static_cast<std::uint64_t>((operation.end - operation.begin).count()));
    if (Trace* trace = Trace::active()) trace->operation(operation);
  }

  // Notes that something works in another way than the best one, and why.
  void note_fallback(const std::string& reason);

  // Notes why CUDA refused to register the memory of slots; an empty reason means that it did not.
  void note_unknown_to_cuda(const std::string& reason) {
    if (!reason.empty()) note_fallback(reason + "; copies to and from GPUs are slower");
  }

  // Notes an operation that failed and nobody has asked about, or that was given up when its handle
  // closed.
  void note_lost(const Error& error);

  std::function<void(const Error&)> on_lost;  // set before the first operation

  // Passes to on_lost what nobody has been told.
  void report_lost() noexcept;

  // The first loss since the last call. Its hint counts the others.
  [[nodiscard]] std::optional<Error> take_lost();

  // Everything but cpu_seconds. Takes no lock: in a forked child a thread of the parent may hold it
  // for ever.
  [[nodiscard]] Stats stats() const;

 private:
  static constexpr std::size_t reasons_max = 32;

  void add_failure(const Error& error) noexcept;

  mutable Stats counts_;  // only its counters, by atomic_ref
  Histogram latency_ns_;
  std::mutex mutex_;  // guards the noting of reasons and losses
  std::array<std::atomic<const std::string*>, reasons_max> reasons_{};  // filled from the front
  std::optional<Error> lost_;
  std::size_t lost_count_ = 0;
};

}  // namespace tensorferry::handle
