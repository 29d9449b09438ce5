// The tensors of a swap space: their versions, and where the bytes of each are.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "handle/conductor.h"
#include "handle/transfer.h"
#include "os/gpu_stream.h"
#include "swap/arena.h"
#include "swap/mapping.h"
#include "swap/snapshot_links.h"
#include "swap/store.h"
#include "tensorferry/handle.h"
#include "tensorferry/swap_space.h"

namespace tensorferry::swap {

// What tests replace.
struct Seams {
  handle::Seams handle;
  DeviceUses device_uses = {};
};

// The implementation of SwapSpace. Thread-safe. Only the process that made it destroys it
// (os::DeleteOwn). Running writes hold it: if a callback on one of its workers destroys the
// SwapSpace, the Space lives on until they have ended.
class Space : public std::enable_shared_from_this<Space> {
 public:
  Space(const SwapOptions& options, const Seams& seams);  // throws Error as SwapSpace does
  ~Space() = default;
  Space(const Space&) = delete;
  Space& operator=(const Space&) = delete;

  // Cancels all operations and removes the files.
  void close() noexcept;

  Operation put(std::string_view key, std::span<const std::byte> memory, CudaStream stream = {});
  Operation get(std::string_view key, std::span<std::byte> memory, std::uint64_t offset,
                CudaStream stream = {});
  bool prefetch(std::string_view key);
  std::optional<SwapSpace::Fetched> fetch(std::string_view key,
                                          SwapSpace::Clock::time_point deadline);
  std::shared_ptr<Lease> take(std::size_t bytes, SwapSpace::Clock::time_point deadline,
                              const Operation* until = nullptr);
  bool drop(std::string_view key);
  std::shared_ptr<Mapping> view(std::span<const SwapPart> parts);
  [[nodiscard]] std::optional<std::uint64_t> size(std::string_view key) const;
  void reserve(std::uint64_t bytes);
  SwapSnapshot snapshot(const std::string& name, std::span<const std::string> keys,
                        std::span<const std::string> replaced);
  bool drop_snapshot(const std::string& name);
  [[nodiscard]] std::vector<std::string> snapshots() const;
  void attach(const SwapSnapshot& snapshot);
  [[nodiscard]] SwapStats stats() const;
  [[nodiscard]] const Store& store() const noexcept { return *store_; }
  [[nodiscard]] const Handle& handle() const noexcept { return handle_; }

 private:
  // The content of a tensor from one put to the next. Readers hold it while they read its
  // allocation.
  struct Version {
    std::shared_ptr<Allocation> allocation;
    std::uint64_t bytes = 0;
    // While its write runs: the memory that holds the bytes, and its lease if it is in our buffers.
    std::span<const std::byte> memory;
    std::shared_ptr<Lease> lease;
    std::shared_ptr<os::GpuFence> work;  // of a GPU, which fills the memory
    bool pending = true;
    bool failed = false;
    unsigned readers = 0;                    // of that memory; the write ends after them
    std::shared_ptr<handle::Transfer> held;  // the write, if the last reader must end it
    std::weak_ptr<handle::Transfer> write;
    std::optional<std::uint64_t> checksum;  // of its bytes, once they are on the drive
    // Its bytes come from a snapshot, and nobody has compared their checksum yet.
    std::atomic<bool> unread = false;
  };
  using Versions = std::vector<std::shared_ptr<Version>>;

  struct Prefetched {
    std::uint64_t number = 0;  // counts prefetches from 1
    std::shared_ptr<Version> version;
    std::shared_ptr<Lease> lease;
    Operation operation;
  };

  struct Entry {
    Versions versions;  // oldest first; the last one is the tensor
    std::shared_ptr<const Prefetched> prefetched;
  };
  using Entries = std::map<std::string, Entry, std::less<>>;

  [[nodiscard]] Entry& find(std::string_view key, const char* operation);
  // Waits until the last version is on the drive and returns it. Throws Error (EIO) if its write
  // fails.
  [[nodiscard]] std::shared_ptr<Version> settled(std::string_view key, const char* operation);
  // How many more bytes a snapshot of these versions keeps from being free, when those it replaces
  // have been dropped.
  [[nodiscard]] std::uint64_t pinned_more(const Versions& versions,
                                          std::span<const std::string> replaced) const;
  // The same versions as a user gets them, but for the paths of files. Adds these to `links`.
  [[nodiscard]] SwapSnapshot describe(const std::string& name, std::span<const std::string> keys,
                                      const Versions& versions, SnapshotLinks& links) const;
  // Call it when a write has ended. `transfer` is nullptr if the write never began.
  void written(const std::string& key, const std::shared_ptr<Version>& version,
               handle::Outcome outcome, handle::Transfer* transfer);
  [[nodiscard]] Operation read(std::string_view key, const std::shared_ptr<Version>& version,
                               std::span<std::byte> memory, std::uint64_t offset,
                               CudaStream stream = {});
  // An operation that is done, for bytes that came from memory.
  [[nodiscard]] Operation nothing_to_do();
  // Copies from the memory of a pending write. Returns with the lock released.
  void forward(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Version>& version,
               std::span<std::byte> memory, std::uint64_t offset);
  // Takes the prefetched bytes out of an entry; nullptr if it has none.
  [[nodiscard]] std::shared_ptr<const Prefetched> take_prefetched(Entry& entry);
  // The calling thread waits for a buffer: gives all operations that hold one its priority.
  void raise_all();
  // Drops one finished prefetch to free its room. Returns false if there is none.
  [[nodiscard]] bool evict();
  void check_generation() const;

  const std::uint64_t generation_;
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<Arena> arena_;

  mutable std::mutex mutex_;
  std::condition_variable settled_;  // a write or a reader has ended
  Entries entries_;
  std::uint64_t prefetches_ = 0;
  std::map<std::uint64_t, std::string> prefetch_order_;  // number -> key, oldest first
  std::map<std::string, Versions> snapshots_;            // what they keep, by their names
  SwapStats counts_;
  const bool checksums_;

  Handle handle_;  // last: its destructor waits for operations that use the members above
};

}  // namespace tensorferry::swap
