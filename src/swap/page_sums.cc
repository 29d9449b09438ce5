#include "swap/page_sums.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/xxh3.h"

namespace tensorferry::swap {

namespace {

// Part of the format of snapshots, whatever the page size of the machine.
constexpr std::uint64_t unit = 4096;

// Each number gives another one; each bit of it depends on all bits.
std::uint64_t mixed(std::uint64_t number) {
  number = (number ^ (number >> 32U)) * 0xd6e8feb86659fd93U;
  number = (number ^ (number >> 32U)) * 0xd6e8feb86659fd93U;
  return number ^ (number >> 32U);
}

// What the unit at this place adds to the sum.
std::uint64_t part_of(std::uint64_t place, std::span<const std::byte> bytes) {
  return mixed(xxh3(bytes.data(), bytes.size()) + place);
}

}  // namespace

PageSums::PageSums(std::string key, const std::vector<Allocation::FileRange>& ranges,
                   std::uint64_t bytes, std::optional<std::uint64_t> expected)
    : key_(std::move(key)),
      path_(ranges.empty() ? std::string() : ranges.front().file.opened()->path()),
      bytes_(bytes),
      expected_(expected) {
  places_.reserve(ranges.size());
  for (const Allocation::FileRange& range : ranges) {
    places_.push_back({range.file.opened().get(), range.file_offset, range.offset, range.bytes});
  }
}

void PageSums::see(const files::OpenFile& file, std::uint64_t offset,
                   std::span<const std::byte> bytes) noexcept {
  const std::uint64_t end = offset + bytes.size();
  for (const Place& place : places_) {
    const std::uint64_t from = std::max(offset, place.file_offset);
    const std::uint64_t to = std::min(end, place.file_offset + place.bytes);
    if (place.file != &file || from >= to) continue;
    try {
      see_tensor(place.begin + (from - place.file_offset), bytes.subspan(from - offset, to - from));
    } catch (const std::bad_alloc&) {
      out_of_memory_ = true;
    }
  }
}

std::size_t PageSums::bytes_of(std::uint64_t place) const noexcept {
  return std::min(unit, bytes_ - place * unit);
}

void PageSums::see_tensor(std::uint64_t begin, std::span<const std::byte> bytes) {
  if (begin >= bytes_) return;  // behind its end
  bytes = bytes.first(std::min<std::uint64_t>(bytes.size(), bytes_ - begin));
  std::uint64_t sum = 0;
  while (!bytes.empty()) {
    const std::uint64_t place = begin / unit;
    const std::size_t at = begin % unit;
    const std::size_t here = std::min(bytes.size(), bytes_of(place) - at);
    if (here == bytes_of(place)) {
      sum += part_of(place, bytes.first(here));
    } else {
      add_fragment(place, at, bytes.first(here));
    }
    begin += here;
    bytes = bytes.subspan(here);
  }
  sum_ += sum;
}

void PageSums::add_fragment(std::uint64_t place, std::size_t at, std::span<const std::byte> bytes) {
  Partial whole;
  {
    const std::lock_guard lock(mutex_);
    Partial& partial = partials_[place];
    partial.bytes.resize(bytes_of(place));
    std::memcpy(partial.bytes.data() + at, bytes.data(), bytes.size());
    partial.filled += bytes.size();
    if (partial.filled < partial.bytes.size()) return;
    whole = std::move(partial);
    partials_.erase(place);
  }
  sum_ += part_of(place, whole.bytes);
}

std::optional<Error> PageSums::verdict() noexcept {
  if (out_of_memory_) {
    return Error(
        {.operation = "verify", .code = ENOMEM, .hint = "too little memory for a checksum"});
  }
  if (!expected_ || *expected_ == sum_) return std::nullopt;
  return Error({.operation = "verify",
                .path = path_,
                .length = bytes_,
                .code = EBADMSG,
                .hint = "the bytes of tensor '" + key_ +
                        "' are not those of the snapshot: their checksum is wrong; use another "
                        "snapshot"});
}

}  // namespace tensorferry::swap
