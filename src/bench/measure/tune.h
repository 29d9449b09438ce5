// The tuner: the best settings for a drive in half a minute, by successive halving.
//
// All candidates are measured in passes, in a new random order each time. A score is relative to
// the median of its pass, so that a drive that is now fast and now slow does not favour those that
// were measured at a good moment. After each round at most half are kept, and none whose interval
// lies below the best one's; the rest is measured longer.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/measure/point.h"
#include "bench/run/json.h"
#include "bench/run/volume.h"

namespace tensorferry::bench {

enum class Objective : std::uint8_t { read, write, balanced, latency };
[[nodiscard]] std::string_view to_string(Objective objective) noexcept;

struct Candidate {
  Point point;
  std::vector<double> scores;   // one per pass; 1 is the median of the pass, more is better
  std::vector<double> figures;  // the same as bytes per second, or seconds for `latency`
  bool kept = true;

  [[nodiscard]] double score() const;   // the mean
  [[nodiscard]] double margin() const;  // half its 95 % interval
  [[nodiscard]] double figure() const;  // the median
};

struct Round {
  std::uint64_t transfer_bytes = 0;
  double seconds = 0;
  std::vector<Candidate> candidates;  // best first
};

struct Tuned {
  std::vector<Round> rounds;
  Candidate best;
  Candidate usual;  // what sysfs alone would have given, as the last round measured it
  double seconds = 0;
};

// Which settings are tried: engines that work here, block sizes, depths, workers.
[[nodiscard]] std::vector<Point> candidates_for(const Volume& volume,
                                                const std::vector<EngineKind>& engines);

// The engines that can be had here.
[[nodiscard]] std::vector<EngineKind> working_engines();

// What a Handle takes for this drive when it has no profile.
[[nodiscard]] Point usual_point(const Volume& volume);

// Those to measure on: at most half, the best ones, and none whose interval lies below the best
// one's. Marks the others.
[[nodiscard]] std::vector<Point> keep(Round& round);

// Of those that are as good as the best within 1 %, the one that is usual, else the cheapest.
[[nodiscard]] const Candidate& choose(const Round& round, const Point& usual);

struct TuneOptions {
  Objective objective = Objective::balanced;
  double seconds_max = 25;
};

// What is going on, for those who watch.
struct TuneStep {
  std::size_t round = 0;
  std::size_t candidates = 0;
  double share = 0;  // of all the time there is
};

// Needs tune_bytes in the file, which it makes. Throws Error and Interrupted.
inline constexpr std::uint64_t tune_bytes = 256 * MiB;
[[nodiscard]] Tuned tune(const TuneOptions& options, const Volume& volume,
                         const std::vector<Point>& candidates, const std::string& file,
                         const std::function<void(const TuneStep&)>& watch,
                         const std::function<void(const Round&)>& round_done);

[[nodiscard]] Json to_json(const Round& round, Objective objective);
[[nodiscard]] Json to_json(const Candidate& candidate, Objective objective);

// The settings as DeepSpeed reads them in its configuration: {"block_size": ...}.
[[nodiscard]] Json aio_block(const Point& point);

// Throws Error where write_config would, because of what the file holds.
void check_config(const std::string& path);

// Puts the settings into the `aio` part of a DeepSpeed configuration and keeps all the rest, also
// of that part. A file that is not there is made. Throws Error.
void write_config(const std::string& path, const Point& point);

}  // namespace tensorferry::bench
