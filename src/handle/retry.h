// The one place that decides what a completion means: done, continue a short transfer, try again,
// or fail. Pure functions; the worker and the inline path both ask here.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "engines/engine.h"

namespace tensorferry::handle {

// A request under way, possibly over several attempts.
struct Attempt {
  engines::RequestKind kind = engines::RequestKind::read;
  std::uint32_t bytes = 0;      // of the whole request
  std::uint32_t needed = 0;     // what of it the operation cannot do without, from its start
  std::uint32_t alignment = 1;  // at which it can be resumed
  std::uint32_t done = 0;       // moved so far, a multiple of the alignment
  std::uint32_t reached = 0;    // the farthest byte ever moved; at least `done`
  unsigned fruitless = 0;       // attempts in a row that moved nothing
};

enum class Verdict : std::uint8_t {
  done,    // all that is needed has moved
  resume,  // a short transfer: continue at `done`
  retry,   // nothing moved: try again after retry_delay()
  ended,   // it looks as if the file ended before the last byte that is needed
  fail,    // with `code`
};

struct Judgement {
  Verdict verdict = Verdict::done;
  int code = 0;
};

// Bad sectors reach a direct read as ENODATA, and a drive that does not answer as ETIMEDOUT. Here
// these mean the end of the file and a deadline, so the drive's become EIO, as buffered reads have
// them.
[[nodiscard]] int without_second_meaning(int code) noexcept;

// Judges one completion (bytes moved, or -errno) and brings `attempt` up to date.
[[nodiscard]] Judgement judge(Attempt& attempt, std::int32_t result) noexcept;

// Judges an `ended` that the file's size contradicts: whatever the kernel meant, there is more to
// read. Retry, or fail with EIO.
[[nodiscard]] Judgement judge_false_end(Attempt& attempt) noexcept;

// Judges a refusal to take a request for the `times`-th time in a row: retry or fail.
[[nodiscard]] Verdict judge_refusal(int code, unsigned times) noexcept;

// How long to wait before another attempt: nothing at first, then growing up to 10 ms. All
// attempts together last about a second.
[[nodiscard]] std::chrono::nanoseconds retry_delay(unsigned fruitless) noexcept;

// What to tell the user about an errno of a transfer; may be empty.
[[nodiscard]] std::string hint_for(int code);

}  // namespace tensorferry::handle
