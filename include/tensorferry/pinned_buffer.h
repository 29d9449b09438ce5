// Page-locked memory: whole pages, exactly as much as asked, huge pages where possible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tensorferry/export.h"

namespace tensorferry {

namespace memory {
class Region;
}

// Whether page-locked memory becomes known to CUDA: `yes` as soon as the process has a context of
// CUDA (none is made for it), `no` for those who register it themselves.
enum class KnownToCuda : std::uint8_t { yes, no };

// Owns its memory and moves, never copies. Every Handle recognises memory inside a PinnedBuffer
// and registers it once with each of its rings. Operations in flight keep the memory alive, so
// freeing early is safe: the pages go when the last operation on them is done.
//
// After fork() the memory is the parent's alone. The kernel would copy all of it for each child,
// because rings and CUDA have it registered, so children do not get it. In a child the addresses
// stay taken for good and nothing is there: touching them is a fault (SIGSEGV), moving them is an
// Error (EFAULT), is_pinned() is false, free() and the destructor are safe. A child makes its own.
class TENSORFERRY_EXPORT PinnedBuffer {
 public:
  // Maps, zeroes and locks. Over the memlock limit the memory works unlocked: see locked().
  // Throws Error (ENOMEM) when there is no memory.
  explicit PinnedBuffer(std::size_t bytes, KnownToCuda cuda = KnownToCuda::yes);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&&) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&&) noexcept;

  [[nodiscard]] std::byte* data() const noexcept;  // starts a page; nullptr once freed
  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data(), size()}; }

  // Whether the pages are locked, and if not: the reason, the limit and how to raise it.
  [[nodiscard]] bool locked() const noexcept;
  [[nodiscard]] const std::string& lock_reason() const noexcept;

  // Why the memory is not made of huge pages; empty where it is (as far as it holds whole ones).
  [[nodiscard]] const std::string& huge_page_reason() const noexcept;

  // Gives the memory back now. A second free throws Error (EINVAL).
  void free();

 private:
  std::shared_ptr<memory::Region> region_;
};

// Whether all of `bytes` lies inside one live PinnedBuffer of this process. False for an empty
// span.
[[nodiscard]] TENSORFERRY_EXPORT bool is_pinned(std::span<const std::byte> bytes) noexcept;

}  // namespace tensorferry
