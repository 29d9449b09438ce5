// Regions of page-locked memory, and the process-wide list of those that users hold. Rings register
// regions by id. When a region ends, its listeners are called, so that rings unregister it and the
// kernel releases the pages too.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/result.h"
#include "os/kept_memory.h"
#include "os/system.h"
#include "tensorferry/pinned_buffer.h"

namespace tensorferry::memory {

// Consecutive page-locked memory. Does not change, except for its registrations. The last reference
// unmaps it, on any thread. Children of fork() do not get the memory; its addresses stay reserved.
class Region {
 public:
  // Maps whole pages (huge ones if possible), zeroed, and locks them. Regions of 256 KiB and more
  // that are smaller than a huge page lie side by side in one. Over the memlock limit the
  // memory works unlocked, and lock_reason() says so. The pages come from the NUMA node `numa_node`
  // as long as it has some; from any if it is -1 or does not exist. Fails only with ENOMEM.
  [[nodiscard]] static Result<std::shared_ptr<Region>> create(std::size_t bytes, os::System& system,
                                                              int numa_node = -1);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }  // as requested
  // Whether all of `bytes` lie in the region.
  [[nodiscard]] bool holds(std::span<const std::byte> bytes) const noexcept {
    const auto skipped =
        reinterpret_cast<std::uintptr_t>(bytes.data()) - reinterpret_cast<std::uintptr_t>(data_);
    return skipped < bytes_ && bytes.size() <= bytes_ - skipped;
  }
  [[nodiscard]] std::span<std::byte> mapped() const noexcept { return {data_, mapped_bytes_}; }
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }  // never used twice
  [[nodiscard]] const std::string& lock_reason() const noexcept { return lock_reason_; }
  [[nodiscard]] const std::string& huge_page_reason() const noexcept { return huge_page_reason_; }
  // Why the pages do not come from the NUMA node that was asked for; else empty.
  [[nodiscard]] const std::string& numa_reason() const noexcept { return numa_reason_; }

  // Registers the region with CUDA, once, until it ends. Returns false if the process has no CUDA
  // context yet: call it again later. If CUDA refuses, the memory works all the same, and
  // cuda_reason() says why.
  bool register_with_cuda();
  [[nodiscard]] std::string cuda_reason() const;

  // Notes that a ring has registered the region: its end will call the listeners (EndOfRegions).
  void mark_registered() noexcept { registered_.store(true, std::memory_order_relaxed); }

 private:
  Region(std::byte* data, std::size_t bytes, std::size_t mapped_bytes, os::System& system);
  void populate();

  std::byte* data_;
  std::size_t bytes_;
  std::size_t mapped_bytes_;
  os::System& system_;
  std::uint64_t id_;
  std::string lock_reason_;
  std::string huge_page_reason_;
  std::string numa_reason_;
  std::atomic<bool> registered_{false};
  const std::uint64_t generation_;  // of forks
  std::optional<os::KeptFromChildren> kept_;

  enum class Cuda : std::uint8_t { unknown, known, refused };
  std::atomic<Cuda> cuda_{Cuda::unknown};
  int cuda_device_ = 0;            // that registered it
  mutable std::mutex cuda_mutex_;  // held during the registration; guards the reason
  std::string cuda_reason_;
};

// EINVAL, with the nodes that there are, if the machine has no such NUMA node. -1 stands for any.
[[nodiscard]] Status check_numa_node(int numa_node, os::System& system);

// The list of regions that users hold. Thread-safe, also across fork: the list of a child is empty.
void list_region(const std::shared_ptr<Region>& region, KnownToCuda cuda);
// Registers those with CUDA that should be and are not yet. Quick if none is left.
void register_listed_with_cuda();
void unlist_region(const Region& region) noexcept;
// The listed region that holds all of `bytes`, or nullptr. No region holds an empty span.
[[nodiscard]] std::shared_ptr<Region> find_region(std::span<const std::byte> bytes) noexcept;

// How many registered regions have ended so far in this process.
[[nodiscard]] std::uint64_t ended_regions() noexcept;

// While it lives, calls `listener` after the end of each registered region, on the thread that
// ended it. The listener must not take a lock that anybody holds while releasing a region.
class EndOfRegions {
 public:
  explicit EndOfRegions(std::function<void()> listener);
  ~EndOfRegions();
  EndOfRegions(const EndOfRegions&) = delete;
  EndOfRegions& operator=(const EndOfRegions&) = delete;

 private:
  std::function<void()> listener_;
};

}  // namespace tensorferry::memory
