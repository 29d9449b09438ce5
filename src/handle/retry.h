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
  std::uint32_t needed = 0;     // bytes from the start that the operation needs
  std::uint32_t alignment = 1;  // it can resume at multiples of this
  std::uint32_t done = 0;       // moved so far, a multiple of the alignment
  std::uint32_t reached = 0;    // the farthest byte ever moved; at least `done`
  unsigned fruitless = 0;       // attempts in a row that moved nothing
};

enum class Verdict : std::uint8_t {
  done,    // all that is needed has moved
  resume,  // a short transfer: continue at `done`
  retry,   // no progress: try again after retry_delay()
  ended,   // the file seems to end before the last byte that is needed
  fail,    // with `code`
};

struct Judgement {
  Verdict verdict = Verdict::done;
  int code = 0;
};

// The kernel reports a bad sector as ENODATA and a silent drive as ETIMEDOUT. In this library these
// mean the end of the file and a deadline, so both become EIO, as in buffered reads.
[[nodiscard]] int without_second_meaning(int code) noexcept;

// Judges one completion (bytes moved, or -errno) and updates `attempt`.
[[nodiscard]] Judgement judge(Attempt& attempt, std::int32_t result) noexcept;

// Judges an `ended` that the file's size contradicts: retry, or fail with EIO.
[[nodiscard]] Judgement judge_false_end(Attempt& attempt) noexcept;

// Judges the `times`-th refusal of a request in a row: retry or fail.
[[nodiscard]] Verdict judge_refusal(int code, unsigned times) noexcept;

// How long to wait before another attempt: not at all at first, then longer, up to 10 ms. All
// attempts together last about a second.
[[nodiscard]] std::chrono::nanoseconds retry_delay(unsigned fruitless) noexcept;

// What an errno of a transfer means to the user, and what to do; may be empty.
[[nodiscard]] std::string hint_for(int code);

}  // namespace tensorferry::handle
