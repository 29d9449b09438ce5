// The buffers of a swap space, and the leases that divide them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "swap/extents.h"
#include "tensorferry/swap_space.h"

namespace tensorferry::swap {

class Arena;

// Memory and the object that frees it.
struct OwnedMemory {
  std::span<std::byte> bytes;
  std::shared_ptr<const void> owner;
};

// Whole pages of the arena, for one user. Its destructor gives them back.
class Lease {
 public:
  Lease(std::shared_ptr<Arena> arena, Extent extent, std::size_t asked_bytes);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return pages().first(asked_bytes_); }
  [[nodiscard]] std::span<std::byte> pages() const noexcept;  // rounded up to whole pages

 private:
  const std::shared_ptr<Arena> arena_;
  const Extent extent_;
  const std::size_t asked_bytes_;
};

// Thread-safe. In a child of fork() it never changes: leases that end there give nothing back, and
// holder() finds none.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // Throws Error (ENOMEM).
  [[nodiscard]] static std::shared_ptr<Arena> make(std::size_t bytes, SwapMemory kind);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns nullptr if no free extent is large enough.
  [[nodiscard]] std::shared_ptr<Lease> try_take(std::size_t bytes);

  // The lease, of any arena of the process, that holds all of `memory`; nullptr if none does.
  [[nodiscard]] static std::shared_ptr<Lease> holder(std::span<const std::byte> memory);

  // changes() counts the leases that were given back. wait_until() blocks until the count differs
  // from `seen`, or returns false if the deadline passes first.
  [[nodiscard]] std::uint64_t changes() const;
  bool wait_until(std::uint64_t seen, std::chrono::steady_clock::time_point deadline);
  // Wakes all waiting threads: buffers can be freed now although no lease was given back.
  void touch();

  [[nodiscard]] std::size_t size() const noexcept { return memory_.bytes.size(); }
  [[nodiscard]] std::uint64_t used_bytes() const;

 private:
  friend class Lease;
  explicit Arena(OwnedMemory memory);
  void give_back(Extent extent);
  [[nodiscard]] std::shared_ptr<Lease> find(std::span<const std::byte> memory);

  const OwnedMemory memory_;
  const std::uint64_t generation_;  // of forks
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t changes_ = 0;
  FreeExtents free_;
  std::map<std::uint64_t, std::weak_ptr<Lease>> leases_;  // by offset
};

}  // namespace tensorferry::swap
