// What the doctor makes of what it was told or has read: no trying, so tests can tell it anything.
// The findings have no area yet.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bench/doctor/doctor.h"
#include "bench/run/volume.h"
#include "tensorferry/error.h"

namespace tensorferry::bench {

// Of the release as uname gives it: "6.1.0-18-amd64".
[[nodiscard]] Finding judge_kernel(const std::string& release);

// Of what trying the engine gave: an error, or none where it works.
[[nodiscard]] Finding judge_io_uring(const std::optional<Error>& refusal, const SystemTree& tree);
[[nodiscard]] Finding judge_libaio(const std::optional<Error>& refusal, Concern concern,
                                   const SystemTree& tree);

struct LockTrial {
  std::uint64_t bytes = 0;        // how much was to be locked
  std::uint64_t limit_bytes = 0;  // RLIMIT_MEMLOCK
  std::string problem{};          // why it was not; empty where it was
};
[[nodiscard]] Finding judge_memlock(const LockTrial& trial);

// `problem` is why a buffer did not get huge pages, or empty.
[[nodiscard]] Finding judge_huge_pages(const std::string& problem, const SystemTree& tree);

[[nodiscard]] Finding judge_file_system(const Volume& volume);
[[nodiscard]] Finding judge_space(const Volume& volume);
[[nodiscard]] Finding judge_profile(const Device& device);

// The drives under a device ("259:0"), as sysfs tells: what they are, their schedulers, their
// queues and the processors they are near to.
[[nodiscard]] std::vector<Finding> judge_drives(const std::string& device_number,
                                                const SystemTree& tree);

struct GpuLibraries {
  bool cuda = false;    // libcuda.so.1 can be loaded
  bool cufile = false;  // libcufile.so.0 can be loaded
};
[[nodiscard]] std::vector<Finding> judge_gpu(const GpuLibraries& libraries,
                                             std::span<const Volume> volumes,
                                             const SystemTree& tree);

}  // namespace tensorferry::bench
