// One part of a user's call, and what its file requires.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/alignment.h"
#include "files/open_file.h"
#include "handle/plan.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

// A stretch of memory and its place in a file.
struct Part {
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0;
  std::shared_ptr<files::OpenFile> file;
  std::uint64_t offset = 0;
  int gpu = -1;            // the GPU that has the memory; -1: the CPU
  CudaStream stream = {};  // the user's, if it is a GPU
  std::size_t leg = 0;     // of the transfer, once its crew is chosen
};

// Whether the caller waits for the operation, or goes on and lets it run beside.
enum class Caller : std::uint8_t { waits, goes_on };

[[nodiscard]] inline const char* verb_of(Direction direction) noexcept {
  return direction == Direction::read ? "read" : "write";
}

// Requests that are not ragged have a multiple of this length.
[[nodiscard]] inline std::size_t granularity_of(const files::OpenFile& file) {
  return std::max({page_bytes(), file.offset_alignment(), file.memory_alignment()});
}

[[nodiscard]] inline Rules rules_of(const Part& part) {
  return {.direct = part.file->direct(),
          .memory_alignment = part.file->memory_alignment(),
          .offset_alignment = part.file->offset_alignment(),
          .in_place = part.gpu < 0};
}

}  // namespace tensorferry::handle
