// The file system and the drive under a directory, and the machine, from /proc and /sys.
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

// Throws Error if there is no such directory.
[[nodiscard]] Volume volume_of(const std::string& directory);

[[nodiscard]] Json to_json(const Volume& volume);
[[nodiscard]] Json machine_facts();

// The first line of a file in /proc or /sys, without blanks around it; empty if there is none.
[[nodiscard]] std::string first_line(const std::string& path);

// The number at the beginning of that line; 0 if there is none.
[[nodiscard]] std::uint64_t first_number(const std::string& path);

// The first line of a file in the device's folder in sysfs: device_fact(device, "queue/scheduler").
[[nodiscard]] std::string device_fact(const Device& device, const std::string& file);

// Bytes that the device has read since it started; nothing if it does not count them.
[[nodiscard]] std::optional<std::uint64_t> bytes_read_by(const Device& device);

}  // namespace tensorferry::bench
