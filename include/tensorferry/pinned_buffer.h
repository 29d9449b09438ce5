// Page-locked memory: whole pages, no more than needed, huge pages if possible.
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

// Whether the library registers page-locked memory with CUDA. `yes`: as soon as the process has a
// CUDA context; the library makes none. `no`: the caller may register the memory.
enum class KnownToCuda : std::uint8_t { yes, no };

// New fields come last.
struct PinnedBufferOptions {
  KnownToCuda cuda = KnownToCuda::yes;

  // The NUMA node that the memory comes from if it has enough: for example
  // device_of(path).numa_node, the node of a drive. -1: the system chooses.
  int numa_node = -1;
};

// Owns its memory. Movable, not copyable. Every Handle recognises memory inside a PinnedBuffer and
// registers it once with each of its rings. Operations in flight keep the memory alive, so freeing
// early is safe: the pages are released when the last operation on them is done.
//
// After fork() only the parent has the memory. Rings and CUDA have it registered, so the kernel
// would copy all of it for each child; therefore children do not get it. In a child the addresses
// stay reserved for good: touching them faults (SIGSEGV), a transfer of them is an Error (EFAULT),
// is_pinned() is false, free() and the destructor are safe. A child makes its own buffers.
class TENSORFERRY_EXPORT PinnedBuffer {
 public:
  // Maps, zeroes and locks the memory. Over the memlock limit the memory works unlocked: see
  // locked(). Throws Error: ENOMEM if the system has too little memory, EINVAL if it has no such
  // NUMA node.
  explicit PinnedBuffer(std::size_t bytes, const PinnedBufferOptions& options = {});
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&&) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&&) noexcept;

  [[nodiscard]] std::byte* data() const noexcept;  // begins a page; nullptr once freed
  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data(), size()}; }

  // Whether the pages are locked. If not, lock_reason() tells why, the limit and how to raise it.
  [[nodiscard]] bool locked() const noexcept;
  [[nodiscard]] const std::string& lock_reason() const noexcept;

  // Why the memory is not in huge pages; empty if it is, except for an end smaller than one.
  [[nodiscard]] const std::string& huge_page_reason() const noexcept;

  // Why the system refused to take the memory from the NUMA node of the options; else empty.
  [[nodiscard]] const std::string& numa_reason() const noexcept;

  // Frees the memory now. A second call throws Error (EINVAL).
  void free();

 private:
  std::shared_ptr<memory::Region> region_;
};

// Whether all of `bytes` lies inside one live PinnedBuffer of this process. False for an empty
// span.
[[nodiscard]] TENSORFERRY_EXPORT bool is_pinned(std::span<const std::byte> bytes) noexcept;

}  // namespace tensorferry
