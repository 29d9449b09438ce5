#include "swap/extents.h"

#include <algorithm>
#include <iterator>

namespace tensorferry::swap {

void FreeExtents::add(Extent extent) {
  by_offset_.emplace(extent.offset, extent.bytes);
  by_size_.emplace(extent.bytes, extent.offset);
}

void FreeExtents::remove(ByOffset::iterator extent) {
  by_size_.erase({extent->second, extent->first});
  by_offset_.erase(extent);
}

void FreeExtents::grow(std::uint64_t bytes) {
  if (bytes == 0) return;
  total_bytes_ += bytes;
  give_back({total_bytes_ - bytes, bytes});
}

std::optional<std::uint64_t> FreeExtents::take(std::uint64_t bytes) {
  const auto fitting = by_size_.lower_bound({bytes, 0});
  if (fitting == by_size_.end()) return std::nullopt;
  const Extent found{fitting->second, fitting->first};
  remove(by_offset_.find(found.offset));
  if (found.bytes > bytes) add({found.offset + bytes, found.bytes - bytes});
  free_bytes_ -= bytes;
  return found.offset;
}

std::optional<Extent> FreeExtents::take_some(std::uint64_t bytes) {
  if (by_size_.empty()) return std::nullopt;
  const std::uint64_t some = std::min(bytes, by_size_.rbegin()->first);
  const auto offset = take(some);
  if (!offset) return std::nullopt;
  return Extent{*offset, some};
}

void FreeExtents::give_back(Extent extent) {
  free_bytes_ += extent.bytes;
  const auto next = by_offset_.lower_bound(extent.offset);
  if (next != by_offset_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == extent.offset) {
      extent = {before->first, before->second + extent.bytes};
      remove(before);
    }
  }
  if (next != by_offset_.end() && extent.offset + extent.bytes == next->first) {
    extent.bytes += next->second;
    remove(next);
  }
  add(extent);
}

std::uint64_t FreeExtents::free_tail_bytes() const noexcept {
  if (by_offset_.empty()) return 0;
  const auto& [offset, bytes] = *by_offset_.rbegin();
  return offset + bytes == total_bytes_ ? bytes : 0;
}

}  // namespace tensorferry::swap
