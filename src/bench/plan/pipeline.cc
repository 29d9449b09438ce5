#include "bench/plan/pipeline.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <stdexcept>

namespace tensorferry::bench {

namespace {

// A read or a write under way.
struct Flight {
  std::size_t stage = 0;
  Way way = Way::drive;
  bool is_read = true;
  double left_bytes = 0;
  double delay_seconds = 0;  // before its first byte
};

class Run {
 public:
  explicit Run(const Pipeline& pipeline)
      : pipeline_(pipeline), free_bytes_(pipeline.buffer_bytes), read_(pipeline.stages.size()) {
    course_.timings.resize(pipeline.stages.size());
  }

  Course finish() {
    const auto& stages = pipeline_.stages;
    for (std::size_t i = 0; i < stages.size(); ++i) {
      load_ahead(i);
      while (!read_[i]) advance(no_limit);
      Timing& timing = course_.timings[i];
      timing.compute_begin = now_;
      course_.compute_seconds += stages[i].compute_seconds;
      const double until = now_ + stages[i].compute_seconds;
      while (now_ < until) advance(until - now_);
      timing.compute_end = timing.write_end = now_;
      if (stages[i].way != Way::in_place) --loads_;
      if (stages[i].way == Way::in_place || stages[i].write_bytes == 0) {
        free_bytes_ += buffer_of(i);
      } else {
        flights_.push_back(
            {i, stages[i].way, false, stages[i].write_bytes, pipeline_.start_seconds});
      }
    }
    while (!flights_.empty()) advance(no_limit);
    course_.seconds = now_;
    course_.waited_seconds = now_ - course_.compute_seconds;
    return course_;
  }

 private:
  static constexpr double no_limit = std::numeric_limits<double>::infinity();

  [[nodiscard]] double buffer_of(std::size_t stage) const {
    const Stage& one = pipeline_.stages[stage];
    return one.way == Way::in_place ? 0 : std::min(one.held_bytes, pipeline_.buffer_bytes);
  }

  // Begins to read this stage, which waits for room if need be, and those after it that find room
  // before it has arrived.
  void load_ahead(std::size_t stage) {
    const auto& stages = pipeline_.stages;
    while (next_ < stages.size() && (next_ == stage || loads_ < pipeline_.loads_max)) {
      while (free_bytes_ < buffer_of(next_) * (1 - 1e-9)) {
        if (flights_.empty() || (next_ != stage && read_[stage])) return;
        advance(no_limit);
      }
      const Stage& one = stages[next_];
      free_bytes_ -= buffer_of(next_);
      course_.timings[next_].read_begin = course_.timings[next_].read_end = now_;
      if (one.way == Way::in_place || one.read_bytes == 0) {
        read_[next_] = true;
      } else {
        flights_.push_back({next_, one.way, true, one.read_bytes, pipeline_.start_seconds});
      }
      if (one.way != Way::in_place) ++loads_;
      ++next_;
    }
  }

  // Bytes per second of each flight that has begun: requests of all take turns.
  [[nodiscard]] double speed_on(Way way) const {
    double reads = 0;
    double all = 0;
    for (const Flight& flight : flights_) {
      if (flight.way != way || flight.delay_seconds > 0) continue;
      reads += flight.is_read ? 1 : 0;
      all += 1;
    }
    if (all == 0) return 0;
    const Channel& channel = way == Way::drive ? pipeline_.drive : pipeline_.copies;
    return channel.rate(reads / all) / all;
  }

  // Lets time pass: until a flight begins or ends, but no longer than this.
  void advance(double seconds) {
    const double on_drive = speed_on(Way::drive);
    const double by_copies = speed_on(Way::copies);
    const auto speed = [&](const Flight& one) {
      return one.way == Way::drive ? on_drive : by_copies;
    };
    double step = seconds;
    for (const Flight& one : flights_) {
      step =
          std::min(step, one.delay_seconds > 0 ? one.delay_seconds : one.left_bytes / speed(one));
    }
    if (step == no_limit) throw std::logic_error("a stage waits for bytes that nothing moves");
    now_ += step;
    for (Flight& one : flights_) {
      if (one.delay_seconds > 0) {
        one.delay_seconds = one.delay_seconds <= step ? 0 : one.delay_seconds - step;
      } else {
        const double left = one.left_bytes / speed(one);
        one.left_bytes = left <= step * (1 + 1e-12) ? 0 : one.left_bytes - speed(one) * step;
      }
    }
    std::erase_if(flights_, [this](const Flight& one) {
      if (one.delay_seconds > 0 || one.left_bytes > 0) return false;
      end(one);
      return true;
    });
  }

  void end(const Flight& flight) {
    if (flight.is_read) {
      read_[flight.stage] = true;
      course_.timings[flight.stage].read_end = now_;
    } else {
      free_bytes_ += buffer_of(flight.stage);
      course_.timings[flight.stage].write_end = now_;
    }
  }

  const Pipeline& pipeline_;
  Course course_;
  double now_ = 0;
  double free_bytes_;
  std::vector<bool> read_;  // of each stage, whether it is there
  std::vector<Flight> flights_;
  std::size_t next_ = 0;  // to be read
  unsigned loads_ = 0;    // in buffers, not computed yet
};

}  // namespace

double Channel::rate(double share_read) const {
  const double share_write = 1 - share_read;
  const double apart = share_read / read + share_write / write;
  // What both at once cost beyond the sum of each, most where they are even.
  const double beyond = 1 / both - (1 / read + 1 / write) / 2;
  return 1 / (apart + 4 * share_read * share_write * beyond);
}

Course run(const Pipeline& pipeline) { return Run(pipeline).finish(); }

}  // namespace tensorferry::bench
