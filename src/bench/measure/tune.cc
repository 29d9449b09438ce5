#include "bench/measure/tune.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <tuple>

#include "bench/measure/statistics.h"
#include "bench/run/interrupt.h"
#include "bench/run/results.h"
#include "bench/run/sizes.h"
#include "tensorferry/error.h"

namespace tensorferry::bench {

namespace {

constexpr std::uint64_t transfer_bytes_min = 16 * MiB;  // fewer would not fill a queue
constexpr std::uint64_t warm_up_bytes = 4 * MiB;
constexpr std::uint64_t latency_bytes = 1 * MiB;
constexpr std::uint64_t in_flight_bytes_max = 256 * MiB;
constexpr std::size_t finalists_max = 6;
constexpr std::size_t passes_wanted = 2;
constexpr double first_pass_shares = 2;
constexpr std::size_t closing_max = 16;
constexpr unsigned threads_max = 64;
constexpr std::size_t passes_max = 60;
constexpr double polling_share = 0.1;  // of the time, for each kind of polling
constexpr double even = 0.99;          // of the best score counts as equal

bool same(const Point& one, const Point& other) {
  const auto key = [](const Point& point) {
    return std::tuple(point.engine, point.block_bytes, point.queue_depth, point.workers);
  };
  return key(one) == key(other);
}

// The time that is left.
class Budget {
 public:
  explicit Budget(double seconds) : seconds_(seconds) {}
  [[nodiscard]] double spent() const { return seconds_between(begin_, Clock::now()); }
  [[nodiscard]] double left() const { return seconds_ - spent(); }
  [[nodiscard]] double share() const { return std::clamp(spent() / seconds_, 0.0, 1.0); }

 private:
  const Clock::time_point begin_ = Clock::now();
  const double seconds_;
};

// One measurement of a point. What it did not measure is 0.
struct Figures {
  double figure = 0;  // bytes per second, or seconds for `latency`
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
};

// Measures one point once. Knows nothing of rounds.
class Probe {
 public:
  Probe(Objective objective, const std::string& path, std::uint64_t file_bytes)
      : objective_(objective),
        file_(File::open(path, Access::read_write)),
        file_bytes_(file_bytes) {}

  // Allocates memory for measurements of up to `bytes`.
  void prepare(std::uint64_t bytes) {
    memory_ = std::make_unique<FilledMemory>(MemoryKind::pinned, bytes, data_seed);
  }

  [[nodiscard]] Figures measure(const Point& point, std::uint64_t bytes) {
    Handle handle(to_options(point));
    const Figures figures = objective_ == Objective::latency
                                ? Figures{.figure = latency(handle, bytes)}
                                : speed(handle, bytes);
    // libaio sleeps for tens of milliseconds when it closes; many can do so at the same time.
    if (closing_.size() >= closing_max) closing_.clear();
    closing_.emplace_back([closed = std::move(handle)] {});
    return figures;
  }

 private:
  [[nodiscard]] Figures speed(Handle& handle, std::uint64_t bytes) {
    Figures figures;
    double seconds = 0;
    double moved = 0;
    for (const Direction direction : {Direction::read, Direction::write}) {
      if (objective_ == Objective::read && direction == Direction::write) continue;
      if (objective_ == Objective::write && direction == Direction::read) continue;
      timed(handle, direction, std::min(bytes, warm_up_bytes), 0);
      const double taken = timed(handle, direction, bytes, next_offset(bytes));
      (direction == Direction::read ? figures.read_bytes_per_second
                                    : figures.write_bytes_per_second) =
          static_cast<double>(bytes) / taken;
      seconds += taken;
      moved += static_cast<double>(bytes);
    }
    figures.figure = moved / seconds;
    return figures;
  }

  // Another part of the file each time, as far as it has one.
  std::uint64_t next_offset(std::uint64_t bytes) {
    turn_ = (turn_ + 1) % (file_bytes_ / bytes);
    return turn_ * bytes;
  }

