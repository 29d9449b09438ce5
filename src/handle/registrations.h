// What a worker has registered with its engine: page-locked regions, and the files of long runs.
// Each belongs to one worker; only its thread uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engines/engine.h"
#include "handle/ledger.h"
#include "handle/transfer.h"
#include "memory/region.h"

namespace tensorferry::handle {

// The regions that are registered with the worker's engine, by index.
class RegisteredRegions {
 public:
  RegisteredRegions(engines::Engine& engine, Ledger& ledger) : engine_(engine), ledger_(ledger) {}

  // The index of `memory`, which lies in `region`. Registers the region at first use. Returns -1 if
  // the kernel refuses, and notes that once as a fallback.
  [[nodiscard]] int index_of(const std::shared_ptr<memory::Region>& region,
                             std::span<const std::byte> memory);
  // Unregisters regions that have ended.
  void drop_ended() noexcept;
  // Unregisters all. The end of the engine would not: a child of fork() may hold its ring too.
  void drop_all() noexcept;

 private:
  struct Entry {
    std::weak_ptr<memory::Region> region;
    std::vector<unsigned> indexes;  // one for each GiB; empty if the kernel refused
  };
  [[nodiscard]] Entry& enter(const std::shared_ptr<memory::Region>& region);
  void unregister(Entry& entry) noexcept;

  engines::Engine& engine_;
  Ledger& ledger_;
  std::unordered_map<std::uint64_t, Entry> entries_;
  std::vector<unsigned> free_indexes_;
  unsigned next_index_ = 0;
  std::uint64_t ended_seen_ = 0;
};

// Registers the file of a long run with the engine while blocks of it are in flight, and no longer:
// a registered file cannot be closed, nor its file system unmounted.
class RegisteredFiles {
 public:
  explicit RegisteredFiles(engines::Engine& engine) : engine_(engine) {}

  // The index of the run's direct descriptor, or -1. Give each index back.
  [[nodiscard]] int use(const Run& run);
  void give_back(const Run& run) noexcept;

 private:
  struct Entry {
    const Run* run = nullptr;  // nullptr: the index is free
    unsigned users = 0;
  };
  engines::Engine& engine_;
  std::vector<Entry> entries_;  // by index
};

}  // namespace tensorferry::handle
