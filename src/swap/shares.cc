#include "swap/shares.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tensorferry::swap {

namespace {

constexpr double speed_ratio_max = 256;

}  // namespace

void Shares::set_speeds(std::vector<double> speeds) {
  weights_ = std::move(speeds);
  const double floor = std::ranges::max(weights_) / speed_ratio_max;
  for (double& weight : weights_) weight = std::max(weight, floor);
}

double Shares::sum_of(std::span<const std::size_t> drives) const {
  return std::accumulate(drives.begin(), drives.end(), 0.0,
                         [this](double sum, std::size_t drive) { return sum + weights_[drive]; });
}

double Shares::part(std::size_t drive) const {
  return weights_[drive] / std::accumulate(weights_.begin(), weights_.end(), 0.0);
}

std::vector<Share> Shares::cut(std::uint64_t bytes, std::span<const std::size_t> drives) {
  if (bytes == 0 || drives.empty()) return {};
  const double sum = sum_of(drives);
  const std::size_t slowest =
      *std::ranges::min_element(drives, {}, [this](std::size_t i) { return weights_[i]; });
  const double least = static_cast<double>(bytes) * weights_[slowest] / sum;
  const std::vector<Share> shares = least >= static_cast<double>(stripe_bytes_min)
                                        ? by_speed(bytes, drives)
                                        : by_turn(bytes, drives);
  for (const std::size_t drive : drives) {
    credits_[drive] += static_cast<double>(bytes) * weights_[drive] / sum;
  }
  for (const Share& share : shares) credits_[share.drive] -= static_cast<double>(share.bytes);
  return shares;
}

std::vector<Share> Shares::by_speed(std::uint64_t bytes,
                                    std::span<const std::size_t> drives) const {
  std::vector<Share> shares;
  const double sum = sum_of(drives);
  double weight = 0;
  std::uint64_t begin = 0;
  for (const std::size_t drive : drives) {
    weight += weights_[drive];
    const auto wanted = static_cast<std::uint64_t>(static_cast<double>(bytes) * (weight / sum));
    const bool last = shares.size() + 1 == drives.size();
    const std::uint64_t nearest = align_down(wanted + page_bytes() / 2, page_bytes());
    const std::uint64_t end = last ? bytes : std::min(nearest, bytes);
    shares.push_back({drive, end - begin});
    begin = end;
  }
  return shares;
}

std::vector<Share> Shares::by_turn(std::uint64_t bytes, std::span<const std::size_t> drives) const {
  std::vector<Share> shares;
  for (const std::size_t drive : drives) shares.push_back({drive, 0});
  const std::uint64_t count = std::max<std::uint64_t>(bytes / stripe_bytes_min, 1);
  const std::uint64_t stripe = align_up((bytes + count - 1) / count, page_bytes());
  for (std::uint64_t given = 0; given < bytes;) {
    const std::uint64_t next = std::min(stripe, bytes - given);
    const auto end_of = [this, next](const Share& share) {
      return (static_cast<double>(share.bytes + next) - credits_[share.drive]) /
             weights_[share.drive];
    };
    std::ranges::min_element(shares, {}, end_of)->bytes += next;
    given += next;
  }
  std::erase_if(shares, [](const Share& share) { return share.bytes == 0; });
  return shares;
}

}  // namespace tensorferry::swap