  double timed(Handle& handle, Direction direction, std::uint64_t bytes, std::uint64_t offset) {
    const auto begin = Clock::now();
    finish(start(handle, direction, memory_->bytes().first(bytes), file_, offset));
    return seconds_between(begin, Clock::now());
  }

  // The median of single reads.
  double latency(Handle& handle, std::uint64_t bytes) {
    std::vector<double> seconds;
    timed(handle, Direction::read, latency_bytes, 0);
    for (std::uint64_t moved = 0; moved < bytes; moved += latency_bytes) {
      seconds.push_back(timed(handle, Direction::read, latency_bytes, next_offset(latency_bytes)));
    }
    return median_of(seconds);
  }

  const Objective objective_;
  const File file_;
  std::unique_ptr<FilledMemory> memory_;
  const std::uint64_t file_bytes_;
  std::uint64_t turn_ = 0;
  std::vector<std::jthread> closing_;
};

bool was_measured(const Figures& figures) { return figures.figure > 0; }

// Measures each candidate once: the first one first, the others in random order. After
// `seconds_max` the rest stays as it is, not measured.
std::vector<Figures> run_pass(Probe& probe, const std::vector<Candidate>& candidates,
                              std::uint64_t bytes, double seconds_max, std::mt19937_64& random,
                              const std::function<void()>& watch) {
  const Budget budget(seconds_max);
  std::vector<std::size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin() + 1, order.end(), random);
  std::vector<Figures> figures(candidates.size());
  for (const std::size_t i : order) {
    if (budget.left() <= 0) break;
    figures[i] = probe.measure(candidates[i].point, bytes);
    watch();
  }
  return figures;
}

// Drops the candidates that the first pass did not reach: a random part, whose neighbours remain.
void leave_out(std::vector<Candidate>& candidates, std::vector<Figures>& figures) {
  std::vector<Candidate> reached;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (was_measured(figures[i])) reached.push_back(std::move(candidates[i]));
  }
  candidates = std::move(reached);
  std::erase_if(figures, [](const Figures& one) { return !was_measured(one); });
}

void add_pass(std::vector<Candidate>& candidates, const std::vector<Figures>& figures,
              Objective objective) {
  std::vector<double> all;
  for (const Figures& one : figures) all.push_back(one.figure);
  const double middle = median_of(all);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const auto& [figure, read, write] = figures[i];
    candidates[i].figures.push_back(figure);
    candidates[i].scores.push_back(objective == Objective::latency ? middle / figure
                                                                   : figure / middle);
    if (read > 0) candidates[i].read_speeds.push_back(read);
    if (write > 0) candidates[i].write_speeds.push_back(write);
  }
}

// The largest transfer that the time allows: the smallest one times a power of two.
std::uint64_t transfer_bytes_for(double bytes_per_second, double seconds, std::size_t candidates,
                                 std::uint64_t file_bytes) {
  const double each =
      bytes_per_second * seconds / static_cast<double>(candidates * 2 * passes_wanted);
  std::uint64_t bytes = transfer_bytes_min;
  while (bytes * 2 <= file_bytes / 2 && static_cast<double>(bytes * 2) <= each) bytes *= 2;
  return bytes;
}

// Rounds of halving, including the last one with the finalists.
std::size_t rounds_for(std::size_t candidates) {
  std::size_t rounds = 1;
  for (; candidates > finalists_max; candidates = (candidates + 1) / 2) ++rounds;
  return rounds;
}

}  // namespace

std::string_view to_string(Objective objective) noexcept {
  switch (objective) {
    case Objective::read:
      return "read";
    case Objective::write:
      return "write";
    case Objective::balanced:
      return "balanced";
    case Objective::latency:
      return "latency";
  }
  return {};
}

double Candidate::score() const { return scores.empty() ? 0 : mean_of(scores); }
double Candidate::margin() const { return ci95_half_width(scores); }
double Candidate::figure() const { return figures.empty() ? 0 : median_of(figures); }

std::vector<EngineKind> working_engines() {
  std::vector<EngineKind> working;
  std::ranges::copy_if(all_engines, std::back_inserter(working),
                       [](EngineKind engine) { return !try_engine(engine).has_value(); });
  return working;
}

