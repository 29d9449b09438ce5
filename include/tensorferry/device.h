// The block device under a path: what sysfs says about it, and the settings that suit it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "tensorferry/export.h"
#include "tensorferry/options.h"

namespace tensorferry {

// Settings that `tensorferry tune` measured on a device and saved for it. A Handle uses them,
// instead of the defaults from sysfs, for each option that is left open. A SwapSpace over several
// drives gives each as much as its speed suggests, until it has measured them itself.
struct Profile {
  EngineKind engine = EngineKind::automatic;
  std::size_t block_bytes = 0;
  unsigned queue_depth = 0;  // per worker
  unsigned workers = 0;
  // What the device did with these settings; 0: unknown.
  std::uint64_t read_bytes_per_second = 0;
  std::uint64_t write_bytes_per_second = 0;
};

// All fields are hints. A field that is not known keeps its default.
struct Device {
  std::string name;    // "nvme0n1", "vda"; empty if no block device is below the path
  std::string number;  // "259:0", its folder in /sys/dev/block; for a partition, that of its disk
  // Tells this device from others, also after a reboot: a serial number or UUID if it has one, else
  // its name and size.
  std::string identity;
  std::size_t logical_block_bytes = 0;  // 0: unknown
  std::size_t request_bytes_max = 0;    // the most that one device request carries; 0: unknown

  // The request size to use: the largest power of two that one device request carries, between
  // 256 KiB and 1 MiB; 512 KiB if nothing is known.
  std::size_t block_bytes = std::size_t{512} << 10;

  // The same for memory in huge pages. A device request carries more of it: the limit on sectors
  // counts, not the number of entries for pages. At most 4 MiB.
  std::size_t huge_page_block_bytes = std::size_t{512} << 10;

  // How many physical disks it consists of, as far as sysfs shows.
  unsigned disks = 1;

  // How many requests to keep in flight: 16 MiB per disk in blocks of block_bytes, limited by the
  // length of the device's queue.
  unsigned queue_depth = 32;

  std::optional<Profile> profile;  // takes precedence over these hints
  std::string profile_problem;     // why an existing profile is not used; else empty

  // The NUMA node that its disks are attached to. -1 if it is unknown, if the disks are on several
  // nodes, and on a machine with one node.
  int numa_node = -1;
  bool polled_queues = false;  // whether Polling::completion works on it

  // Whether it handles each small page of a request by itself, as virtual disks do (virtio_blk): a
  // copy to memory in huge pages and one request from there take less time.
  bool prefers_huge_pages = false;
};

// The device that holds the files at this path (a file, a directory or a block device). The process
// remembers each device that it has looked at. Thread-safe. Throws Error if the path cannot be
// examined.
[[nodiscard]] TENSORFERRY_EXPORT Device device_of(const std::string& path);

// The path for the profile of a device: in $TENSORFERRY_PROFILES, else in tensorferry/profiles
// below $XDG_CONFIG_HOME or ~/.config. Empty if none of these is set, if the device has no name, if
// TENSORFERRY_PROFILES is empty, which switches profiles off, and in a program with privileges
// (setuid, setgid, file capabilities), which ignores its environment.
[[nodiscard]] TENSORFERRY_EXPORT std::string profile_path(const Device& device);

// Saves a profile for processes that start from now on, and returns its path. Replaces an existing
// profile as a whole and does not follow a link. Throws Error.
TENSORFERRY_EXPORT std::string save_profile(const Device& device, const Profile& profile);

}  // namespace tensorferry
