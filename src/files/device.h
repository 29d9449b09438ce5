// What the block device under a file likes: request sizes and queue, from sysfs, also behind
// partitions, md, dm, loop, btrfs and overlay. Everything here is a hint; where /sys or /proc are
// missing the defaults hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tensorferry::files {

struct Device {
  std::string name;                     // "nvme0n1", "vda"; empty where there is no block device
  std::size_t logical_block_bytes = 0;  // 0: unknown
  std::size_t request_bytes_max = 0;    // what one device request carries at most; 0: unknown

  // The request size to use: the largest power of two that one device request carries, between
  // 256 KiB and 1 MiB; 512 KiB where nothing is known.
  std::size_t block_bytes = std::size_t{512} << 10;

  // How many physical disks it is made of, as far as can be seen.
  unsigned disks = 1;

  // How many requests to keep in flight: 16 MiB per disk, but no more than the queue holds.
  unsigned queue_depth = 32;
};

// Where to look; tests give another tree.
struct SystemTree {
  std::string sys = "/sys";
  std::string mountinfo = "/proc/self/mountinfo";
};

// The device that holds the files of device number major:minor (st_dev of a regular file, st_rdev
// of a block device). Never fails: what is not known keeps its default. Reads several small files;
// callers cache (see device_of).
[[nodiscard]] Device inspect_device(unsigned major, unsigned minor, const SystemTree& tree = {});

// The same, remembered per device number for the life of the process. Thread-safe.
[[nodiscard]] const Device& device_of(unsigned major, unsigned minor);

}  // namespace tensorferry::files
