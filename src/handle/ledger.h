// What a handle has done: counters that every worker and inline caller adds to. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/histogram.h"
#include "tensorferry/error.h"

namespace tensorferry::handle {

class Ledger {
 public:
  using Counter = std::atomic<std::uint64_t>;

  static void add(Counter& counter, std::uint64_t amount = 1) noexcept {
    counter.fetch_add(amount, std::memory_order_relaxed);
  }

  Counter operations{0};
  Counter failed_operations{0};
  Counter cancelled_operations{0};
  Counter inline_operations{0};
  Counter requests{0};
  Counter read_bytes{0};
  Counter written_bytes{0};
  Counter bounced_bytes{0};
  Counter fixed_requests{0};
  Counter retries{0};
  Counter short_transfers{0};
  Counter refused_submissions{0};
  Counter fallbacks{0};
  Histogram latency_ns;

  // Something worked in another way than the best one, for this reason.
  void note_fallback(const std::string& reason) {
    add(fallbacks);
    const std::lock_guard lock(mutex_);
    for (auto& slot : reasons_) {
      const std::string* const noted = slot.load(std::memory_order_relaxed);
      if (noted == nullptr) slot.store(new std::string(reason), std::memory_order_release);
      if (noted == nullptr || *noted == reason) return;
    }
  }

  // Memory of slots that CUDA refused to know, for this reason; empty where it did not.
  void note_unknown_to_cuda(const std::string& reason) {
    if (!reason.empty()) note_fallback(reason + "; copies to and from GPUs are slower");
  }

  // Takes no lock: in a forked child another thread of the parent may have it for ever.
  [[nodiscard]] std::vector<std::string> fallback_reasons() const {
    std::vector<std::string> reasons;
    for (const auto& slot : reasons_) {
      const std::string* const noted = slot.load(std::memory_order_acquire);
      if (noted == nullptr) break;
      reasons.push_back(*noted);
    }
    return reasons;
  }

  // An operation failed and nobody has asked about it, or was given up when its handle closed.
  void note_lost(const Error& error) {
    const std::lock_guard lock(mutex_);
    if (!lost_) lost_ = error;
    ++lost_count_;
  }

  std::function<void(const Error&)> on_lost;  // set before anything is done

  // Tells on_lost what nobody else has been told.
  void report_lost() noexcept {
    try {
      if (const auto lost = take_lost(); lost && on_lost) on_lost(*lost);
    } catch (...) {  // NOLINT(bugprone-empty-catch): it must not throw, and nobody is there to hear
    }
  }

  // The first of them since the last call, with a word on the others.
  [[nodiscard]] std::optional<Error> take_lost() {
    const std::lock_guard lock(mutex_);
    std::optional<Error> lost = std::exchange(lost_, std::nullopt);
    const std::size_t count = std::exchange(lost_count_, 0);
    if (!lost || count == 1) return lost;
    const char* const others = count == 2 ? " more operation" : " more operations";
    return Error({.operation = lost->operation(),
                  .path = lost->path(),
                  .offset = lost->offset(),
                  .length = lost->length(),
                  .code = lost->code(),
                  .hint = lost->hint() + (lost->hint().empty() ? "" : "; ") +
                          std::to_string(count - 1) + others + " failed unseen"});
  }

  Ledger() = default;
  ~Ledger() {
    for (auto& slot : reasons_) delete slot.load(std::memory_order_relaxed);
  }
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

 private:
  static constexpr std::size_t reasons_max = 32;
  std::mutex mutex_;  // of those who note reasons or losses
  std::array<std::atomic<const std::string*>, reasons_max> reasons_{};  // from the first on
  std::optional<Error> lost_;
  std::size_t lost_count_ = 0;
};

}  // namespace tensorferry::handle
