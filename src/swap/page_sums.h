// The checksum of a tensor, from its bytes as they pass in any order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "handle/witness.h"
#include "swap/store.h"

namespace tensorferry::swap {

// The sum, modulo 2^64, of a number for each 4096 bytes of the tensor, the last of which may be
// fewer: XXH3 of these bytes, mixed with their place in the tensor. So it needs no memory and no
// order; two bytes that have changed, and two stretches that have changed places, change it.
class PageSums final : public handle::Witness {
 public:
  // `ranges` hold the `bytes` of the tensor; they may go on behind its end. The bytes must have the
  // checksum `expected`, if there is one.
  PageSums(std::string key, const std::vector<Allocation::FileRange>& ranges, std::uint64_t bytes,
           std::optional<std::uint64_t> expected = std::nullopt);

  void see(const files::OpenFile& file, std::uint64_t offset,
           std::span<const std::byte> bytes) noexcept override;
  // An Error (EBADMSG) if the checksum is not as expected.
  [[nodiscard]] std::optional<Error> verdict() noexcept override;

  // After all bytes have passed.
  [[nodiscard]] std::uint64_t sum() const noexcept { return sum_; }

 private:
  // A stretch of a file that holds bytes of the tensor from `begin` on.
  struct Place {
    const files::OpenFile* file;
    std::uint64_t file_offset;
    std::uint64_t begin;
    std::uint64_t bytes;
  };
  // A unit of 4096 bytes of which some bytes are missing.
  struct Partial {
    std::vector<std::byte> bytes;
    std::size_t filled = 0;
  };
  // `begin` counts from the start of the tensor.
  void see_tensor(std::uint64_t begin, std::span<const std::byte> bytes);
  void add_fragment(std::uint64_t place, std::size_t at, std::span<const std::byte> bytes);
  [[nodiscard]] std::size_t bytes_of(std::uint64_t place) const noexcept;

  const std::string key_;
  const std::string path_;  // of the first file
  std::vector<Place> places_;
  const std::uint64_t bytes_;
  const std::optional<std::uint64_t> expected_;
  std::atomic<std::uint64_t> sum_{0};
  std::mutex mutex_;
  std::map<std::uint64_t, Partial> partials_;  // by their place
  std::atomic<bool> out_of_memory_{false};
};

}  // namespace tensorferry::swap
