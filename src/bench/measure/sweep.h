// The space of a sweep, its points, and their results.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/measure/point.h"
#include "bench/run/json.h"

namespace tensorferry::bench {

// Every combination is a point.
struct SweepSpace {
  std::vector<std::uint64_t> block_bytes{128 * KiB, 256 * KiB, 512 * KiB, 1 * MiB};
  std::vector<unsigned> queue_depth{4, 16, 32, 64};
  std::vector<Overlap> overlap{Overlap::on, Overlap::off};
  std::vector<unsigned> workers{1, 2, 8};
  std::vector<Submit> submit{Submit::batch};
  std::vector<EngineKind> engines;  // empty: not in the space
};

// The space in JSON, as DeepSpeed's sweep reads it: lists named block_size, queue_depth,
// overlap_events (or sequential_requests), io_parallel, single_submit, and engine. Repeated values
// count once. A missing list has its default value (1M, 32, false, 1, false). Throws Error (EINVAL)
// for unknown keys and wrong values.
[[nodiscard]] SweepSpace parse_space(const Json& json);

[[nodiscard]] Json to_json(const SweepSpace& space);

// Without the engines, in DeepSpeed's order: the last dimension changes first.
[[nodiscard]] std::vector<Point> points_of(const SweepSpace& space);

struct SweepOptions {
  std::vector<std::string> directories;
  std::vector<EngineKind> engines{EngineKind::automatic};
  MemoryKind memory = MemoryKind::pinned;
  SweepSpace space;
  std::uint64_t io_bytes = 400 * MiB;
  unsigned loops = 1;
  std::vector<Direction> directions{Direction::read, Direction::write};
  std::string log_directory = "aio_perf_sweep";
};

// One point to measure, in one direction and directory.
struct Job {
  std::string directory;
  Direction direction = Direction::read;
  Point point;
  std::string log;  // the file with its output
};

// All jobs, phase by phase. The logs lie in <log_directory>/read and /write; several directories or
// engines get a folder each above these.
[[nodiscard]] std::vector<Job> jobs_of(const SweepOptions& options);

// The command line that measures a job on this file.
[[nodiscard]] std::vector<std::string> command_of(const Job& job, const SweepOptions& options,
                                                  const std::string& file);

// Runs the command line with this program and returns the entry of `points` in the results, also
// for a job that fails. Overwrites `seconds_file`. Throws Interrupted.
[[nodiscard]] Json run_job(const Job& job, const SweepOptions& options,
                           const std::vector<std::string>& command, const std::string& program,
                           const std::string& seconds_file);

// The results of an earlier sweep.
struct EarlierSweep {
  struct Entry {
    Json entry;             // of `points`
    std::string log;        // empty if it names none
    bool measured = false;  // it has its result
  };
  bool complete = false;
  Json settings;
  std::vector<Entry> points;
};

// Nothing if no sweep wrote this JSON. Never throws.
[[nodiscard]] std::optional<EarlierSweep> earlier_sweep(const Json& results);

// Whether an entry of `points` is about this job.
[[nodiscard]] bool describes(const Json& entry, const Job& job);

// The points as comma-separated values, with a head.
[[nodiscard]] std::string to_csv(const Json& points);

// How this process may drop the page cache.
enum class CacheDrop : std::uint8_t { as_root, by_sudo, not_allowed };
[[nodiscard]] CacheDrop find_cache_drop();

// The entry of a job that failed before it started.
[[nodiscard]] Json failed_job(const Job& job, const std::string& error);

// Writes back all dirty pages, and drops the page cache if `drop` allows it.
void settle(CacheDrop drop);

}  // namespace tensorferry::bench
