// Which bytes of a tensor a read wants: ranges of indexes as runs of bytes. Pure arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry::checkpoint {

// Runs of `bytes` bytes at regular distances: the first begins at `offset`, and for each dimension
// there are `count` of them `step` bytes apart, the last dimension innermost.
struct Slices {
  struct Dimension {
    std::uint64_t count = 1;
    std::uint64_t step = 0;
  };
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::vector<Dimension> dimensions;
  bool whole = false;  // all of the tensor

  [[nodiscard]] std::uint64_t total_bytes() const noexcept {
    std::uint64_t total = bytes;
    for (const Dimension& dimension : dimensions) total *= dimension.count;
    return total;
  }

  // Calls visit(offset) for each run, in order.
  template <class Visit>
  void for_each(Visit visit) const {
    if (total_bytes() > 0) visit_from(0, offset, visit);
  }

 private:
  template <class Visit>
  void visit_from(std::size_t dimension, std::uint64_t at, Visit& visit) const {
    if (dimension == dimensions.size()) return visit(at);
    for (std::uint64_t i = 0; i < dimensions[dimension].count; ++i) {
      visit_from(dimension + 1, at + i * dimensions[dimension].step, visit);
    }
  }
};

// An Error (EINVAL) with a hint for ranges that the tensor does not have, or that begin or end
// within a byte.
[[nodiscard]] Result<Slices> slices_of(const TensorInfo& tensor,
                                       std::span<const IndexRange> ranges);

}  // namespace tensorferry::checkpoint
