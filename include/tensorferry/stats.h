// Counts of what a Handle has done so far.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tensorferry {

// A snapshot. Every fallback, retry and short transfer is counted: nothing is silent. New fields
// come last; a new counter goes into stats_counters too.
struct Stats {
  std::uint64_t operations = 0;  // ended: done, failed or cancelled
  std::uint64_t failed_operations = 0;
  std::uint64_t cancelled_operations = 0;
  std::uint64_t inline_operations = 0;  // made by the caller's thread alone
  std::uint64_t requests = 0;           // completions judged
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t bounced_bytes = 0;   // copied through a slot
  std::uint64_t fixed_requests = 0;  // on memory registered with the ring
  std::uint64_t retries = 0;
  std::uint64_t short_transfers = 0;
  std::uint64_t refused_submissions = 0;
  std::uint64_t fallbacks = 0;                // all occurrences of fallback_reasons
  std::vector<std::string> fallback_reasons;  // distinct, oldest first, at most 32

  // Latency of operations, from the call to the end: upper bounds, at most 3 % too high.
  std::uint64_t latency_ns_p50 = 0;
  std::uint64_t latency_ns_p90 = 0;
  std::uint64_t latency_ns_p99 = 0;
  std::uint64_t latency_ns_max = 0;

  double cpu_seconds = 0;  // of the handle's own threads

  std::uint64_t lane_operations = 0;  // small ones, moved by the thread that waits
};

// The counters of Stats by name, in the order above, for programs that print or add up all of them.
struct StatsCounter {
  const char* name;
  std::uint64_t Stats::* value;
};
inline constexpr StatsCounter stats_counters[] = {
    {"operations", &Stats::operations},
    {"failed_operations", &Stats::failed_operations},
    {"cancelled_operations", &Stats::cancelled_operations},
    {"inline_operations", &Stats::inline_operations},
    {"requests", &Stats::requests},
    {"read_bytes", &Stats::read_bytes},
    {"written_bytes", &Stats::written_bytes},
    {"bounced_bytes", &Stats::bounced_bytes},
    {"fixed_requests", &Stats::fixed_requests},
    {"retries", &Stats::retries},
    {"short_transfers", &Stats::short_transfers},
    {"refused_submissions", &Stats::refused_submissions},
    {"fallbacks", &Stats::fallbacks},
    {"lane_operations", &Stats::lane_operations},
};

}  // namespace tensorferry
