// Finds what works on this machine, what does not, and what to do about it. Changes nothing and
// leaves nothing behind: trials that need files make them in a Scratch.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bench/run/json.h"

namespace tensorferry::bench {

enum class FindingStatus : std::uint8_t { ok, warning, missing };

[[nodiscard]] const char* to_string(FindingStatus status) noexcept;

// Whether a finding that is not ok costs tensors their speed (or keeps them from moving at all), or
// costs nothing on this machine.
enum class Concern : std::uint8_t { speed, nothing };

struct Finding {
  std::string area{};  // "machine", a directory as the user gave it, "gpu"
  std::string name{};  // "io_uring"
  FindingStatus status = FindingStatus::ok;
  std::string found{};
  std::string advice{};  // what to do; may be empty
  Concern concern = Concern::speed;
};

// Where to look; tests use another tree.
struct SystemTree {
  std::string sys = "/sys";
  std::string proc = "/proc";
  std::string dev = "/dev";
  std::string etc = "/etc";
};

// None of these throws: a problem is a finding, also a directory that is missing or not writable.
// check_directory writes and reads a small file.
[[nodiscard]] std::vector<Finding> check_machine(const SystemTree& tree = {});
[[nodiscard]] std::vector<Finding> check_directory(const std::string& directory,
                                                   const SystemTree& tree = {});
[[nodiscard]] std::vector<Finding> check_gpu(std::span<const std::string> directories,
                                             const SystemTree& tree = {});

[[nodiscard]] bool needs_attention(const Finding& finding) noexcept;

// The verdict and all findings, as docs/doctor.md describes them.
[[nodiscard]] Json to_json(std::span<const Finding> findings);

}  // namespace tensorferry::bench
