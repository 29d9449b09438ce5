// How much a handle has used a device.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry::handle {

struct DeviceUse {
  std::string number;       // of the Device
  std::uint64_t bytes = 0;  // moved since the handle was opened
  // In which at least one request of the device was under way, since the handle was opened.
  double busy_seconds = 0;
};

}  // namespace tensorferry::handle
