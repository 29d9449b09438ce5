#include "swap/speeds.h"

#include <algorithm>
#include <cmath>

#include "base/alignment.h"

namespace tensorferry::swap {

namespace {

// When to measure: the start and the end of transfers count little then.
constexpr std::uint64_t period_bytes = 64 * MiB;
constexpr double period_seconds = 1;

// What a device must have done until then.
constexpr std::uint64_t measured_bytes_min = 8 * MiB;
constexpr double measured_seconds_min = 0.1;

// The speed is the mean of the first measurements, and later follows each by one part of this.
constexpr unsigned measurements_recent = 8;

// A drive that waits for slower ones moves its few bytes in bursts, which a cache or a limit lets
// pass faster than it could go on. So such a measurement counts less, but it counts.
constexpr double trust_min = 0.25;

// For as many reads as writes; 0 if neither is known.
double speed_in(const Device& device) {
  if (!device.profile) return 0;
  const auto read = static_cast<double>(device.profile->read_bytes_per_second);
  const auto write = static_cast<double>(device.profile->write_bytes_per_second);
  if (read == 0 || write == 0) return read + write;
  return 2 / (1 / read + 1 / write);
}

}  // namespace

double Speeds::Measured::bytes_per_second() const {
  return measurements > 0 ? std::exp(log_speed) : profile;
}

// The mean is that of logarithms: a drive that hung and one that recovers are noticed alike soon.
void Speeds::Measured::measure(double busiest_seconds) {
  if (bytes() < measured_bytes_min && seconds() < measured_seconds_min) return;
  if (bytes() == 0 || seconds() <= 0) return;
  measurements = std::min(measurements + 1, measurements_recent);
  const double trust = std::max(seconds() / busiest_seconds, trust_min);
  const double weight = measurements == 1 ? 1 : trust / measurements;
  log_speed += weight * (std::log(static_cast<double>(bytes()) / seconds()) - log_speed);
  begin = now;
}

void Speeds::add(const Device& device) {
  auto found = std::ranges::find(devices_, device.number, &Measured::number);
  if (found == devices_.end() || device.number.empty()) {
    Measured added;
    added.number = device.number;
    added.profile = speed_in(device);
    found = devices_.insert(devices_.end(), added);
  }
  ++found->drives;
  device_of_.push_back(static_cast<std::size_t>(found - devices_.begin()));
}

void Speeds::learn(std::span<const handle::DeviceUse> use) {
  for (const handle::DeviceUse& one : use) {
    const auto device = std::ranges::find(devices_, one.number, &Measured::number);
    if (device == devices_.end() || one.number.empty()) continue;
    if (one.bytes < device->now.bytes || one.busy_seconds < device->now.busy_seconds) return;
    device->now = one;
  }
  if (!due()) return;
  double busiest_seconds = 0;
  for (const Measured& device : devices_) {
    busiest_seconds = std::max(busiest_seconds, device.seconds());
  }
  for (Measured& device : devices_) device.measure(busiest_seconds);
}

bool Speeds::due() const {
  bool all_moved = true;
  for (const Measured& device : devices_) {
    if (device.number.empty()) continue;
    if (device.seconds() >= period_seconds) return true;
    if (device.bytes() < period_bytes) all_moved = false;
  }
  return all_moved;
}

std::vector<double> Speeds::known() const {
  std::vector<double> speeds;
  for (const std::size_t index : device_of_) {
    const Measured& device = devices_[index];
    speeds.push_back(device.bytes_per_second() / static_cast<double>(device.drives));
  }
  return speeds;
}

std::vector<double> Speeds::assumed() const {
  double sum = 0;
  std::size_t count = 0;
  for (const Measured& device : devices_) {
    const double speed = device.bytes_per_second();
    if (speed == 0) continue;
    sum += speed;
    ++count;
  }
  const double mean = count > 0 ? sum / static_cast<double>(count) : 1;
  std::vector<double> speeds;
  for (const std::size_t index : device_of_) {
    const Measured& device = devices_[index];
    const double speed = device.bytes_per_second();
    speeds.push_back((speed > 0 ? speed : mean) / static_cast<double>(device.drives));
  }
  return speeds;
}

}  // namespace tensorferry::swap