Point usual_point(const Volume& volume) {
  const Device& device = volume.device;
  const unsigned processors = std::max(std::thread::hardware_concurrency() / 2, 1U);
  Point point;
  point.engine = working_engines().front();
  point.block_bytes = device.huge_page_block_bytes;  // tune uses memory of huge pages
  point.workers = std::min({device.disks, processors, 4U});
  point.queue_depth = std::max(device.queue_depth / point.workers, 8U);
  return point;
}

std::vector<Point> candidates_for(const Volume& volume, const std::vector<EngineKind>& engines) {
  const unsigned processors = std::max(std::thread::hardware_concurrency(), 1U);
  std::vector<Point> points{usual_point(volume)};
  for (const EngineKind engine : engines) {
    for (const std::uint64_t block_bytes : {128 * KiB, 256 * KiB, 512 * KiB, 1 * MiB, 2 * MiB}) {
      for (const unsigned queue_depth : {4U, 8U, 16U, 32U, 64U}) {
        for (const unsigned workers : {1U, 2U, 4U, 8U}) {
          Point point;
          point.engine = engine;
          point.block_bytes = block_bytes;
          point.queue_depth = queue_depth;
          point.workers = workers;
          const bool too_many =
              engine == EngineKind::threads && queue_depth * workers > threads_max;
          if (workers > processors || too_many || same(point, points.front()) ||
              block_bytes * queue_depth * workers > in_flight_bytes_max) {
            continue;
          }
          points.push_back(point);
        }
      }
    }
  }
  return points;
}

std::vector<Point> keep(Round& round) {
  std::ranges::sort(round.candidates, [](const Candidate& one, const Candidate& other) {
    return one.score() > other.score();
  });
  const Candidate& best = round.candidates.front();
  const double floor = best.score() - best.margin();
  std::vector<Point> kept;
  for (Candidate& candidate : round.candidates) {
    const bool hopeless = candidate.score() + candidate.margin() < floor;
    candidate.kept = kept.size() < (round.candidates.size() + 1) / 2 && !hopeless;
    if (candidate.kept) kept.push_back(candidate.point);
  }
  return kept;
}

const Candidate& choose(const Round& round, const Point& usual) {
  const auto cost = [&](const Candidate& candidate) {
    const Point& point = candidate.point;
    return std::tuple(same(point, usual) ? 0 : 1, point.workers,
                      point.block_bytes * point.queue_depth * point.workers);
  };
  const Candidate* chosen = &round.candidates.front();
  for (const Candidate& candidate : round.candidates) {
    if (candidate.score() < round.candidates.front().score() * even) continue;
    if (cost(candidate) < cost(*chosen)) chosen = &candidate;
  }
  return *chosen;
}

