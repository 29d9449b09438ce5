#include "checkpoint/slices.h"

#include <algorithm>
#include <cerrno>
#include <string>

namespace tensorferry::checkpoint {

Result<Slices> slices_of(const TensorInfo& tensor, std::span<const IndexRange> ranges) {
  const auto refuse = [&](const std::string& why) {
    return Error({.operation = "read tensor",
                  .code = EINVAL,
                  .hint = "tensor '" + tensor.name + "': " + why});
  };
  if (ranges.size() > tensor.shape.size()) {
    return refuse("it has " + std::to_string(tensor.shape.size()) + " dimensions and not " +
                  std::to_string(ranges.size()));
  }
  Slices slices;
  if (tensor.bytes == 0) {
    slices.whole = true;
    return slices;
  }
  // From the last dimension to the first; `stride_bits` is the distance of two indexes.
  std::uint64_t stride_bits = bits_of(tensor.dtype);
  std::uint64_t run_bits = stride_bits;  // that lie together so far
  std::uint64_t offset_bits = 0;
  bool together = true;  // all dimensions so far are complete
  std::vector<Slices::Dimension> inner_first;
  for (std::size_t i = tensor.shape.size(); i > 0; --i) {
    const std::uint64_t size = tensor.shape[i - 1];
    const IndexRange range = i <= ranges.size() ? ranges[i - 1] : IndexRange{};
    const std::uint64_t end = std::min(range.end, size);
    if (range.begin > end) {
      return refuse("range " + std::to_string(range.begin) + " to " + std::to_string(range.end) +
                    " of dimension " + std::to_string(i - 1) + ", which has " +
                    std::to_string(size));
    }
    const std::uint64_t count = end - range.begin;
    offset_bits += range.begin * stride_bits;
    if (together) {
      run_bits *= count;
      together = count == size;
    } else {
      inner_first.push_back({count, stride_bits});
    }
    stride_bits *= size;
  }
  const auto splits_byte = [](std::uint64_t bits) { return bits % 8 != 0; };
  bool split = splits_byte(run_bits) || splits_byte(offset_bits);
  std::reverse(inner_first.begin(), inner_first.end());
  for (const Slices::Dimension& dimension : inner_first) {
    split |= splits_byte(dimension.step);
    slices.dimensions.push_back({dimension.count, dimension.step / 8});
  }
  if (split) return refuse("its elements are packed, and the range begins or ends within a byte");
  slices.offset = offset_bits / 8;
  slices.bytes = run_bits / 8;
  slices.whole = slices.total_bytes() == tensor.bytes;
  return slices;
}

}  // namespace tensorferry::checkpoint
