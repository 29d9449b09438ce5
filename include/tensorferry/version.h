// The only definition of the version: CMake, pkg-config and every package read it here.
// docs/reference/cpp.md says what a new version may change.
#pragma once

#include <cstdint>
#include <string_view>

#include "tensorferry/export.h"

#define TENSORFERRY_VERSION_MAJOR 0
#define TENSORFERRY_VERSION_MINOR 1
#define TENSORFERRY_VERSION_PATCH 0

// The version as one number that grows with every version, for #if: 1.2.3 is 1'002'003.
#define TENSORFERRY_VERSION_NUMBER                                          \
  (TENSORFERRY_VERSION_MAJOR * 1000000 + TENSORFERRY_VERSION_MINOR * 1000 + \
   TENSORFERRY_VERSION_PATCH)

// The version as text: "1.2.3".
#define TENSORFERRY_VERSION                                                \
  TENSORFERRY_DOTTED(TENSORFERRY_VERSION_MAJOR, TENSORFERRY_VERSION_MINOR, \
                     TENSORFERRY_VERSION_PATCH)
#define TENSORFERRY_DOTTED(major, minor, patch) TENSORFERRY_DOTTED_WORDS(major, minor, patch)
#define TENSORFERRY_DOTTED_WORDS(major, minor, patch) #major "." #minor "." #patch

namespace tensorferry {

// The version of the library that runs. The macros give that of the headers a program was compiled
// with.
[[nodiscard]] TENSORFERRY_EXPORT std::uint32_t library_version_number() noexcept;
[[nodiscard]] TENSORFERRY_EXPORT std::string_view library_version() noexcept;

}  // namespace tensorferry
