// Tells whether two names or descriptors are the same file.
#pragma once

#include <sys/stat.h>

#include <compare>
#include <cstdint>

namespace tensorferry::files {

struct Identity {
  std::uint32_t device_major = 0;
  std::uint32_t device_minor = 0;
  std::uint64_t inode = 0;
  auto operator<=>(const Identity&) const = default;
};

// Needs facts that statx() returned for STATX_INO.
[[nodiscard]] inline Identity identity_of(const struct statx& facts) noexcept {
  return {facts.stx_dev_major, facts.stx_dev_minor, facts.stx_ino};
}

}  // namespace tensorferry::files
