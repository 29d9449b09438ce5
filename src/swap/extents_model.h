// Compares FreeExtents with a model that keeps a flag for every unit: for the test and the fuzzer.
// A unit is a byte, or so large that all units together reach the largest size.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/alignment.h"
#include "swap/extents.h"

namespace tensorferry::swap {

// The longest run of free units.
[[nodiscard]] inline std::uint64_t longest_run(const std::vector<bool>& taken) {
  std::uint64_t longest = 0;
  std::uint64_t run = 0;
  for (const bool unit : taken) {
    run = unit ? 0 : run + 1;
    longest = std::max(longest, run);
  }
  return longest;
}

// Makes `steps` changes to both, each chosen by `choose(low, high)`, and compares. Returns the
// first difference; empty if there is none.
template <class Choose>
[[nodiscard]] std::string check_extents(Choose choose, unsigned steps) {
  constexpr std::uint64_t growth_max = 32;
  const std::uint64_t unit = choose(0, 3) != 0 ? 1 : bytes_max / (growth_max * std::max(steps, 1U));
  FreeExtents extents;
  std::vector<bool> taken;   // by unit
  std::vector<Extent> held;  // in units
  const auto claim = [&](Extent bytes) -> std::string {
    if (bytes.bytes == 0) return "an empty extent was handed out";
    if (bytes.offset % unit != 0 || bytes.bytes % unit != 0) return "a unit was cut";
    const Extent extent{bytes.offset / unit, bytes.bytes / unit};
    if (extent.offset + extent.bytes > taken.size()) return "an extent reaches past the end";
    for (std::uint64_t i = extent.offset; i < extent.offset + extent.bytes; ++i) {
      if (taken[i]) return "a unit was handed out twice";
      taken[i] = true;
    }
    held.push_back(extent);
    return {};
  };
  const auto compare = [&]() -> std::string {
    std::uint64_t free_units = 0;
    std::uint64_t runs = 0;
    for (std::size_t i = 0; i < taken.size(); ++i) {
      if (taken[i]) continue;
      ++free_units;
      if (i == 0 || taken[i - 1]) ++runs;
    }
    if (extents.total_bytes() != taken.size() * unit) return "the total differs";
    if (extents.free_bytes() != free_units * unit) return "the free room differs";
    if (extents.count() != runs) return "free neighbours are not one";
    return {};
  };
  for (unsigned step = 0; step < steps; ++step) {
    std::string fault;
    const std::uint64_t what = choose(0, 9);
    if (what == 0) {
      const std::uint64_t more = choose(0, growth_max);
      extents.grow(more * unit);
      taken.resize(taken.size() + more);
    } else if (what <= 4) {
      const std::uint64_t wanted = choose(1, 16);
      const bool fits = longest_run(taken) >= wanted;
      const auto offset = extents.take(wanted * unit);
      if (offset.has_value() != fits) return "take() and the model differ on whether there is room";
      if (offset) fault = claim({*offset, wanted * unit});
    } else if (what == 5) {
      const std::uint64_t wanted = choose(1, 24);
      const std::uint64_t expected = std::min(wanted, longest_run(taken));
      const auto extent = extents.take_some(wanted * unit);
      if ((extent ? extent->bytes : 0) != expected * unit) return "take_some() took another amount";
      if (extent) fault = claim(*extent);
    } else if (!held.empty()) {
      Extent& some = held[choose(0, held.size() - 1)];
      Extent back = some;
      if (what == 9 && some.bytes > 1) {  // some of it
        back.bytes = choose(1, some.bytes - 1);
        some = {some.offset + back.bytes, some.bytes - back.bytes};
      } else {
        some = held.back();
        held.pop_back();
      }
      extents.give_back({back.offset * unit, back.bytes * unit});
      for (std::uint64_t i = back.offset; i < back.offset + back.bytes; ++i) taken[i] = false;
    }
    if (fault.empty()) fault = compare();
    if (!fault.empty()) return fault + ", step " + std::to_string(step);
  }
  return {};
}

}  // namespace tensorferry::swap
