// What one piece of a user's call is made of, and what its file demands.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/alignment.h"
#include "files/open_file.h"
#include "handle/plan.h"

namespace tensorferry::handle {

// One piece of memory and its place in a file.
struct Part {
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0;
  std::shared_ptr<files::OpenFile> file;
  std::uint64_t offset = 0;
};

[[nodiscard]] inline const char* verb_of(Direction direction) noexcept {
  return direction == Direction::read ? "read" : "write";
}

// What the length of a request is a multiple of.
[[nodiscard]] inline std::size_t unit_of(const files::OpenFile& file) {
  return std::max({page_bytes, file.offset_alignment(), file.memory_alignment()});
}

[[nodiscard]] inline FileRules rules_of(const files::OpenFile& file) {
  return {.direct = file.direct(),
          .memory_alignment = file.memory_alignment(),
          .offset_alignment = file.offset_alignment()};
}

}  // namespace tensorferry::handle
