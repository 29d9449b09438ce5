// Memory that stays with its process when that forks. The kernel copies pages that a ring or CUDA
// has registered at once, and for every child; what is kept from children costs a fork nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>

#include "os/system.h"

namespace tensorferry::os {

// While it lives, children of fork() do not get the memory, which is whole pages and stays mapped
// for so long. In a child its addresses stay taken to the end: whoever touches them faults, and
// nothing else is ever mapped there. Where the kernel refuses, children get it as any other memory.
// Thread-safe, also across fork.
class KeptFromChildren {
 public:
  KeptFromChildren(System& system, std::span<std::byte> memory);
  ~KeptFromChildren();
  KeptFromChildren(const KeptFromChildren&) = delete;
  KeptFromChildren& operator=(const KeptFromChildren&) = delete;

 private:
  const std::byte* memory_;
};

// Whether parents of this process have kept any memory from it.
inline constinit std::atomic<bool> any_kept_by_parent{false};
[[nodiscard]] bool listed_as_kept_by_parent(std::span<const std::byte> memory) noexcept;

// Whether any of `memory` was kept from this process by its parent, or by a parent of that one.
// Nearly free in a process that is no child: every transfer asks.
[[nodiscard]] inline bool kept_by_parent(std::span<const std::byte> memory) noexcept {
  return any_kept_by_parent.load(std::memory_order_relaxed) && listed_as_kept_by_parent(memory);
}

}  // namespace tensorferry::os
