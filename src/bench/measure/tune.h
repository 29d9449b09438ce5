// The tuner: the best settings for a drive in half a minute, by successive halving.
//
// It measures all candidates in passes, each in a new random order. A score is relative to the
// median of its pass, so that a drive whose speed varies does not favour candidates that had a good
// moment. Each round keeps at most half, and none whose interval lies below that of the best; the
// next round measures those longer.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/measure/point.h"
#include "bench/run/json.h"
#include "bench/run/volume.h"
#include "tensorferry/device.h"

namespace tensorferry::bench {

enum class Objective : std::uint8_t { read, write, balanced, latency };
[[nodiscard]] std::string_view to_string(Objective objective) noexcept;

struct Candidate {
  Point point;
  std::vector<double> scores;   // one per pass; 1 is the median of the pass, more is better
  std::vector<double> figures;  // the same as bytes per second, or seconds for `latency`
  // Bytes per second in each direction that the objective needs, one per pass.
  std::vector<double> read_speeds;
  std::vector<double> write_speeds;
  bool kept = true;

  [[nodiscard]] double score() const;   // the mean
  [[nodiscard]] double margin() const;  // half its 95 % interval
  [[nodiscard]] double figure() const;  // the median
};

struct Round {
  std::uint64_t transfer_bytes = 0;
  double seconds = 0;
  std::vector<Candidate> candidates;  // best first
  std::size_t left_out = 0;           // candidates that there was no time to measure
};

// What polling would bring to the best settings. A Handle polls only if its options say so: a
// profile does not have it.
struct PollingTrial {
  Polling polling = Polling::off;
  double gain = 0;      // its score against that of the same settings without polling
  std::string problem;  // why it was not measured; else empty
};

struct Tuned {
  std::vector<Round> rounds;
  Candidate best;
  Candidate usual;  // the defaults from sysfs, as measured in the last round
  std::vector<PollingTrial> polling;
  double seconds = 0;
};

// The settings to try: all combinations of engines, block sizes, depths and workers.
[[nodiscard]] std::vector<Point> candidates_for(const Volume& volume,
                                                const std::vector<EngineKind>& engines);

// The engines that work here.
[[nodiscard]] std::vector<EngineKind> working_engines();

// The settings of a Handle on this drive without a profile.
[[nodiscard]] Point usual_point(const Volume& volume);

// The points for the next round: the best half at most, and none whose interval lies below that of
// the best. Marks the others as not kept.
[[nodiscard]] std::vector<Point> keep(Round& round);

// Of the candidates within 1 % of the best: the usual one, else the cheapest.
[[nodiscard]] const Candidate& choose(const Round& round, const Point& usual);

struct TuneOptions {
  Objective objective = Objective::balanced;
  double seconds_max = 25;
  // Besides `completion`, which tune() tries where the drive has polled queues.
  std::vector<Polling> polling = {};
};

// The polling to try on this drive.
[[nodiscard]] std::vector<Polling> polling_for(const Volume& volume, const TuneOptions& options);

// Progress.
struct TuneStep {
  std::size_t round = 0;
  std::size_t candidates = 0;
  double share = 0;  // of the time
};

// Makes the file, of up to tune_bytes. Throws Error and Interrupted.
inline constexpr std::uint64_t tune_bytes = 256 * MiB;
[[nodiscard]] Tuned tune(const TuneOptions& options, const Volume& volume,
                         const std::vector<Point>& candidates, const std::string& file,
                         const std::function<void(const TuneStep&)>& watch,
                         const std::function<void(const Round&)>& round_done);

[[nodiscard]] Json to_json(const Round& round, Objective objective);
[[nodiscard]] Json to_json(const Candidate& candidate, Objective objective);
[[nodiscard]] Json to_json(const PollingTrial& trial);

// The settings as DeepSpeed reads them in its configuration: {"block_size": ...}.
[[nodiscard]] Json aio_block(const Point& point);

// The settings and the speeds of a candidate as a device keeps them.
[[nodiscard]] Profile profile_of(const Candidate& candidate);

// Throws Error if write_config would.
void check_config(const std::string& path);

// Sets the keys of aio_block() in `aio` of a DeepSpeed configuration and keeps everything else.
// Makes the file if it is missing. Throws Error.
void write_config(const std::string& path, const Point& point);

}  // namespace tensorferry::bench
