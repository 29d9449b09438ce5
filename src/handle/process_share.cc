#include "handle/process_share.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/alignment.h"

namespace tensorferry::handle {

namespace {

constexpr unsigned workers_max_min = 32;
constexpr std::size_t slot_bytes_max = 512 * MiB;

// Takes what is left of `max`, between the least and the wanted.
template <class Number>
Number take(std::atomic<Number>& used, Number max, Number wanted, Number least) noexcept {
  Number before = used.load();
  Number granted = 0;
  do {
    const Number left = before < max ? max - before : 0;
    granted = std::max(least, std::min(wanted, left));
  } while (!used.compare_exchange_weak(before, before + granted));
  return granted;
}

}  // namespace

ProcessLimits& ProcessLimits::of_process() noexcept {
  static ProcessLimits limits(std::max(2 * std::thread::hardware_concurrency(), workers_max_min),
                              slot_bytes_max);
  return limits;
}

ProcessShare::ProcessShare(ProcessLimits& limits, unsigned workers, unsigned workers_min,
                           std::size_t slot_bytes, std::size_t slot_bytes_min)
    : limits_(&limits),
      workers_(take(limits.workers_, limits.workers_max_, workers, workers_min)),
      slot_bytes_(take(limits.slot_bytes_, limits.slot_bytes_max_, slot_bytes, slot_bytes_min)) {}

ProcessShare::ProcessShare(ProcessShare&& other) noexcept
    : limits_(std::exchange(other.limits_, nullptr)),
      workers_(other.workers_),
      slot_bytes_(other.slot_bytes_) {}

ProcessShare::~ProcessShare() {
  if (limits_ == nullptr) return;
  limits_->workers_ -= workers_;
  limits_->slot_bytes_ -= slot_bytes_;
}

}  // namespace tensorferry::handle
