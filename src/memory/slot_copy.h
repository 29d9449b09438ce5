// Copies into slots, through the cache or past it, whichever costs less at the moment.
//
// Through the cache is best as a rule: a slot is used again and again, and the drive finds it in
// the cache too. But where a thread of the host is the drive, as for virtual machines, it takes the
// slot's lines to the core that it runs on. When the host moves it away, getting them back takes
// three times as long, for seconds; a copy past the cache does not mind. Nothing says so, but the
// clock does: both ways are timed, and one copy in `trial_period` goes the other way.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <span>

#include "tensorferry/copy.h"

namespace tensorferry::memory {

// Which way the next copy takes.
class SlotWay {
 public:
  static constexpr unsigned trial_period = 32;
  // Past the cache is worth it only if the way through it is slower by this: what lies in the cache
  // the drive reads faster, too.
  static constexpr double worth_it = 1.5;
  // 5 GB/s: no copy is much slower unless it was interrupted.
  static constexpr double first_cost_max = 0.2;

  [[nodiscard]] Destination next() noexcept {
    const bool trial = ++copies_ % trial_period == 0;
    return usual() != trial ? Destination::cold : Destination::any;
  }

  // What a copy that way took. One that was interrupted tells nothing, so no single one decides: it
  // counts for twice the usual at most, and the first for `first_cost_max`.
  void took(Destination way, double nanoseconds_per_byte) noexcept {
    double& cost = costs_[static_cast<std::size_t>(way)];
    if (cost == 0) {
      cost = std::min(nanoseconds_per_byte, first_cost_max);
    } else {
      cost += (std::min(nanoseconds_per_byte, 2 * cost) - cost) / 4;
    }
  }

 private:
  // Whether it is past the cache.
  [[nodiscard]] bool usual() const noexcept {
    return costs_[1] > 0 && costs_[0] > worth_it * costs_[1];
  }

  std::array<double, 2> costs_{};  // by Destination; 0 is not known yet
  unsigned copies_ = 0;
};

// For one thread.
class SlotCopy {
 public:
  // Shorter ones are not worth a look at the clock.
  static constexpr std::size_t timed_bytes_min = std::size_t{64} << 10;

  void operator()(std::span<std::byte> slot, std::span<const std::byte> from) noexcept {
    if (from.size() < timed_bytes_min) return copy(slot, from);
    using Clock = std::chrono::steady_clock;
    const Destination way = way_.next();
    const Clock::time_point start = Clock::now();
    copy(slot, from, way);
    const std::chrono::duration<double, std::nano> spent = Clock::now() - start;
    way_.took(way, spent.count() / static_cast<double>(from.size()));
  }

 private:
  SlotWay way_;
};

}  // namespace tensorferry::memory
