// Divides tensors among drives by their speed. No I/O, no locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/alignment.h"

namespace tensorferry::swap {

// Bytes of a tensor for one drive. Whole pages.
struct Share {
  std::size_t drive = 0;
  std::uint64_t bytes = 0;
};

// A smaller part of a tensor is not worth another drive.
inline constexpr std::uint64_t stripe_bytes_min = MiB;

// A large tensor is cut in proportion to the speeds, so that all drives finish it together. Where
// that would leave a drive less than a stripe, the tensor is cut into stripes, of which a small
// tensor is a single one. Each goes to the drive that finishes it soonest, counting what the drive
// has had more or less than its share before. So over time small tensors are spread by speed too.
class Shares {
 public:
  // All drives are equally fast.
  explicit Shares(std::size_t drives) : weights_(drives, 1), credits_(drives, 0) {}

  // The speeds of the drives, in any unit. All must be positive. The slowest counts as a 256th of
  // the fastest: each drive gets some bytes, by which it is measured again.
  void set_speeds(std::vector<double> speeds);

  // Divides `bytes`, whole pages, among some of these drives, in their order.
  [[nodiscard]] std::vector<Share> cut(std::uint64_t bytes, std::span<const std::size_t> drives);

  // The part of all bytes that a drive gets.
  [[nodiscard]] double part(std::size_t drive) const;

 private:
  [[nodiscard]] double sum_of(std::span<const std::size_t> drives) const;
  [[nodiscard]] std::vector<Share> by_speed(std::uint64_t bytes,
                                            std::span<const std::size_t> drives) const;
  [[nodiscard]] std::vector<Share> by_turn(std::uint64_t bytes,
                                           std::span<const std::size_t> drives) const;

  std::vector<double> weights_;  // the speeds
  // How many bytes each drive has had less than its share. Counts bytes, not seconds, so that it
  // stays small and keeps its meaning if the speeds change.
  std::vector<double> credits_;
};

}  // namespace tensorferry::swap
