// Where bytes go: the machine, the file system and the drive, as /proc and /sys tell.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "bench/run/json.h"
#include "tensorferry/device.h"

namespace tensorferry::bench {

struct Volume {
  std::string directory;  // absolute, without links
  std::string mount_point;
  std::string file_system;  // "ext4"
  std::string mount_options;
  std::uint64_t bytes = 0;
  std::uint64_t free_bytes = 0;
  Device device;
};

// Throws Error where there is no such directory.
[[nodiscard]] Volume volume_of(const std::string& directory);

[[nodiscard]] Json to_json(const Volume& volume);
[[nodiscard]] Json machine_facts();

// The first line of a small file of the system, without blanks around it; empty where there is
// none.
[[nodiscard]] std::string first_line(const std::string& path);

// A file of the device's folder in sysfs: device_fact(device, "queue/scheduler").
[[nodiscard]] std::string device_fact(const Device& device, const std::string& file);

// How many bytes the device has read since it started; nothing where that is not counted.
[[nodiscard]] std::optional<std::uint64_t> bytes_read_by(const Device& device);

}  // namespace tensorferry::bench
