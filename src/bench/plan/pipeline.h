// A pass or a step as stages that a drive feeds: what is read, computed and written when.
//
// Pure arithmetic. It follows what optim/step.py and offload/residency.py do: the next stages are
// read while one is computed, each into a buffer, and a buffer is free when its writes are done.
#pragma once

#include <cstdint>
#include <vector>

namespace tensorferry::bench {

// What moves bytes: a drive, or copies between memory of the system and of a GPU.
struct Channel {
  double read = 0;   // bytes per second while nothing is written
  double write = 0;  // while nothing is read
  double both = 0;   // read and written together, while as much is read as written

  // Bytes per second, of which this share is read.
  [[nodiscard]] double rate(double share_read) const;
};

// Where the bytes of a stage are.
enum class Way : std::uint8_t { drive, copies, in_place };

struct Stage {
  double read_bytes = 0;
  double compute_seconds = 0;
  double write_bytes = 0;
  double held_bytes = 0;  // of the buffers, from the beginning of its read to the end of its write
  Way way = Way::drive;   // in_place: nothing moves, and it takes no buffer
};

struct Pipeline {
  std::vector<Stage> stages = {};
  unsigned loads_max = 1;    // stages in buffers before they are computed, and the one that is
  double buffer_bytes = 0;   // of all buffers
  double start_seconds = 0;  // from the beginning of a read or write to its first byte
  Channel drive = {};
  Channel copies = {};
};

// What was done when, of one stage, in seconds from the beginning.
struct Timing {
  double read_begin = 0;
  double read_end = 0;
  double compute_begin = 0;
  double compute_end = 0;
  double write_end = 0;
};

struct Course {
  double seconds = 0;         // until the last write is done
  double waited_seconds = 0;  // in which nothing was computed
  double compute_seconds = 0;
  std::vector<Timing> timings;  // of each stage
};

// Throws std::logic_error if a channel has to move bytes and has no speed.
[[nodiscard]] Course run(const Pipeline& pipeline);

}  // namespace tensorferry::bench
