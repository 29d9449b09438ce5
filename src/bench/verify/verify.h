// Stamped blocks written and read back through every pair of engines. Each generation overwrites
// the one before, so that a write that was lost, misplaced or undone shows.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/verify/stamp.h"
#include "tensorferry/options.h"

namespace tensorferry::bench {

enum class Leave : std::uint8_t { nothing, file };

struct VerifyOptions {
  std::string directory;
  std::uint64_t bytes = 64 * MiB;             // of the file; taken up to whole blocks
  std::chrono::duration<double> duration{};   // 0: one full pass
  EngineKind engine = EngineKind::automatic;  // automatic: every engine that works here
  std::uint64_t seed = 0;
  Leave leave = Leave::nothing;
};

// What was found wrong. For an error of the system, such as EIO, `kind` is "read error" or "write
// error".
struct VerifyFailure {
  std::string kind;
  std::string path;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::string explanation;
  std::uint64_t generation = 0;
};

struct EnginePair {
  EngineKind writer = EngineKind::automatic;
  EngineKind reader = EngineKind::automatic;
  std::uint64_t generations = 0;  // written and read back without a fault
  std::optional<VerifyFailure> failure{};
};

struct SkippedEngine {
  EngineKind engine = EngineKind::automatic;
  std::string reason;
};

struct VerifyResult {
  std::vector<EnginePair> pairs;
  std::vector<SkippedEngine> skipped;
  std::uint64_t file_bytes = 0;
  std::uint64_t generations = 0;
  std::uint64_t bytes_moved = 0;
  std::string kept;  // the stamped file that was left, or empty
};

// Told now and then: how far it is, of `total` (bytes, or milliseconds where a duration is given).
struct VerifyProgress {
  std::uint64_t done = 0;
  std::uint64_t total = 0;
  std::uint64_t bytes_moved = 0;
};
using ShowVerifyProgress = std::function<void(const VerifyProgress&)>;

// Stops at the first failure. Uses a Scratch of its own and memory that does not grow with the
// file. Throws Error for a directory that will not do, too little space and an engine that cannot
// be had; throws Interrupted.
[[nodiscard]] VerifyResult verify(const VerifyOptions& options, const ShowVerifyProgress& show);

struct FileCheck {
  std::uint64_t blocks = 0;
  std::uint64_t bad_blocks = 0;
  std::uint64_t generation = 0;         // the one that should be there
  std::vector<VerifyFailure> failures;  // the first of them, in the order of offsets
};

// Reads a file that verify() left. Which generation it holds is in its name; in a file that has
// another name, the newest that is found counts. Throws Error where it cannot be opened; throws
// Interrupted.
[[nodiscard]] FileCheck check_file(const std::string& path, const ShowVerifyProgress& show);

}  // namespace tensorferry::bench
