// What a handle has done: counters that every worker and inline caller adds to. Thread-safe.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/histogram.h"

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
    if (reasons_.size() < reasons_max &&
        std::find(reasons_.begin(), reasons_.end(), reason) == reasons_.end()) {
      reasons_.push_back(reason);
    }
  }

  // Memory of slots that CUDA refused to know, for this reason; empty where it did not.
  void note_unknown_to_cuda(const std::string& reason) {
    if (!reason.empty()) note_fallback(reason + "; copies to and from GPUs are slower");
  }

  [[nodiscard]] std::vector<std::string> fallback_reasons() const {
    const std::lock_guard lock(mutex_);
    return reasons_;
  }

 private:
  static constexpr std::size_t reasons_max = 32;
  mutable std::mutex mutex_;
  std::vector<std::string> reasons_;
};

}  // namespace tensorferry::handle
