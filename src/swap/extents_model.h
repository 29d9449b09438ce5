// The allocator against a model that keeps a flag for every unit: for the test and the fuzzer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "swap/extents.h"

namespace tensorferry::swap {

// Of units that are not taken.
[[nodiscard]] inline std::uint64_t longest_run(const std::vector<bool>& taken) {
  std::uint64_t longest = 0;
  std::uint64_t run = 0;
  for (const bool unit : taken) {
    run = unit ? 0 : run + 1;
    longest = std::max(longest, run);
  }
  return longest;
}

// Does `steps` things, each chosen by `choose(low, high)`, to both, and compares. Returns what does
// not hold, or nothing.
template <class Choose>
[[nodiscard]] std::string check_extents(Choose choose, unsigned steps) {
  Extents extents;
  std::vector<bool> taken;  // by unit
  std::vector<Extent> held;
  const auto claim = [&](Extent extent) -> std::string {
    if (extent.bytes == 0) return "an empty extent was handed out";
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
    if (extents.total_bytes() != taken.size()) return "the total differs";
    if (extents.free_bytes() != free_units) return "the free room differs";
    if (extents.count() != runs) return "free neighbours are not one";
    return {};
  };
  const auto largest_free = [&taken] { return longest_run(taken); };
  for (unsigned step = 0; step < steps; ++step) {
    std::string fault;
    const std::uint64_t what = choose(0, 9);
    if (what == 0) {
      const std::uint64_t more = choose(0, 32);
      extents.grow(more);
      taken.resize(taken.size() + more);
    } else if (what <= 4) {
      const std::uint64_t bytes = choose(1, 16);
      const bool fits = largest_free() >= bytes;
      const auto offset = extents.take(bytes);
      if (offset.has_value() != fits) return "take() and the model differ on whether there is room";
      if (offset) fault = claim({*offset, bytes});
    } else if (what == 5) {
      const std::uint64_t bytes = choose(1, 24);
      const std::uint64_t expected = std::min(bytes, largest_free());
      const auto extent = extents.take_some(bytes);
      if ((extent ? extent->bytes : 0) != expected) return "take_some() took another amount";
      if (extent) fault = claim(*extent);
    } else if (!held.empty()) {
      Extent& some = held[choose(0, held.size() - 1)];
      Extent back = some;
      if (what == 9 && some.bytes > 1) {  // a part of it
        back.bytes = choose(1, some.bytes - 1);
        some = {some.offset + back.bytes, some.bytes - back.bytes};
      } else {
        some = held.back();
        held.pop_back();
      }
      extents.give_back(back);
      for (std::uint64_t i = back.offset; i < back.offset + back.bytes; ++i) taken[i] = false;
    }
    if (fault.empty()) fault = compare();
    if (!fault.empty()) return fault + ", step " + std::to_string(step);
  }
  return {};
}

}  // namespace tensorferry::swap
