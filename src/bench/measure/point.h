// One point of a sweep or of the tuner: settings, and how to measure them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/run/json.h"
#include "bench/run/sizes.h"
#include "bench/run/workload.h"

namespace tensorferry::bench {

struct Point {
  std::uint64_t block_bytes = 1 * MiB;
  unsigned queue_depth = 32;  // per worker
  Overlap overlap = Overlap::on;
  unsigned workers = 1;
  Submit submit = Submit::batch;
  EngineKind engine = EngineKind::automatic;
  MemoryKind memory = MemoryKind::pinned;
  Polling polling = Polling::off;
};

[[nodiscard]] HandleOptions to_options(const Point& point);

// block_bytes, queue_depth, overlap, workers, submit.
[[nodiscard]] Json to_json(const Point& point);

// "read_block_overlap_t1_p2_d16_bs256K.txt", as DeepSpeed's sweep names its logs.
[[nodiscard]] std::string log_name(Direction direction, const Point& point);

// The measurements of one run of a point.
struct PointResult {
  std::vector<double> transfer_seconds;  // of the transfer, per loop
  std::vector<double> seconds;           // also opening and closing the file
  std::string engine;
  std::string engine_reason;
  bool direct = false;
};

// Moves `bytes` between memory of the point's kind and the file, `loops` times. Extends a file to
// write first; a file to read must be long enough. Opens the rings and registers the memory before
// the clock starts. Throws Error and Interrupted.
[[nodiscard]] PointResult run_point(const Point& point, Direction direction,
                                    const std::string& path, std::uint64_t bytes, unsigned loops);

}  // namespace tensorferry::bench
