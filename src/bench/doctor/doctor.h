// What works on this machine and what does not, and what to do about it. Nothing is changed, and
// nothing is left behind: where only trying tells, it is tried in a Scratch of our own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bench/run/json.h"

namespace tensorferry::bench {

enum class Status : std::uint8_t { ok, warning, missing };

[[nodiscard]] const char* to_string(Status status) noexcept;

// What a finding that is not ok keeps tensors from: their full speed (or moving at all), or nothing
// on this machine.
enum class Concern : std::uint8_t { speed, nothing };

struct Finding {
  std::string area{};  // "machine", a directory as it was given, "gpu"
  std::string name{};  // "io_uring"
  Status status = Status::ok;
  std::string found{};
  std::string advice{};  // what to do; empty where there is nothing to do
  Concern concern = Concern::speed;
};

// Where to look; tests give another tree.
struct SystemTree {
  std::string sys = "/sys";
  std::string proc = "/proc";
  std::string dev = "/dev";
  std::string etc = "/etc";
};

// None of these throws for what it finds: that is a finding. check_directory writes and reads a
// small file; a directory that is missing or cannot be written is a finding, too.
[[nodiscard]] std::vector<Finding> check_machine(const SystemTree& tree = {});
[[nodiscard]] std::vector<Finding> check_directory(const std::string& directory,
                                                   const SystemTree& tree = {});
[[nodiscard]] std::vector<Finding> check_gpu(std::span<const std::string> directories,
                                             const SystemTree& tree = {});

[[nodiscard]] bool needs_attention(const Finding& finding) noexcept;

// An object with the verdict and all findings; docs/doctor.md describes it.
[[nodiscard]] Json to_json(std::span<const Finding> findings);

}  // namespace tensorferry::bench
