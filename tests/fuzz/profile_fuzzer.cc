// Any file of a profile is used whole and within its limits, or reported as damaged.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

#include "files/device.h"
#include "fuzz/promise.h"
#include "support/temp_dir.h"

using namespace tensorferry;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const support::TempDir folder;
  // NOLINTNEXTLINE(concurrency-mt-unsafe): before any thread
  setenv("TENSORFERRY_PROFILES", folder.path().c_str(), 1);
  Device device;
  device.name = "vda";
  device.identity = "serial";
  const std::string path = profile_path(device);
  std::ofstream(path, std::ios::trunc | std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));

  files::take_profile(device);
  if (!device.profile) {
    fuzz::promise(device.profile_problem.empty() == (size == 0), "a problem is reported");
    return 0;
  }
  const Profile& profile = *device.profile;
  fuzz::promise(device.profile_problem.empty(), "a profile in use has no problem");
  fuzz::promise(profile.block_bytes > 0 && profile.block_bytes <= std::size_t{1} << 30,
                "block_bytes has limits");
  fuzz::promise(profile.queue_depth > 0 && profile.queue_depth <= 4096, "queue_depth has limits");
  fuzz::promise(profile.workers > 0 && profile.workers <= 256, "workers has limits");
  constexpr std::uint64_t bytes_per_second_max = 1'000'000'000'000'000;
  fuzz::promise(profile.read_bytes_per_second <= bytes_per_second_max &&
                    profile.write_bytes_per_second <= bytes_per_second_max,
                "speeds have limits");

  save_profile(device, profile);
  Device again = device;
  again.profile.reset();
  files::take_profile(again);
  fuzz::promise(again.profile && again.profile->engine == profile.engine &&
                    again.profile->block_bytes == profile.block_bytes &&
                    again.profile->queue_depth == profile.queue_depth &&
                    again.profile->workers == profile.workers &&
                    again.profile->read_bytes_per_second == profile.read_bytes_per_second &&
                    again.profile->write_bytes_per_second == profile.write_bytes_per_second,
                "a saved profile is read again");
  return 0;
}
