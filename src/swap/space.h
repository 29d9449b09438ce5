// The tensors of a swap space: which versions of each there are, and which of them is where.
#pragma once

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
#include "swap/store.h"
#include "tensorferry/handle.h"
#include "tensorferry/swap_space.h"

namespace tensorferry::swap {

// What tests replace.
struct Seams {
  handle::Parts parts;
};

// Behind every SwapSpace stands one. Thread-safe. Destroyed only by the process that made it
// (os::DeleteOwn). Writes under way hold it: one that is ended in a callback of its own worker
// outlives its SwapSpace until they have ended.
class Space : public std::enable_shared_from_this<Space> {
 public:
  Space(const SwapOptions& options, const Seams& seams);  // throws Error, as SwapSpace does
  ~Space() = default;
  Space(const Space&) = delete;
  Space& operator=(const Space&) = delete;

  // Cancels what is in flight and removes the files.
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
  [[nodiscard]] SwapStats stats() const;
  [[nodiscard]] const Store& store() const noexcept { return *store_; }
  [[nodiscard]] const Handle& handle() const noexcept { return handle_; }

 private:
  // The content of a tensor from one put to the next. Readers hold it while they read its
  // allocation.
  struct Version {
    std::shared_ptr<Allocation> allocation;
    std::uint64_t bytes = 0;
    // While its write is under way: where the bytes are, and who keeps them there if it is ours.
    std::span<const std::byte> memory;
    std::shared_ptr<Lease> lease;
    std::shared_ptr<os::GpuFence> work;  // that fills the memory, where it is a GPU's
    bool pending = true;
    bool failed = false;
    unsigned readers = 0;  // of that memory; the write is not done before they are
    std::shared_ptr<handle::Transfer> held;  // the write, if the last of them is to end it
  };

  struct Prefetched {
    std::uint64_t number = 0;  // they count from 1
    std::shared_ptr<Version> version;
    std::shared_ptr<Lease> lease;
    Operation operation;
  };

  struct Entry {
    std::vector<std::shared_ptr<Version>> versions;  // oldest first; the last one counts
    std::shared_ptr<const Prefetched> prefetched;
  };
  using Entries = std::map<std::string, Entry, std::less<>>;

  [[nodiscard]] Entry& find(std::string_view key, const char* operation);
  // The version that counts, once it is on the drive.
  [[nodiscard]] std::shared_ptr<Version> settled(std::string_view key, const char* operation);
  // A write has ended: the transfer, or none where it has not begun.
  void written(const std::string& key, const std::shared_ptr<Version>& version,
               handle::Outcome outcome, handle::Transfer* transfer);
  [[nodiscard]] Operation read(const std::shared_ptr<Version>& version, std::span<std::byte> memory,
                               std::uint64_t offset, CudaStream stream = {});
  // An operation that is done, for what has come from memory.
  [[nodiscard]] Operation nothing_to_do();
  // Copies from the memory of a pending write. Unlocks meanwhile, and for good.
  void forward(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Version>& version,
               std::span<std::byte> memory, std::uint64_t offset);
  // What has been prefetched for an entry, if anything; it is the caller's then.
  [[nodiscard]] std::shared_ptr<const Prefetched> take_prefetched(Entry& entry);
  // Gives up one finished prefetch for the room it takes.
  [[nodiscard]] bool evict();
  void check_generation() const;

  const std::uint64_t generation_;
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<Arena> arena_;

  mutable std::mutex mutex_;
  std::condition_variable settled_;  // a write has ended, or a reader
  Entries entries_;
  std::uint64_t prefetches_ = 0;
  std::map<std::uint64_t, std::string> prefetch_order_;  // number -> key, oldest first
  SwapStats counts_;

  Handle handle_;  // last: its end waits for the operations that use the rest
};

}  // namespace tensorferry::swap
