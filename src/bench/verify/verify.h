// Writes stamped blocks and reads them back through every pair of engines. Each generation
// overwrites the one before, which reveals lost, misplaced and undone writes.
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
  std::uint64_t bytes = 64 * MiB;             // of the file; rounded up to whole blocks
  std::chrono::duration<double> duration{};   // 0: one full pass
  EngineKind engine = EngineKind::automatic;  // automatic: every engine that works here
  std::uint64_t seed = 0;
  Leave leave = Leave::nothing;
};

// One fault. `kind` names it, or is "read error" or "write error" for an error of the system
// such as EIO.
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
  std::string kept;  // the path of the stamped file, or empty
};

// How much of `total` is done: in bytes, or in milliseconds if the user gave a duration.
struct VerifyProgress {
  std::uint64_t done = 0;
  std::uint64_t total = 0;
  std::uint64_t bytes_moved = 0;
};
using ShowVerifyProgress = std::function<void(const VerifyProgress&)>;

// Stops at the first failure. Works in its own Scratch; its memory does not grow with the file.
// Throws Error for an unusable directory, too little space and an engine that does not work here;
// throws Interrupted.
[[nodiscard]] VerifyResult verify(const VerifyOptions& options, const ShowVerifyProgress& show);

struct FileCheck {
  std::uint64_t blocks = 0;
  std::uint64_t bad_blocks = 0;
  std::uint64_t generation = 0;         // the expected one
  std::vector<VerifyFailure> failures;  // the first ones, by offset
};

// Reads a file that verify() left. Expects the generation in its name, or, if the name has none,
// the newest one in the file. Throws Error if it cannot open the file; throws Interrupted.
[[nodiscard]] FileCheck check_file(const std::string& path, const ShowVerifyProgress& show);

}  // namespace tensorferry::bench
