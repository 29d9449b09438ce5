// One thread and the engine it owns. It claims blocks from its crew, keeps the engine's queue full,
// has every completion judged, and copies through its own slots what cannot go in place. It sleeps
// in one place only: the engine's reap().
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/result.h"
#include "engines/engine.h"
#include "handle/crew.h"
#include "handle/gpu_copies.h"
#include "handle/registrations.h"
#include "handle/retry.h"
#include "handle/transfer.h"
#include "memory/region.h"
#include "memory/slot_copy.h"

namespace tensorferry::handle {

class Worker {
 public:
  Worker(Crew& crew, std::unique_ptr<engines::Engine> engine);
  ~Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  [[nodiscard]] Status start();
  // Waits for the thread's end; the crew must be closing.
  void join();
  // Lets the thread end by itself.
  void detach();
  [[nodiscard]] bool is_this_thread() const noexcept { return id_ == std::this_thread::get_id(); }
  void wake() noexcept { engine_->wake(); }
  [[nodiscard]] double cpu_seconds();

  bool asleep = false;  // guarded by the crew's lock

  // For the crew, on the worker's own thread: whether blocks wait for slots, and whether a block of
  // this run would get one.
  [[nodiscard]] bool starving() const noexcept { return !starved_.empty(); }
  [[nodiscard]] bool has_slots_for(const Run& run) const noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  // loading and unloading: a GPU copies between the slot and its memory.
  enum class Stage : std::uint8_t {
    unused,
    starved,
    loading,
    ready,
    delayed,
    in_flight,
    landed,
    unloading
  };

  // A block from claim to end. Its index in flights_ is the tag of its requests.
  struct Flight {
    Stage stage = Stage::unused;
    bool cancelled = false;  // the engine has been asked to cancel it
    Claim claim;
    Attempt attempt;
    std::byte* memory = nullptr;  // that requests use: the user's or a slot
    int slot = -1;
    int fd = -1;
    int file_index = -1;
    int buffer_index = -1;
    Clock::time_point due;      // of the next attempt, when delayed
    Clock::time_point started;  // for the trace
  };

  [[nodiscard]] std::shared_ptr<Crew> run();
  void take_up_claims();
  void take_up(Claim&& claim);
  void make_ready(std::uint32_t index);
  void load(std::uint32_t index);
  void loaded(std::uint32_t index);
  [[nodiscard]] bool populate(const Run& run, const Block& block);
  void submit_ready();
  [[nodiscard]] engines::Submitted offer(std::size_t begin, std::size_t end);
  void reap();
  void completed(std::uint32_t index, std::int32_t result);
  void finish(std::uint32_t index);
  void fail(std::uint32_t index, int code);
  void fail(std::uint32_t index, const Error& error);
  void unload();
  void unloaded(std::uint32_t index);
  void collect_copies();
  [[nodiscard]] Status copy_by_gpu(std::uint32_t index);
  void copy_out(const Flight& flight) const;
  void copy_in(const Flight& flight);
  void obey_cancellations();
  void feed_starved();
  void revive_delayed();
  [[nodiscard]] engines::Engine::Nanoseconds reap_limit() const;
  [[nodiscard]] bool take_slot(Flight& flight);
  [[nodiscard]] bool slot_is_free_for(const Flight& flight) const noexcept;
  // Whether the flight has a slot whose bytes should stay in the CPU's cache.
  [[nodiscard]] static bool counts_for_cache(const Flight& flight) noexcept;
  [[nodiscard]] bool idle() const noexcept { return free_.size() == flights_.size(); }
  // How many more flights fit into the queue. Flights that have landed no longer count.
  [[nodiscard]] std::size_t flights_left() const noexcept;
  [[nodiscard]] bool work_at_hand() const noexcept;

  Crew& crew_;
  Ledger& ledger_;
  std::unique_ptr<engines::Engine> engine_;
  RegisteredRegions regions_;
  RegisteredFiles files_;
  GpuCopies copies_;
  std::vector<Flight> flights_;
  std::vector<std::uint32_t> free_;     // indexes of unused flights
  std::vector<std::uint32_t> ready_;    // to submit, oldest first
  std::vector<std::uint32_t> starved_;  // waiting for a slot
  std::vector<std::uint32_t> delayed_;  // waiting before another attempt
  std::vector<std::uint32_t> landed_;   // read into a slot, to copy out
  std::vector<engines::Request> requests_;
  std::vector<engines::Completion> completions_;
  std::vector<Claim> claims_;
  std::size_t in_flight_ = 0;
  bool queue_was_empty_ = false;  // at the last look
  unsigned refusals_ = 0;         // in a row
  int attach_error_ = 0;
  unsigned polls_ = 0;         // in a row that found nothing new
  std::size_t unloading_ = 0;  // flights in that stage
  bool slots_known_to_cuda_ = false;
  std::uint64_t cancellations_seen_ = 0;

  std::shared_ptr<memory::Region> slot_region_;
  memory::SlotCopy copy_to_slot_;
  std::vector<int> free_slots_;
  std::size_t slot_bytes_under_way_ = 0;  // of flights that count for the cache

  std::thread thread_;
  std::thread::id id_;  // stays known after detach()
  std::atomic<double> cpu_seconds_at_end_{0};
};

}  // namespace tensorferry::handle
