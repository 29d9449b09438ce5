// Slices of swapped tensors, mapped from their files one after the other.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "os/system.h"
#include "swap/store.h"

namespace tensorferry::swap {

class Mapping {
 public:
  // Bytes of one tensor. Offsets are whole pages; so are sizes, except for the last slice.
  struct Slice {
    std::shared_ptr<Allocation> allocation;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };

  // Maps the slices one after the other. Fails with ENOMEM if the process has too few addresses
  // left; then nothing is mapped.
  [[nodiscard]] static Result<std::shared_ptr<Mapping>> make(os::System& system,
                                                             std::vector<Slice> slices);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {memory_, bytes_}; }

 private:
  Mapping(os::System& system, std::byte* memory, std::uint64_t bytes, std::uint64_t mapped_bytes,
          std::vector<Slice> slices);
  // Maps a slice at offset `at` of the memory.
  [[nodiscard]] Status map(const Slice& slice, std::uint64_t at);

  os::System& system_;
  std::byte* const memory_;
  const std::uint64_t bytes_;
  const std::uint64_t mapped_bytes_;
  const std::vector<Slice> slices_;
};

}  // namespace tensorferry::swap
