#include "handle/plan.h"

#include <algorithm>

#include "base/alignment.h"

namespace tensorferry::handle {

namespace {

// A read with ragged ends takes up to three requests in place and one through a slot. Below this
// size the copy is cheaper.
constexpr std::uint64_t ragged_in_place_bytes_min = 64 * KiB;

}  // namespace

Plan::Plan(Direction direction, std::uint64_t offset, std::span<const Piece> pieces,
           const Rules& rules, const Limits& limits)
    : offset_(offset),
      pieces_(pieces),
      limits_(limits),
      one_in_place_(pieces.size() == 1 && rules.in_place),
      buffered_in_place_(one_in_place_ && rules.buffered_in_place) {
  if (!pieces.empty()) bytes_ = pieces.back().start + pieces.back().bytes;
  has_gaps_ = pieces.size() > 2 && std::ranges::any_of(pieces, [](const Piece& piece) {
                return piece.memory == nullptr;
              });
  if (bytes_ == 0) return;
  if (!rules.direct) {
    plan_buffered(offset_, offset_ + bytes_);
  } else if (direction == Direction::read) {
    plan_direct_read(rules);
  } else {
    plan_direct_write(rules);
  }
}

void Plan::add(const Section& section) {
  if (section.begin == section.end) return;
  sections_[section_count_++] = section;
  block_count_ += section.count();
  needs_buffered_ |= section.descriptor == Descriptor::buffered;
  if (!section.in_place) slot_bytes_ += section.wanted_end - section.wanted_begin;
}

// The page cache takes any address. Only several pieces, and memory that the engine cannot reach,
// need a slot.
void Plan::plan_buffered(std::uint64_t begin, std::uint64_t end) {
  add({.begin = begin,
       .end = end,
       .wanted_begin = begin,
       .wanted_end = end,
       .block_bytes = buffered_in_place_ ? limits_.block_bytes : limits_.slot_block_bytes,
       .descriptor = Descriptor::buffered,
       .in_place = buffered_in_place_});
}

// Bytes that cannot be read in place are read into slots in whole aligned blocks; the wanted ones
// are copied.
void Plan::plan_direct_read(const Rules& rules) {
  const std::uint64_t end = offset_ + bytes_;
  const std::uint64_t first = align_up(offset_, rules.offset_alignment);
  const std::uint64_t last = align_down(end, rules.offset_alignment);
  const auto shortened = [](std::uint64_t begin, std::uint64_t stop, std::size_t block_bytes) {
    return stop - begin > block_bytes ? begin % page_bytes() : 0;
  };
  const auto through_slots = [&](std::uint64_t wanted_begin, std::uint64_t wanted_end) {
    if (wanted_begin == wanted_end) return;
    const std::uint64_t covered = align_down(wanted_begin, rules.offset_alignment);
    const std::uint64_t stop = align_up(wanted_end, rules.offset_alignment);
    add({.begin = covered,
         .end = stop,
         .wanted_begin = wanted_begin,
         .wanted_end = wanted_end,
         .block_bytes = limits_.slot_block_bytes,
         .descriptor = Descriptor::direct,
         .in_place = false,
         .shortened = shortened(covered, stop, limits_.slot_block_bytes)});
  };

  const bool ragged = first != offset_ || last != end;
  const bool in_place = first < last && memory_fits(first, rules.memory_alignment) &&
                        (!ragged || last - first >= ragged_in_place_bytes_min);
  if (!in_place) {
    through_slots(offset_, end);
    return;
  }
  through_slots(offset_, first);
  const std::uint64_t short_by = shortened(first, last, limits_.block_bytes);
  add({.begin = first,
       .end = last,
       .wanted_begin = first,
       .wanted_end = last,
       .block_bytes = limits_.block_bytes,
       .descriptor = Descriptor::direct,
       .in_place = true,
       .shortened = short_by % rules.memory_alignment == 0 ? short_by : 0});
  through_slots(last, end);
}

// Pages that are only partly written go through the page cache, where the kernel keeps their other
// bytes. The border is the page, not the smaller direct alignment: were one page written both ways,
// its later write-back could undo the direct part.
void Plan::plan_direct_write(const Rules& rules) {
  const std::uint64_t end = offset_ + bytes_;
  const std::size_t border = std::max(page_bytes(), rules.offset_alignment);
  const std::uint64_t first = align_up(offset_, border);
  const std::uint64_t last = align_down(end, border);
  if (first >= last) {
    plan_buffered(offset_, end);
    return;
  }
  const bool in_place = memory_fits(first, rules.memory_alignment);
  plan_buffered(offset_, first);
  add({.begin = first,
       .end = last,
       .wanted_begin = first,
       .wanted_end = last,
       .block_bytes = in_place ? limits_.block_bytes : limits_.slot_block_bytes,
       .descriptor = Descriptor::direct,
       .in_place = in_place});
  plan_buffered(last, end);
}

bool Plan::memory_fits(std::uint64_t at, std::size_t alignment) const noexcept {
  return one_in_place_ && is_aligned(pieces_[0].memory + (at - offset_), alignment);
}

std::size_t Plan::piece_at(std::uint64_t start) const noexcept {
  const auto after =
      std::upper_bound(pieces_.begin(), pieces_.end(), start,
                       [](std::uint64_t value, const Piece& piece) { return value < piece.start; });
  return static_cast<std::size_t>(after - pieces_.begin()) - 1;
}

std::uint64_t Plan::count_kept(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  std::uint64_t kept = 0;
  for_each_memory(offset, bytes, [&](const std::byte* memory, std::size_t count) {
    if (memory != nullptr) kept += count;
  });
  return kept;
}

Block Plan::block(std::uint64_t index) const {
  const Section* section = sections_;
  while (index >= section->count()) {
    index -= section->count();
    ++section;
  }
  const std::uint64_t border = section->begin - section->shortened + index * section->block_bytes;
  const std::uint64_t begin = std::max(section->begin, border);
  const std::uint64_t end = std::min<std::uint64_t>(section->end, border + section->block_bytes);
  const std::uint64_t wanted_begin = std::max(begin, section->wanted_begin);
  const std::uint64_t wanted_end = std::min(end, section->wanted_end);
  return {.offset = begin,
          .wanted_offset = wanted_begin,
          .bytes = static_cast<std::uint32_t>(end - begin),
          .wanted_bytes = static_cast<std::uint32_t>(wanted_end - wanted_begin),
          .descriptor = section->descriptor,
          .memory = section->in_place ? pieces_[0].memory + (begin - offset_) : nullptr};
}

}  // namespace tensorferry::handle
