#include "handle/registrations.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/alignment.h"
#include "base/errno_name.h"

namespace tensorferry::handle {

namespace {

// Shorter runs are over before a registered file pays off.
constexpr std::uint64_t registered_file_blocks_min = 64;

}  // namespace

RegisteredRegions::Entry& RegisteredRegions::enter(const std::shared_ptr<memory::Region>& region) {
  Entry& entry = entries_[region->id()];
  entry.region = region;
  std::span<std::byte> left = region->mapped();
  int refused = 0;
  while (!left.empty() && refused == 0) {
    const auto piece = left.first(std::min(left.size(), engines::registered_buffer_bytes_max));
    left = left.subspan(piece.size());
    unsigned index = next_index_;
    if (!free_indexes_.empty()) {
      index = free_indexes_.back();
      free_indexes_.pop_back();
    } else if (next_index_ < engine_.capabilities().buffers_max) {
      ++next_index_;
    } else {
      refused = ENOSPC;
      break;
    }
    refused = -engine_.register_buffer(index, piece);
    (refused == 0 ? entry.indexes : free_indexes_).push_back(index);
  }
  if (refused != 0) {
    unregister(entry);
    ledger_.note_fallback(
        "page-locked memory is not registered with the ring (" + errno_name(refused) +
        "); transfers work without it; for ENOMEM raise the memlock limit (ulimit -l)");
  }
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
  const Entry& entry = known != entries_.end() ? known->second : enter(region);
  if (entry.indexes.empty()) return -1;
  const auto begin = static_cast<std::size_t>(memory.data() - region->data());
  const std::size_t piece = begin / engines::registered_buffer_bytes_max;
  const std::size_t last = (begin + memory.size() - 1) / engines::registered_buffer_bytes_max;
  return piece == last ? static_cast<int>(entry.indexes[piece]) : -1;
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
  for (const unsigned index : entry.indexes) {
    engine_.unregister_buffer(index);
    free_indexes_.push_back(index);
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
