// Which parts of a stretch of bytes are free: the bookkeeping behind files and buffers. No I/O, no
// locks; everything is in units of the caller, who aligns.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace tensorferry::swap {

struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// Neighbours that are free are one: taking all back leaves a single extent.
class Extents {
 public:
  // Adds so much free room at the end.
  void grow(std::uint64_t bytes);

  // The start of `bytes` > 0 in the smallest free extent that holds them, the lowest among equals.
  [[nodiscard]] std::optional<std::uint64_t> take(std::uint64_t bytes);
  // As much as the largest free extent holds, but no more than `bytes`. Nothing when all is taken.
  [[nodiscard]] std::optional<Extent> take_some(std::uint64_t bytes);
  // What was taken, or a part of it.
  void give_back(Extent extent);

  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return total_bytes_; }
  [[nodiscard]] std::uint64_t free_bytes() const noexcept { return free_bytes_; }
  [[nodiscard]] std::size_t count() const noexcept { return by_offset_.size(); }  // of free ones
  // How much of the end is free.
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
