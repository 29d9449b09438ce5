// The request sizes and queue depth that suit the block device under a file, from sysfs and from
// its profile. Looks through partitions, md, dm, loop, btrfs and overlay. Without /sys or /proc the
// defaults hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tensorferry/device.h"

namespace tensorferry::files {

// Where to look. Tests use another tree.
struct SystemTree {
  std::string sys = "/sys";
  std::string mountinfo = "/proc/self/mountinfo";
};

// The device that holds the files of device number major:minor (st_dev of a regular file, st_rdev
// of a block device), from sysfs. Never fails: a field that is not known keeps its default. Reads
// several small files, so callers cache (see device_of).
[[nodiscard]] Device inspect_device(unsigned major, unsigned minor, const SystemTree& tree = {});

// Sets the profile of a device from its file, or profile_problem. Never fails.
void take_profile(Device& device);

enum class Pages : std::uint8_t { usual, huge };

// The request size to use for memory in such pages: from the profile, else from sysfs.
[[nodiscard]] inline std::size_t preferred_block_bytes(const Device& device,
                                                       Pages pages = Pages::usual) noexcept {
  if (device.profile) return device.profile->block_bytes;
  return pages == Pages::huge ? device.huge_page_block_bytes : device.block_bytes;
}

// inspect_device() and take_profile(), once per device number and process. Thread-safe.
[[nodiscard]] const Device& device_of(unsigned major, unsigned minor);

}  // namespace tensorferry::files
