// Which extents of a file or of the buffers are free. No I/O, no locks. The caller aligns.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace tensorferry::swap {

// Consecutive bytes.
struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// Free neighbours are merged: when everything is given back, one extent is left.
class FreeExtents {
 public:
  // Adds a free extent at the end.
  void grow(std::uint64_t bytes);

  // Takes `bytes` > 0 from the smallest free extent that holds them, the lowest of equal ones, and
  // returns their offset.
  [[nodiscard]] std::optional<std::uint64_t> take(std::uint64_t bytes);
  // Takes up to `bytes` from the largest free extent. Returns nullopt if nothing is free.
  [[nodiscard]] std::optional<Extent> take_some(std::uint64_t bytes);
  // Frees bytes that were taken: all of an extent or some of it.
  void give_back(Extent extent);

  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return total_bytes_; }
  [[nodiscard]] std::uint64_t free_bytes() const noexcept { return free_bytes_; }
  [[nodiscard]] std::size_t count() const noexcept { return by_offset_.size(); }  // of free ones
  // The size of the free extent at the end; 0 if the last byte is taken.
  [[nodiscard]] std::uint64_t free_tail_bytes() const noexcept;

 private:
  using ByOffset = std::map<std::uint64_t, std::uint64_t>;

  void add(Extent extent);
  void remove(ByOffset::iterator extent);

  ByOffset by_offset_;                                         // offset -> bytes
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // (bytes, offset)
  std::uint64_t total_bytes_ = 0;
  std::uint64_t free_bytes_ = 0;
};

}  // namespace tensorferry::swap
