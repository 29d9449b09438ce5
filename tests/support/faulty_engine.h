// Wraps a real engine and adds faults by rule or by seeded dice: completions are short, fail, or
// come late or out of order; submissions are refused. Counts everything.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "engines/engine.h"

namespace tensorferry::support {

// What happens to one request.
struct Fault {
  enum class Kind : std::uint8_t {
    none,
    shorten,  // to `bytes`
    fail,     // with `error`; transfers nothing
    pretend,  // succeeds, but transfers nothing
  };
  Kind kind = Kind::none;
  std::uint32_t bytes = 0;
  int error = 0;
};

// A request that an engine took, in the log.
struct TakenRequest {
  engines::RequestKind kind;
  std::uint64_t offset;
  std::uint32_t bytes;
};

// The faults of all engines of a test, and the counts. Make the settings before an engine is used;
// everything else is thread-safe. Must outlive the engines.
class EngineFaults {
 public:
  // Called for every request that an engine takes; `index` counts them over all engines from 0.
  using Judge = std::function<Fault(const engines::Request& request, std::uint64_t index)>;

  explicit EngineFaults(std::uint64_t seed = 1) : dice_(seed) {}

  Judge judge;                           // none: no fault
  double refuse_probability = 0;         // for each request; the requests behind it wait too
  std::vector<int> refuse_errors;        // the dice choose one
  std::chrono::nanoseconds delay_max{};  // holds back each completion up to this long
  bool reorder = false;                  // completions come in random order
  bool log_requests = false;

  // Opens a real engine and wraps it, as Seams::open_engine wants it.
  [[nodiscard]] Result<std::unique_ptr<engines::Engine>> open(EngineKind kind, unsigned depth,
                                                              os::System& system);

  [[nodiscard]] std::uint64_t requests() const noexcept { return requests_.load(); }
  [[nodiscard]] std::uint64_t syncs() const noexcept { return syncs_.load(); }
  [[nodiscard]] std::uint64_t refusals() const noexcept { return refusals_.load(); }
  [[nodiscard]] std::uint64_t struck() const noexcept { return struck_.load(); }
  [[nodiscard]] unsigned in_flight_max() const noexcept { return in_flight_max_.load(); }
  [[nodiscard]] std::vector<TakenRequest> log() const;
  void reset_counts();

 private:
  friend class FaultyEngine;

  bool refused(int* error);
  Fault take(const engines::Request& request);
  std::chrono::nanoseconds draw_delay();
  std::size_t draw_below(std::size_t limit);

  mutable std::mutex mutex_;
  std::mt19937_64 dice_;
  std::vector<TakenRequest> log_;
  std::atomic<std::uint64_t> requests_{0};
  std::atomic<std::uint64_t> syncs_{0};
  std::atomic<std::uint64_t> refusals_{0};
  std::atomic<std::uint64_t> struck_{0};
  std::atomic<unsigned> in_flight_max_{0};
};

// A judge that strikes one request.
[[nodiscard]] EngineFaults::Judge strike_one(std::uint64_t index, Fault fault);

}  // namespace tensorferry::support
