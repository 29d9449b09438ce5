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
  // A part of the tensor in `place`. Offsets are whole pages, and so are sizes but the last.
  struct Part {
    std::shared_ptr<Place> place;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };

  // Shows the parts one after the other. Fails with ENOMEM where there are no addresses for all of
  // them; nothing is mapped then.
  [[nodiscard]] static Result<std::shared_ptr<Mapping>> make(os::System& system,
                                                             std::vector<Part> parts);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {memory_, bytes_}; }

 private:
  Mapping(os::System& system, std::byte* memory, std::uint64_t bytes, std::uint64_t mapped_bytes,
          std::vector<Part> parts);
  // Lets the memory from `at` on show a part.
  [[nodiscard]] Status show(const Part& part, std::uint64_t at);

  os::System& system_;
  std::byte* const memory_;
  const std::uint64_t bytes_;
  const std::uint64_t mapped_bytes_;
  const std::vector<Part> parts_;
};

}  // namespace tensorferry::swap
