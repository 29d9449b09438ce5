#include "handle/ledger.h"

#include <cerrno>
#include <utility>

namespace tensorferry::handle {

Ledger::~Ledger() {
  for (auto& reason : reasons_) delete reason.load(std::memory_order_relaxed);
}

void Ledger::add_failure(const Error& error) noexcept {
  add(error.code() == ECANCELED ? &Stats::cancelled_operations : &Stats::failed_operations);
}

void Ledger::note_fallback(const std::string& reason) {
  add(&Stats::fallbacks);
  const std::lock_guard lock(mutex_);
  for (auto& entry : reasons_) {
    const std::string* const noted = entry.load(std::memory_order_relaxed);
    if (noted == nullptr) entry.store(new std::string(reason), std::memory_order_release);
    if (noted == nullptr || *noted == reason) return;
  }
}

void Ledger::note_lost(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!lost_) lost_ = error;
  ++lost_count_;
}

void Ledger::report_lost() noexcept {
  try {
    if (const auto lost = take_lost(); lost && on_lost) on_lost(*lost);
  } catch (...) {  // NOLINT(bugprone-empty-catch): it must not throw, and nobody would hear it
  }
}

std::optional<Error> Ledger::take_lost() {
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

Stats Ledger::stats() const {
  Stats stats;
  for (const StatsCounter& counter : stats_counters) stats.*counter.value = value(counter.value);
  for (const auto& entry : reasons_) {
    const std::string* const noted = entry.load(std::memory_order_acquire);
    if (noted == nullptr) break;
    stats.fallback_reasons.push_back(*noted);
  }
  stats.latency_ns_p50 = latency_ns_.percentile(0.50);
  stats.latency_ns_p90 = latency_ns_.percentile(0.90);
  stats.latency_ns_p99 = latency_ns_.percentile(0.99);
  stats.latency_ns_max = latency_ns_.max();
  return stats;
}

}  // namespace tensorferry::handle
