// How fast the drives of a swap space are: as their profiles say, and then as measured. No I/O, no
// locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "handle/device_use.h"
#include "tensorferry/device.h"

namespace tensorferry::swap {

// Drives of one device share its speed evenly. A device is busy while one of its requests is under
// way, so what it did in its busy time is its own speed, whatever share of the bytes it had. So the
// first measurement is nearly right. Later ones change it in small steps, so that shares do not go
// up and down with them.
class Speeds {
 public:
  // Adds a drive on this device.
  void add(const Device& device);

  // Takes what the devices have done so far. Measures them when each has moved 64 MiB, or one was
  // busy for a second: all at the same time, so that reads and writes are mixed alike. A device
  // that has done too little by then waits for a later time. Ignores a report that is older than
  // the last one, and devices of no drive.
  void learn(std::span<const handle::DeviceUse> use);

  // Bytes per second of each drive; 0: unknown.
  [[nodiscard]] std::vector<double> known() const;
  // The same, with the mean of the known devices for those that are unknown.
  [[nodiscard]] std::vector<double> assumed() const;

 private:
  struct Measured {
    std::string number;
    double profile = 0;  // bytes per second; 0: unknown
    std::size_t drives = 0;
    handle::DeviceUse now;
    handle::DeviceUse begin;  // at the end of the last measurement
    unsigned measurements = 0;
    double log_speed = 0;  // of bytes per second, over the recent measurements

    [[nodiscard]] double bytes_per_second() const;
    [[nodiscard]] std::uint64_t bytes() const { return now.bytes - begin.bytes; }
    [[nodiscard]] double seconds() const { return now.busy_seconds - begin.busy_seconds; }
    // `busiest_seconds` are those of the device that had the most to do.
    void measure(double busiest_seconds);
  };

  [[nodiscard]] bool due() const;

  // One entry per device; each drive without a device has its own.
  std::vector<Measured> devices_;
  std::vector<std::size_t> device_of_;  // of each drive
};

}  // namespace tensorferry::swap
