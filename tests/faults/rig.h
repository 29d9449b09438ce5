// What the fault tests share: a Handle over a faulty system and faulty engines, buffers that notice
// a write beyond their ends, and the three engines to run everything on.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/alignment.h"
#include "files/open_file.h"
#include "handle/conductor.h"
#include "support/faulty_engine.h"
#include "support/faulty_system.h"
#include "support/pattern.h"
#include "support/temp_dir.h"
#include "tensorferry/tensorferry.h"

namespace tensorferry::faults {

using support::pattern_fault;

// An operation that has not ended by then hangs. Nothing here takes more than seconds.
inline constexpr std::chrono::seconds hang_limit{60};

// The long versions: `make soak`.
[[nodiscard]] inline bool soaking() {
  const char* value = std::getenv("TENSORFERRY_SOAK");
  return value != nullptr && std::string(value) == "1";
}

inline const auto all_engines =
    ::testing::Values(EngineKind::io_uring, EngineKind::libaio, EngineKind::threads);

[[nodiscard]] inline std::string engine_name(const ::testing::TestParamInfo<EngineKind>& tested) {
  return std::string(to_string(tested.param));
}

// A Handle whose every system call and every request can be made to fail. The faults outlive it.
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

// Memory that starts `skew` bytes after a page and is framed by guard bytes.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes, std::size_t skew = 0)
      : bytes_(bytes), memory_(bytes + skew + 3 * page_bytes(), guard) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    begin_ = align_up(address, page_bytes()) - address + page_bytes() + skew;
    clear();
  }

  [[nodiscard]] std::span<std::byte> bytes() { return {memory_.data() + begin_, bytes_}; }
  void clear() {
    std::fill_n(memory_.begin() + static_cast<std::ptrdiff_t>(begin_), bytes_, blank);
  }
  void fill(std::uint64_t offset, std::uint32_t seed) {
    support::fill_pattern(bytes(), offset, seed);
  }

  // Empty if it holds the file's bytes and nothing was written outside.
  [[nodiscard]] std::string fault(std::uint64_t offset, std::uint32_t seed) {
    const std::span<const std::byte> all(memory_);
    if (!support::constant_fault(all.first(begin_), 0, guard).empty()) {
      return "bytes before the buffer were changed";
    }
    if (!support::constant_fault(all.subspan(begin_ + bytes_), 0, guard).empty()) {
      return "bytes after the buffer were changed";
    }
    return pattern_fault(bytes(), offset, seed);
  }

 private:
  static constexpr std::byte guard{0x5e};
  static constexpr std::byte blank{0x11};
  std::size_t bytes_;
  std::size_t begin_ = 0;
  std::vector<std::byte> memory_;
};

// The error of an operation that must have ended: none after success, ETIMEDOUT where it hangs.
[[nodiscard]] inline std::optional<Error> outcome(const Operation& operation,
                                                  std::chrono::seconds limit = hang_limit) {
  bool ended = false;
  try {
    ended = operation.wait_for(limit);
  } catch (const Error& error) {
    return error;
  }
  if (ended) return operation.error();
  return Error({.operation = "wait", .code = ETIMEDOUT, .hint = "the operation did not end"});
}

[[nodiscard]] inline int outcome_code(const Operation& operation) {
  const std::optional<Error> error = outcome(operation);
  return error ? error->code() : 0;
}

// What a call throws, or nothing.
template <class Call>
[[nodiscard]] std::optional<Error> thrown_by(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// Keeps the memory of an operation that hangs from going away under the kernel.
#define ASSERT_ENDED_WELL(operation)                       \
  do {                                                     \
    const std::optional<Error> ended = outcome(operation); \
    ASSERT_FALSE(ended.has_value()) << ended->what();      \
  } while (false)

}  // namespace tensorferry::faults
