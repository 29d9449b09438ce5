// Turns facts into findings, without an area yet. Tries nothing, so tests can feed it anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/doctor/doctor.h"
#include "bench/run/volume.h"
#include "tensorferry/error.h"

namespace tensorferry::bench {

// `release` is that of uname: "6.1.0-18-amd64".
[[nodiscard]] Finding judge_kernel(const std::string& release);

// `refusal` is the error of opening the engine, or nothing if it works.
[[nodiscard]] Finding judge_io_uring(const std::optional<Error>& refusal, const SystemTree& tree);
[[nodiscard]] Finding judge_libaio(const std::optional<Error>& refusal, Concern concern,
                                   const SystemTree& tree);

struct LockTrial {
  std::uint64_t bytes = 0;        // how much it tried to lock
  std::uint64_t limit_bytes = 0;  // RLIMIT_MEMLOCK
  std::string problem{};          // why that failed; empty if it worked
};
[[nodiscard]] Finding judge_memlock(const LockTrial& trial);

// `problem` says why a buffer got no huge pages; empty if it did.
[[nodiscard]] Finding judge_huge_pages(const std::string& problem, const SystemTree& tree);

[[nodiscard]] Finding judge_file_system(const Volume& volume);
[[nodiscard]] Finding judge_space(const Volume& volume);
[[nodiscard]] Finding judge_profile(const Device& device);

// The drives under a device ("259:0") in sysfs: their kind, schedulers, queues and the nearest
// processors.
[[nodiscard]] std::vector<Finding> judge_drives(const std::string& device_number,
                                                const SystemTree& tree);

// Counts the entries of a folder whose names are the prefix and a number: node0, node1, ...
[[nodiscard]] std::size_t count_numbered(const std::string& folder, std::string_view prefix);

struct GpuLibraries {
  bool cuda = false;    // libcuda.so.1 can be loaded
  bool cufile = false;  // libcufile.so.0 can be loaded
};
[[nodiscard]] std::vector<Finding> judge_gpu(const GpuLibraries& libraries,
                                             std::span<const Volume> volumes,
                                             const SystemTree& tree);

}  // namespace tensorferry::bench
