// Stretches of files, one after the other in memory.
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
  // Reserves the addresses.
  [[nodiscard]] static Result<std::shared_ptr<Mapping>> make(os::System& system,
                                                             std::uint64_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Lets the next `bytes` of it show the tensor in `place` from `offset` on. Both offsets are whole
  // pages.
  [[nodiscard]] Status add(const std::shared_ptr<Place>& place, std::uint64_t offset,
                           std::uint64_t bytes);

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {memory_, bytes_}; }

 private:
  Mapping(os::System& system, std::byte* memory, std::uint64_t bytes, std::uint64_t mapped_bytes);

  os::System& system_;
  std::byte* const memory_;
  const std::uint64_t bytes_;
  const std::uint64_t mapped_bytes_;
  std::uint64_t filled_bytes_ = 0;
  std::vector<std::shared_ptr<Place>> places_;
};

}  // namespace tensorferry::swap
