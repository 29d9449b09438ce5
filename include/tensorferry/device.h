// The block device under a path: what sysfs tells of it, and the settings that suit it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "tensorferry/export.h"
#include "tensorferry/options.h"

namespace tensorferry {

// Settings that were measured on a device (by `tensorferry tune`) and are kept for it. A Handle
// takes them, instead of the defaults from sysfs, wherever its options leave the choice.
struct Profile {
  EngineKind engine = EngineKind::automatic;
  std::size_t block_bytes = 0;
  unsigned queue_depth = 0;  // per worker
  unsigned workers = 0;
};

// Everything here is a hint; what is not known keeps its default.
struct Device {
  std::string name;    // "nvme0n1", "vda"; empty where there is no block device
  std::string number;  // "259:0", its folder in /sys/dev/block; of the disk, for a partition
  // What tells it from others, also after a restart: the serial number or its like, where there is
  // one.
  std::string identity;
  std::size_t logical_block_bytes = 0;  // 0: unknown
  std::size_t request_bytes_max = 0;    // what one device request carries at most; 0: unknown

  // The request size to use: the largest power of two that one device request carries, between
  // 256 KiB and 1 MiB; 512 KiB where nothing is known.
  std::size_t block_bytes = std::size_t{512} << 10;

  // The same for memory of huge pages, of which a device request carries more: as many bytes as its
  // sectors allow, not as many as it has entries for pages of the usual size. At most 2 MiB.
  std::size_t huge_page_block_bytes = std::size_t{512} << 10;

  // How many physical disks it is made of, as far as can be seen.
  unsigned disks = 1;

  // How many requests to keep in flight: 16 MiB per disk in blocks of block_bytes, but no more than
  // the queue holds.
  unsigned queue_depth = 32;

  std::optional<Profile> profile;  // its word comes before these hints
  std::string profile_problem;     // why a profile that is there is not used
};

// The device that holds the files of this path (a file, a directory or a block device). What was
// found is remembered for the life of the process. Throws Error where the path cannot be looked at.
[[nodiscard]] TENSORFERRY_EXPORT Device device_of(const std::string& path);

// Where the profile of a device is or would be kept: in $TENSORFERRY_PROFILES, else in
// tensorferry/profiles below $XDG_CONFIG_HOME or ~/.config. Empty where there is no such place, no
// device, or TENSORFERRY_PROFILES is set to nothing, which switches profiles off; and in a program
// with privileges (setuid, setgid, file capabilities), which takes nothing from its environment.
[[nodiscard]] TENSORFERRY_EXPORT std::string profile_path(const Device& device);

// Keeps a profile, for processes that start from now on, and returns where. What is there is
// replaced as a whole; a link is not followed. Throws Error.
TENSORFERRY_EXPORT std::string save_profile(const Device& device, const Profile& profile);

}  // namespace tensorferry
