// Copies into slots, through the cache or past it: the way that is cheaper now.
//
// Through the cache is usually best: a slot is used again and again, and the drive finds its bytes
// in the cache too. In a virtual machine, however, a thread of the host plays the drive, and takes
// the lines of the slot to the core that it runs on. If the host moves that thread to another core,
// getting the lines back takes three times as long, for seconds; a copy past the cache is not
// affected. Only the clock shows this: we time both ways, and one copy in `trial_period` goes the
// other way.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <span>

#include "tensorferry/copy.h"

namespace tensorferry::memory {

// Chooses the way of the next copy.
class SlotWay {
 public:
  static constexpr unsigned trial_period = 32;
  // Copies go past the cache only if the way through it is slower by this factor: the drive, too,
  // reads faster from the cache.
  static constexpr double worth_it = 1.5;
  // 5 GB/s: no copy is much slower unless it was interrupted.
  static constexpr double first_cost_max = 0.2;

  [[nodiscard]] Destination next() noexcept {
    const bool trial = ++copies_ % trial_period == 0;
    return usual() != trial ? Destination::cold : Destination::any;
  }

  // Notes the cost of a copy. A copy that was interrupted says nothing, so no single one decides:
  // it counts at most twice the usual cost, and the first at most `first_cost_max`.
  void took(Destination way, double nanoseconds_per_byte) noexcept {
    double& cost = costs_[static_cast<std::size_t>(way)];
    if (cost == 0) {
      cost = std::min(nanoseconds_per_byte, first_cost_max);
    } else {
      cost += (std::min(nanoseconds_per_byte, 2 * cost) - cost) / 4;
    }
  }

 private:
  // Whether the usual way is past the cache.
  [[nodiscard]] bool usual() const noexcept {
    return costs_[1] > 0 && costs_[0] > worth_it * costs_[1];
  }

  std::array<double, 2> costs_{};  // by Destination; 0: not known yet
  unsigned copies_ = 0;
};

// Used by one thread.
class SlotCopy {
 public:
  // Shorter copies are not worth a look at the clock.
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
