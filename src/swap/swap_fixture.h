// Swap spaces for tests.
#pragma once

#include <cstddef>

#include "support/temp_dir.h"
#include "tensorferry/swap_space.h"

namespace tensorferry::swap {

[[nodiscard]] inline SwapOptions options_in(const support::TempDir& dir, std::size_t buffer_bytes) {
  SwapOptions options;
  options.directories = {dir.path()};
  options.buffer_bytes = buffer_bytes;
  return options;
}

}  // namespace tensorferry::swap
