// What a program with privileges does with the variables of whoever started it: moves a few bytes
// (which a trace would show) and says where it would keep the profile of a drive.
//
//   privilege_job PATH
#include <unistd.h>

#include <array>
#include <cstdio>
#include <exception>

#include "tensorferry/tensorferry.h"

int main(int count, char** values) try {
  if (count != 2) return 2;
  std::array<std::byte, 100> memory{};
  tensorferry::Handle handle;
  handle.write_now(memory, values[1]);
  handle.read(memory, values[1]).wait();
  tensorferry::Device device;
  device.name = "nvme9n9";
  device.identity = "serial";
  std::printf("user %u as %u, traced %d, profile %s\n", getuid(), geteuid(),
              tensorferry::tracing() ? 1 : 0, tensorferry::profile_path(device).c_str());
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
