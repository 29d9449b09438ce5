// Memory for the transfers of tests.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>

#include "base/alignment.h"
#include "support/pattern.h"

namespace tensorferry::support {

// Zeros that start `skew` bytes after a page. It lies on the heap: AddressSanitizer knows its end.
class Memory {
 public:
  explicit Memory(std::size_t bytes, std::size_t skew = 0)
      : pages_(new(std::align_val_t{page_bytes()}) std::byte[skew + bytes]{}),
        bytes_(pages_.get() + skew, bytes) {}

  // Memory that holds the bytes of a file of pattern `seed` from `offset` on.
  [[nodiscard]] static Memory with_pattern(std::size_t bytes, std::uint64_t offset,
                                           std::uint32_t seed, std::size_t skew = 0) {
    Memory memory(bytes, skew);
    fill_pattern(memory.bytes(), offset, seed);
    return memory;
  }

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::byte* at(std::size_t offset) const noexcept { return bytes_.data() + offset; }

 private:
  struct Delete {
    void operator()(std::byte* pages) const noexcept {
      ::operator delete[](pages, std::align_val_t{page_bytes()});
    }
  };
  std::unique_ptr<std::byte[], Delete> pages_;
  std::span<std::byte> bytes_;
};

// Zeros that start with a page and cost nothing until a test touches them.
class UntouchedMemory {
 public:
  explicit UntouchedMemory(std::size_t bytes) {
    void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    bytes_ = {static_cast<std::byte*>(mapped), bytes};
  }
  ~UntouchedMemory() { ::munmap(bytes_.data(), bytes_.size()); }
  UntouchedMemory(const UntouchedMemory&) = delete;
  UntouchedMemory& operator=(const UntouchedMemory&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::byte* at(std::size_t offset) const noexcept { return bytes_.data() + offset; }

 private:
  std::span<std::byte> bytes_;
};

// Memory between pages of guard bytes, which show that somebody wrote beyond its ends.
class GuardedMemory {
 public:
  explicit GuardedMemory(std::size_t bytes, std::size_t skew = 0)
      : all_(bytes + skew + 2 * page_bytes()), begin_(page_bytes() + skew), bytes_(bytes) {
    std::ranges::fill(all_.bytes(), guard);
    clear();
  }

  [[nodiscard]] std::span<std::byte> bytes() const noexcept {
    return all_.bytes().subspan(begin_, bytes_);
  }
  void clear() const { std::ranges::fill(bytes(), blank); }
  void fill(std::uint64_t offset, std::uint32_t seed) const { fill_pattern(bytes(), offset, seed); }

  // Empty if it holds the bytes of a file of pattern `seed` and all guard bytes are unchanged.
  [[nodiscard]] std::string fault(std::uint64_t offset, std::uint32_t seed) const {
    if (!constant_fault(all_.bytes().first(begin_), 0, guard).empty()) {
      return "bytes before the memory were changed";
    }
    if (!constant_fault(all_.bytes().subspan(begin_ + bytes_), 0, guard).empty()) {
      return "bytes after the memory were changed";
    }
    return pattern_fault(bytes(), offset, seed);
  }

 private:
  static constexpr std::byte guard{0x5e};
  static constexpr std::byte blank{0x11};
  Memory all_;
  std::size_t begin_;
  std::size_t bytes_;
};

}  // namespace tensorferry::support
