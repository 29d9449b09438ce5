// What the block device under a file likes: request sizes and queue, from sysfs, also behind
// partitions, md, dm, loop, btrfs and overlay, and from its profile. Where /sys or /proc are
// missing the defaults hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tensorferry/device.h"

namespace tensorferry::files {

// Where to look; tests give another tree.
struct SystemTree {
  std::string sys = "/sys";
  std::string mountinfo = "/proc/self/mountinfo";
};

// The device that holds the files of device number major:minor (st_dev of a regular file, st_rdev
// of a block device), as sysfs has it. Never fails: what is not known keeps its default. Reads
// several small files; callers cache (see device_of).
[[nodiscard]] Device inspect_device(unsigned major, unsigned minor, const SystemTree& tree = {});

// Reads the profile of a device into it: its own settings, or the problem with them. Never fails.
void take_profile(Device& device);

enum class Pages : std::uint8_t { usual, huge };

// The request size to use for memory of such pages: that of the profile, else what sysfs suggests.
[[nodiscard]] inline std::size_t preferred_block_bytes(const Device& device,
                                                       Pages pages = Pages::usual) noexcept {
  if (device.profile) return device.profile->block_bytes;
  return pages == Pages::huge ? device.huge_page_block_bytes : device.block_bytes;
}

// Both together, remembered per device number for the life of the process. Thread-safe.
[[nodiscard]] const Device& device_of(unsigned major, unsigned minor);

}  // namespace tensorferry::files
