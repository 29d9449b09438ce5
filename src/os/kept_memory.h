// Memory that children of fork() do not get. At a fork the kernel copies all pages that a ring or
// CUDA has registered, for every child; memory that is kept from children costs a fork nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>

#include "os/system.h"

namespace tensorferry::os {

// While it lives, children of fork() do not get the memory: whole pages, which the owner must not
// unmap before. In a child its addresses stay reserved to the end: touching them faults, and
// nothing else is ever mapped there. If the kernel refuses, children get the memory as any other.
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

// Whether a parent of this process has kept any memory from it.
inline constinit std::atomic<bool> any_kept_by_parent{false};
[[nodiscard]] bool listed_as_kept_by_parent(std::span<const std::byte> memory) noexcept;

// Whether a parent of this process, direct or not, has kept any of `memory` from it. Nearly free in
// a process that is no child: every transfer asks.
[[nodiscard]] inline bool kept_by_parent(std::span<const std::byte> memory) noexcept {
  return any_kept_by_parent.load(std::memory_order_relaxed) && listed_as_kept_by_parent(memory);
}

}  // namespace tensorferry::os
