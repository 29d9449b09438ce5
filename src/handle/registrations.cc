#include "handle/registrations.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "base/alignment.h"
#include "base/errno_name.h"

namespace tensorferry::handle {

namespace {

// Shorter runs are over before a registered file pays off.
constexpr std::uint64_t registered_file_blocks_min = 64;

// After a refusal nothing is registered for a while, longer each time: the attempt itself pins all
// pages of the piece before the kernel counts them.
constexpr std::chrono::milliseconds retry_pause_min{100};
constexpr std::chrono::seconds retry_pause_max{10};

// Pieces are small, so that using a part of a region does not pin all of it; but few for a region,
// because the ring's table is limited, and much larger than a block: those that reach over the edge
// of a piece go unregistered.
std::size_t piece_bytes(std::size_t region_bytes, std::size_t block_bytes) noexcept {
  constexpr std::size_t pieces_wanted = 16;
  constexpr std::size_t blocks_wanted = 16;
  const std::size_t wanted = std::max(region_bytes / pieces_wanted, block_bytes * blocks_wanted);
  return std::clamp(std::bit_ceil(wanted), 64 * MiB, engines::registered_buffer_bytes_max);
}

}  // namespace

RegisteredRegions::Entry& RegisteredRegions::enter(const std::shared_ptr<memory::Region>& region,
                                                   std::size_t block_bytes) {
  Entry& entry = entries_[region->id()];
  const std::size_t bytes = region->mapped().size();
  entry.region = region;
  entry.piece_bytes = piece_bytes(bytes, block_bytes);
  entry.indexes.assign((bytes + entry.piece_bytes - 1) / entry.piece_bytes, -1);
  if (region->bytes() >= huge_page_bytes && !region->huge_page_reason().empty()) {
    ledger_.note_fallback(
        "some page-locked memory has no huge pages and is slower; its huge_page_reason says why");
  }
  region->mark_registered();
  return entry;
}

int RegisteredRegions::index_of(const std::shared_ptr<memory::Region>& region,
                                std::span<const std::byte> memory) {
  if (engine_.capabilities().buffers_max == 0) return -1;
  const auto known = entries_.find(region->id());
  Entry& entry = known != entries_.end() ? known->second : enter(region, memory.size());
  const auto begin = static_cast<std::size_t>(memory.data() - region->data());
  const std::size_t piece = begin / entry.piece_bytes;
  if ((begin + memory.size() - 1) / entry.piece_bytes != piece) return -1;
  int& index = entry.indexes[piece];
  if (index < 0) {
    const std::span<std::byte> rest = region->mapped().subspan(piece * entry.piece_bytes);
    index = try_to_register(*region, rest.first(std::min(rest.size(), entry.piece_bytes)));
  }
  return index;
}

int RegisteredRegions::try_to_register(const memory::Region& region, std::span<std::byte> piece) {
  if (pause_ > Clock::duration::zero() && Clock::now() < refused_until_) return -1;
  unsigned index = next_index_;
  int refused = 0;
  if (!free_indexes_.empty()) {
    index = free_indexes_.back();
    free_indexes_.pop_back();
  } else if (next_index_ < engine_.capabilities().buffers_max) {
    ++next_index_;
  } else {
    refused = ENOSPC;
  }
  if (refused == 0) {
    refused = -engine_.share_buffer(index, piece, region.id());
    if (refused != 0) free_indexes_.push_back(index);
  }
  if (refused == 0) {
    pause_ = {};
    return static_cast<int>(index);
  }
  pause_ = std::clamp<Clock::duration>(2 * pause_, retry_pause_min, retry_pause_max);
  refused_until_ = Clock::now() + pause_;
  if (!std::exchange(refusal_noted_, true)) {
    ledger_.note_fallback(
        "some page-locked memory is not registered with the ring (" + errno_name(refused) +
        "); transfers work without it; for ENOMEM raise the memlock limit (ulimit -l)");
  }
  return -1;
}

void RegisteredRegions::drop_ended() noexcept {
  const std::uint64_t ended = memory::ended_regions();
  if (ended == std::exchange(ended_seen_, ended)) return;
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (!it->second.region.expired()) {
      ++it;
      continue;
    }
    unregister(it->second);
    it = entries_.erase(it);
  }
}

void RegisteredRegions::drop_all() noexcept {
  for (auto& [id, entry] : entries_) unregister(entry);
  entries_.clear();
}

void RegisteredRegions::unregister(Entry& entry) noexcept {
  for (const int index : entry.indexes) {
    if (index < 0) continue;
    engine_.unregister_buffer(static_cast<unsigned>(index));
    free_indexes_.push_back(static_cast<unsigned>(index));
  }
  entry.indexes.clear();
}

int RegisteredFiles::use(const Run& run) {
  if (run.direct_fd < 0 || run.plan.block_count() < registered_file_blocks_min) return -1;
  Entry* unused = nullptr;
  for (Entry& entry : entries_) {
    if (entry.run == &run) {
      ++entry.users;
      return static_cast<int>(&entry - entries_.data());
    }
    if (entry.run == nullptr) unused = &entry;
  }
  if (unused == nullptr) {
    if (entries_.size() >= engine_.capabilities().files_max) return -1;
    unused = &entries_.emplace_back();
  }
  const auto index = static_cast<unsigned>(unused - entries_.data());
  if (engine_.register_file(index, run.direct_fd) < 0) return -1;
  *unused = {.run = &run, .users = 1};
  return static_cast<int>(index);
}

void RegisteredFiles::give_back(const Run& run) noexcept {
  for (Entry& entry : entries_) {
    if (entry.run != &run) continue;
    if (--entry.users == 0) {
      engine_.unregister_file(static_cast<unsigned>(&entry - entries_.data()));
      entry.run = nullptr;
    }
    return;
  }
}

}  // namespace tensorferry::handle
