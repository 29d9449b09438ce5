// What a worker has registered with its engine: page-locked regions, and the files of long runs.
// Each belongs to one worker; only its thread uses it.
#pragma once

#include <chrono>
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

// The regions that are registered with the worker's engine, piece by piece as blocks use them.
class RegisteredRegions {
 public:
  RegisteredRegions(engines::Engine& engine, Ledger& ledger) : engine_(engine), ledger_(ledger) {}

  // The index of the piece of `region` that `memory` lies in; registers it at first use. Returns -1
  // if the memory reaches into the next piece, or if the kernel refuses: it notes that once as a
  // fallback, and tries again after a while.
  [[nodiscard]] int index_of(const std::shared_ptr<memory::Region>& region,
                             std::span<const std::byte> memory);
  // Unregisters regions that have ended.
  void drop_ended() noexcept;
  // Unregisters all. The end of the engine would not, or late: a child of fork() may hold its ring
  // too, and the kernel returns what it charged to the memlock limit some time after the ring.
  void drop_all() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    std::weak_ptr<memory::Region> region;
    std::size_t piece_bytes = 0;
    std::vector<int> indexes;  // one for each piece; -1: not registered
  };
  [[nodiscard]] Entry& enter(const std::shared_ptr<memory::Region>& region,
                             std::size_t block_bytes);
  [[nodiscard]] int try_to_register(const memory::Region& region, std::span<std::byte> piece);
  void unregister(Entry& entry) noexcept;

  engines::Engine& engine_;
  Ledger& ledger_;
  std::unordered_map<std::uint64_t, Entry> entries_;
  std::vector<unsigned> free_indexes_;
  unsigned next_index_ = 0;
  std::uint64_t ended_seen_ = 0;
  Clock::duration pause_{};  // since the last refusal; zero: the last piece was not refused
  Clock::time_point refused_until_;
  bool refusal_noted_ = false;
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
