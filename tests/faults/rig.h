// What the fault tests share: a Handle over a faulty system and faulty engines, and the three
// engines to run everything on.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "base/alignment.h"
#include "files/open_file.h"
#include "handle/conductor.h"
#include "support/faulty_engine.h"
#include "support/faulty_system.h"
#include "support/memory.h"
#include "support/outcome.h"
#include "support/pattern.h"
#include "support/temp_dir.h"
#include "support/thrown.h"
#include "tensorferry/tensorferry.h"

namespace tensorferry::faults {

using support::GuardedMemory;
using support::hang_limit;
using support::outcome;
using support::outcome_code;
using support::pattern_fault;
using support::thrown_by;

// The long versions: `make soak`.
[[nodiscard]] inline bool soaking() {
  const char* value = std::getenv("TENSORFERRY_SOAK");
  return value != nullptr && std::string(value) == "1";
}

inline const auto all_engines =
    ::testing::Values(EngineKind::io_uring, EngineKind::libaio, EngineKind::threads);

inline const auto all_engines_and_auto = ::testing::Values(
    EngineKind::automatic, EngineKind::io_uring, EngineKind::libaio, EngineKind::threads);

[[nodiscard]] inline std::string engine_name(const ::testing::TestParamInfo<EngineKind>& tested) {
  return std::string(to_string(tested.param));
}

// A Handle whose every system call and every request a test can make fail.
class Rig {
 public:
  explicit Rig(const HandleOptions& options, std::uint64_t seed = 1)
      : system(seed), engine(seed), handle(open(options)) {}

  [[nodiscard]] File open_file(const std::string& path, Access access = Access::read_write) {
    return files::open(system, path, access);
  }

  support::FaultySystem system;
  support::EngineFaults engine;
  Handle handle;

 private:
  Handle open(const HandleOptions& options) {
    handle::Seams seams;
    seams.system = &system;
    seams.open_engine = [this](EngineKind kind, unsigned depth, os::System& os) {
      return engine.open(kind, depth, os);
    };
    return handle::make_handle(options, std::move(seams));
  }
};

// Waits for the operation. Ends the test if it failed or hangs.
#define ASSERT_ENDED_WELL(operation)                       \
  do {                                                     \
    const std::optional<Error> ended = outcome(operation); \
    ASSERT_FALSE(ended.has_value()) << ended->what();      \
  } while (false)

}  // namespace tensorferry::faults