namespace {

// A rough speed of the drive in bytes per second, to size the rounds.
double rough_speed(const std::string& path, const Point& usual) {
  constexpr std::uint64_t trial_bytes = 16 * MiB;
  const PointResult write = run_point(usual, Direction::write, path, trial_bytes, 1);
  const PointResult read = run_point(usual, Direction::read, path, trial_bytes, 1);
  return 2.0 * static_cast<double>(trial_bytes) / (write.seconds.front() + read.seconds.front());
}

// Measures the points in as many passes as fit into `seconds`.
Round run_round(Probe& probe, const std::vector<Point>& points, std::uint64_t bytes, double seconds,
                Objective objective, std::mt19937_64& random, const Budget& budget,
                const std::function<void()>& watch) {
  const auto begin = Clock::now();
  probe.prepare(bytes);
  Round round;
  round.transfer_bytes = bytes;
  for (const Point& point : points) {
    round.candidates.emplace_back().point = point;
  }
  for (std::size_t passes = 0; passes < passes_max; ++passes) {
    const double spent = seconds_between(begin, Clock::now());
    const auto done = static_cast<double>(passes);
    const bool too_long = spent * (done + 1) > seconds * done;  // if the next one takes as long
    if (passes > 0 && too_long) break;
    const double limit = std::min(first_pass_shares * seconds, budget.left());
    auto figures = run_pass(probe, round.candidates, bytes, limit, random, watch);
    const bool whole = std::ranges::all_of(figures, was_measured);
    if (passes == 0) {
      leave_out(round.candidates, figures);
      round.left_out = points.size() - round.candidates.size();
    }
    if (round.candidates.empty() || (passes > 0 && !whole)) break;
    add_pass(round.candidates, figures, objective);
  }
  round.seconds = seconds_between(begin, Clock::now());
  return round;
}

std::uint64_t file_bytes_for(double bytes_per_second, double seconds_max) {
  constexpr double preparing_share = 0.1;
  std::uint64_t bytes = tune_bytes;
  while (bytes > 4 * transfer_bytes_min &&
         static_cast<double>(bytes) > bytes_per_second * seconds_max * preparing_share) {
    bytes /= 2;
  }
  return bytes;
}

void conclude(Tuned& tuned, const Volume& volume, const Point& usual) {
  if (tuned.rounds.empty()) {
    throw Error({.operation = "tune",
                 .path = volume.directory,
                 .code = ETIMEDOUT,
                 .hint = "the drive is too slow to measure even one setting in this time; "
                         "allow more with --seconds"});
  }
  tuned.best = choose(tuned.rounds.back(), usual);
  tuned.usual.point = usual;
  // The last rounds may have had no time for it.
  for (const Round& round : tuned.rounds) {
    for (const Candidate& one : round.candidates) {
      if (same(one.point, usual) && !one.scores.empty()) tuned.usual = one;
    }
  }
}

PollingTrial try_polling(Probe& probe, const Point& best, Polling polling, std::uint64_t bytes,
                         double seconds, Objective objective, std::mt19937_64& random) {
  PollingTrial trial{.polling = polling, .gain = 0, .problem = {}};
  if (best.engine != EngineKind::io_uring) {
    trial.problem = "only io_uring polls";
    return trial;
  }
  Point polled = best;
  polled.polling = polling;
  try {
    const Round round =
        run_round(probe, {best, polled}, bytes, seconds, objective, random, Budget(seconds), [] {});
    if (round.candidates.size() < 2) {
      trial.problem = "there was no time to measure it";
    } else {
      trial.gain = round.candidates[1].score() / round.candidates[0].score();
    }
  } catch (const Error& error) {
    trial.problem = error.what();
  }
  return trial;
}

}  // namespace

std::vector<Polling> polling_for(const Volume& volume, const TuneOptions& options) {
  std::vector<Polling> wanted = options.polling;
  const bool listed = std::ranges::find(wanted, Polling::completion) != wanted.end();
  if (volume.device.polled_queues && !listed) wanted.push_back(Polling::completion);
  return wanted;
}

Tuned tune(const TuneOptions& options, const Volume& volume, const std::vector<Point>& candidates,
           const std::string& file, const std::function<void(const TuneStep&)>& watch,
           const std::function<void(const Round&)>& round_done) {
  const std::vector<Polling> polling = polling_for(volume, options);
  const double polling_seconds = options.seconds_max * polling_share;
  const Budget budget(options.seconds_max - polling_seconds * static_cast<double>(polling.size()));
  const Point usual = usual_point(volume);
  double speed = rough_speed(file, usual);
  const std::uint64_t file_bytes = file_bytes_for(speed, options.seconds_max);
  extend(File::open(file, Access::write), file_bytes, data_seed, usual.engine);
  Probe probe(options.objective, file, file_bytes);

  Tuned tuned;
  std::mt19937_64 random(data_seed);
  std::vector<Point> points = candidates;
  const std::size_t rounds = rounds_for(points.size());
  while (tuned.rounds.size() < rounds) {
    const std::size_t rounds_left = rounds - tuned.rounds.size();
    const bool last = rounds_left == 1;
    // The finalists get two shares of the time, because small differences count there.
    const double seconds =
        last ? budget.left() : budget.left() / static_cast<double>(rounds_left + 1);
    Round round =
        run_round(probe, points, transfer_bytes_for(speed, seconds, points.size(), file_bytes),
                  seconds, options.objective, random, budget,
                  [&] { watch({tuned.rounds.size() + 1, points.size(), budget.share()}); });
    if (round.candidates.empty()) break;  // no time for even one
    points = keep(round);
    // Measures the defaults to the end, for comparison.
    if (std::ranges::none_of(points, [&](const Point& one) { return same(one, usual); })) {
      points.push_back(usual);
    }
    if (options.objective != Objective::latency) speed = round.candidates.front().figure();
    tuned.rounds.push_back(std::move(round));
    round_done(tuned.rounds.back());
  }
  conclude(tuned, volume, usual);
  for (const Polling one : polling) {
    tuned.polling.push_back(try_polling(probe, tuned.best.point, one,
                                        tuned.rounds.back().transfer_bytes, polling_seconds,
                                        options.objective, random));
  }
  tuned.seconds = budget.spent();
  return tuned;
}

