// What a job of ferry_job measured, and the line of JSON that says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tensorferry/tensorferry.h"

struct Result {
  std::vector<double> seconds;           // per repetition
  std::vector<double> cpu_seconds;       // the same
  std::vector<double> context_switches;  // the same, of all threads
  std::size_t bytes_per_repetition = 0;
  std::size_t operations_per_repetition = 1;
  std::vector<double> call_seconds;  // sync, path, queue with one in flight: every call
  double open_close_seconds = 0;     // path: open(O_DIRECT) and close, the median
  std::vector<double> resident_kib;  // queue: after each repetition
  std::vector<double> descriptors;   // the same
  std::int64_t end_ns = 0;           // of the monotonic clock
  std::string engine, engine_reason, direct_reason;
  bool direct = false;
  std::uint64_t request_bytes = 0;  // the mean
  unsigned queue_depth = 0;         // of all workers together
  tensorferry::Stats stats;
};

// Prints one line of JSON. Sorts the calls.
void print(Result& result);
