#include "handle/process_share.h"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/alignment.h"

namespace tensorferry::handle {

namespace {

constexpr unsigned threads_max_min = 64;
constexpr unsigned engines_max_min = 128;
constexpr std::size_t slot_bytes_max = 512 * MiB;

// Takes what is left of `max`, in multiples of the least, between that and the wanted.
template <class Number>
Number take(std::atomic<Number>& used, Number max, Number wanted, Number least) noexcept {
  Number before = used.load();
  Number granted = 0;
  do {
    const Number left = before < max ? max - before : 0;
    granted = std::max(least, std::min(wanted, least > 0 ? left - left % least : left));
  } while (!used.compare_exchange_weak(before, before + granted));
  return granted;
}

// Takes all of the wanted, or nothing.
template <class Number>
bool take_all(std::atomic<Number>& used, Number max, Number wanted) noexcept {
  Number before = used.load();
  do {
    if (wanted > 0 && (before >= max || wanted > max - before)) return false;
  } while (!used.compare_exchange_weak(before, before + wanted));
  return true;
}

// A child has none of the parent's threads, and destroys none of its handles. The first call makes
// the limits: no fork finds them half made.
[[maybe_unused]] const int share_fork_watch =
    (static_cast<void>(ProcessLimits::of_process()),
     pthread_atfork(nullptr, nullptr, [] { ProcessLimits::of_process().forget(); }));

}  // namespace

ProcessLimits& ProcessLimits::of_process() noexcept {
  const unsigned processors = std::thread::hardware_concurrency();
  static ProcessLimits limits({.threads = std::max(4 * processors, threads_max_min),
                               .engines = std::max(8 * processors, engines_max_min),
                               .slot_bytes = slot_bytes_max});
  return limits;
}

ProcessShare::ProcessShare(ProcessLimits& limits, unsigned workers, unsigned workers_min,
                           std::size_t slot_bytes, std::size_t slot_bytes_min)
    : limits_(&limits) {
  const ProcessNeeds& max = limits.max_;
  const unsigned threads = take(limits.threads_, max.threads, workers, workers_min);
  taken_.engines = take(limits.engines_, max.engines, threads, workers_min);
  taken_.threads = taken_.engines;
  limits.threads_ -= threads - taken_.threads;
  taken_.slot_bytes = take(limits.slot_bytes_, max.slot_bytes, taken_.threads * slot_bytes,
                           taken_.threads * slot_bytes_min);
}

std::optional<ProcessShare> ProcessShare::try_take(ProcessLimits& limits,
                                                   const ProcessNeeds& needs) noexcept {
  const ProcessNeeds& max = limits.max_;
  if (!take_all(limits.threads_, max.threads, needs.threads)) return std::nullopt;
  ProcessShare share(limits, ProcessNeeds{.threads = needs.threads});
  if (!take_all(limits.engines_, max.engines, needs.engines)) return std::nullopt;
  share.taken_.engines = needs.engines;
  if (!take_all(limits.slot_bytes_, max.slot_bytes, needs.slot_bytes)) return std::nullopt;
  share.taken_.slot_bytes = needs.slot_bytes;
  return share;
}

std::optional<ProcessShare> ProcessShare::try_more(const ProcessNeeds& needs) const noexcept {
  if (limits_ == nullptr) return std::optional<ProcessShare>(std::in_place);
  return try_take(*limits_, needs);
}

ProcessShare::ProcessShare(ProcessShare&& other) noexcept
    : limits_(std::exchange(other.limits_, nullptr)), taken_(other.taken_) {}

ProcessShare::~ProcessShare() {
  if (limits_ == nullptr) return;
  limits_->threads_ -= taken_.threads;
  limits_->engines_ -= taken_.engines;
  limits_->slot_bytes_ -= taken_.slot_bytes;
}

}  // namespace tensorferry::handle