Json to_json(const Candidate& candidate, Objective objective) {
  const Point& point = candidate.point;
  Json json = {{"engine", to_string(point.engine)},
               {"block_bytes", point.block_bytes},
               {"queue_depth", point.queue_depth},
               {"workers", point.workers}};
  if (candidate.scores.empty()) return json;
  json["score"] = candidate.score();
  if (candidate.scores.size() > 1) {
    json["low"] = candidate.score() - candidate.margin();
    json["high"] = candidate.score() + candidate.margin();
  }
  if (objective == Objective::latency) {
    json["latency_seconds"] = candidate.figure();
  } else {
    json["gb_per_second"] = candidate.figure() / 1e9;
  }
  return json;
}

Json to_json(const Round& round, Objective objective) {
  Json json = {{"transfer_bytes", round.transfer_bytes},
               {"seconds", round.seconds},
               {"candidates", Json::array()}};
  if (round.left_out > 0) json["left_out"] = round.left_out;
  for (const Candidate& candidate : round.candidates) {
    Json entry = to_json(candidate, objective);
    entry["scores"] = candidate.scores;
    entry["kept"] = candidate.kept;
    json["candidates"].push_back(std::move(entry));
  }
  return json;
}

Json to_json(const PollingTrial& trial) {
  Json json = {{"polling", to_string(trial.polling)}};
  if (trial.problem.empty()) {
    json["gain"] = trial.gain;
  } else {
    json["problem"] = trial.problem;
  }
  return json;
}

Json aio_block(const Point& point) {
  return {{"block_size", point.block_bytes},
          {"queue_depth", point.queue_depth},
          {"intra_op_parallelism", point.workers},
          {"single_submit", point.submit == Submit::single},
          {"overlap_events", point.overlap == Overlap::on}};
}

Profile profile_of(const Candidate& candidate) {
  const auto median = [](const std::vector<double>& speeds) {
    return speeds.empty() ? 0 : static_cast<std::uint64_t>(median_of(speeds));
  };
  return {.engine = candidate.point.engine,
          .block_bytes = candidate.point.block_bytes,
          .queue_depth = candidate.point.queue_depth,
          .workers = candidate.point.workers,
          .read_bytes_per_second = median(candidate.read_speeds),
          .write_bytes_per_second = median(candidate.write_speeds)};
}

namespace {

Json config_in(const std::string& path) {
  Json config = Json::object();
  if (std::filesystem::exists(path)) config = read_json(path);
  if (config.is_object() && (!config.contains("aio") || config["aio"].is_object())) return config;
  throw Error({.operation = "write config",
               .path = path,
               .code = EBADMSG,
               .hint = "the file, and \"aio\" in it, must be JSON objects"});
}

}  // namespace

void check_config(const std::string& path) {
  (void)config_in(path);
  check_writable(path);
}

void write_config(const std::string& path, const Point& point) {
  Json config = config_in(path);
  Json& aio = config["aio"];
  for (const char* const alias : {"thread_count", "num_threads"}) {  // of intra_op_parallelism
    if (aio.is_object()) aio.erase(alias);
  }
  aio.update(aio_block(point));
  write_text(path, config.dump(2) + "\n");
}

}  // namespace tensorferry::bench
