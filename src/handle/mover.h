// Moves blocks through one engine: keeps the engine's queue full, has every completion judged, and
// copies through slots what cannot go in place. A worker or a lane owns it and calls it from one
// thread at a time, wait() aside. It never sleeps but in wait() and never calls a user.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/result.h"
#include "engines/engine.h"
#include "handle/governor.h"
#include "handle/gpu_copies.h"
#include "handle/ledger.h"
#include "handle/registrations.h"
#include "handle/retry.h"
#include "handle/transfer.h"
#include "memory/region.h"
#include "memory/slot_copy.h"
#include "os/system.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

// A mover handles up to this many completions before it refills the queue. Beyond the depth it has
// as many flights and slots, which it empties meanwhile.
inline constexpr std::size_t reap_batch = 16;

struct MoverOptions {
  unsigned queue_depth = 1;
  Submit submit = Submit::batch;
  std::size_t slot_block_bytes = 0;  // size of one slot
  unsigned slots = 1;
  // How many bytes of CPU memory may be under way in the slots. One block always may.
  std::size_t slot_bytes_in_flight = 0;
  int numa_node = -1;  // that slots keep to; -1: any
};

class Mover {
 public:
  using Nanoseconds = engines::Engine::Nanoseconds;

  Mover(const MoverOptions& options, std::unique_ptr<engines::Engine> engine, Ledger& ledger,
        os::System& system, Background& background);
  ~Mover() = default;
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // Call it once, before anything else, on the thread that owns the engine.
  void attach() { attach_error_ = -engine_->attach(); }
  // Call it last: nothing stays registered with the kernel.
  void detach() noexcept { regions_.drop_all(); }

  // --- Taking up blocks ---
  // Whether nothing is under way.
  [[nodiscard]] bool idle() const noexcept { return free_.size() == flights_.size(); }
  // How many more blocks fit into the queue. Blocks that have landed no longer count.
  [[nodiscard]] std::size_t flights_left() const noexcept;
  // The same for blocks of background operations, which leave some to others.
  [[nodiscard]] std::size_t flights_left_for_background() const noexcept;
  // Whether blocks wait for slots, and whether a block of this run would get one.
  [[nodiscard]] bool starving() const noexcept { return !starved_.empty(); }
  [[nodiscard]] bool has_slots_for(const Run& run, Priority priority) const noexcept;
  // Whether this many blocks would get slots at once.
  [[nodiscard]] bool has_slots(std::size_t count) const noexcept {
    return slot_region_ == nullptr ? count <= options_.slots : count <= free_slots_.size();
  }
  void take_up(Claim&& claim);

  // --- The loop ---
  // Makes ready again what waited for memory, slots, another attempt or a GPU.
  void revive();
  void submit_ready();
  // Copies out what has landed in slots, until that has cost time: then the queue comes first.
  // Shows it to witnesses before.
  void unload();
  // Whether there is work that no completion announces: slots came free for blocks that wait.
  [[nodiscard]] bool work_at_hand() const noexcept;
  // How long wait() may last at most.
  [[nodiscard]] Nanoseconds wait_limit() const;
  // Waits until requests complete, wake() is called or the limit passes. If the engine serves any
  // thread, others may call everything but wait() and judge_waited() meanwhile.
  void wait(Nanoseconds limit);
  // Judges what wait() has brought.
  void judge_waited();
  // Ends the blocks of operations that stop: at once if the kernel does not have them yet.
  void end_stopping();
  void wake() noexcept { engine_->wake(); }

  // Operations whose last block or sync step has ended; and those that failed, of which nothing
  // more must start. Passes each to the caller once, who tells the crew.
  using Transfers = std::vector<std::shared_ptr<Transfer>>;
  [[nodiscard]] Transfers& ended() noexcept { return ended_; }
  [[nodiscard]] Transfers& failed() noexcept { return failed_; }

  // Calls visit(transfer) for each block under way.
  template <class Visit>
  void for_each_flight(Visit visit) const {
    for (const Flight& flight : flights_) {
      if (flight.stage != Stage::unused) visit(flight.claim.transfer);
    }
  }

  // Whether the engine has requests.
  [[nodiscard]] bool in_flight() const noexcept { return in_flight_ > 0; }
  // The bytes that have moved since the last call.
  [[nodiscard]] std::uint64_t take_moved_bytes() noexcept { return std::exchange(moved_bytes_, 0); }
  // How many times in a row wait() has brought nothing, since the last note_work().
  [[nodiscard]] unsigned polls() const noexcept { return polls_; }
  void note_work() noexcept { polls_ = 0; }
  [[nodiscard]] engines::Engine& engine() noexcept { return *engine_; }

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
    Attempt attempt = {};
    std::byte* memory = nullptr;  // that requests use: the user's or a slot
    int slot = -1;
    int fd = -1;
    int file_index = -1;
    int buffer_index = -1;
    Clock::time_point due = {};      // of the next attempt, when delayed
    Clock::time_point started = {};  // for the trace
  };

  void make_ready(std::uint32_t index);
  void load(std::uint32_t index);
  void loaded(std::uint32_t index);
  // Makes the pages of fresh memory up to the end of the block. Returns whether it made any.
  [[nodiscard]] bool make_pages(const Run& run, const Block& block);
  [[nodiscard]] engines::Submitted offer(std::size_t begin, std::size_t end);
  void completed(std::uint32_t index, std::int32_t result);
  void finish(std::uint32_t index);
  // Once nothing of the flight is with the drive any more.
  void leave_background(Flight& flight) noexcept {
    if (flight.claim.background_bytes == 0) [[likely]]
      return;
    background_.ends(std::exchange(flight.claim.background_bytes, 0));
  }
  void fail(std::uint32_t index, int code);
  void fail(std::uint32_t index, const Error& error);
  void unloaded(std::uint32_t index);
  // Shows the bytes of a block to the transfer's witness, if it has one: when it has landed, or, if
  // it is written from a slot, when it is on its way.
  static void show(const Flight& flight);
  void collect_copies();
  [[nodiscard]] Status copy_by_gpu(std::uint32_t index);
  void copy_out(const Flight& flight) const;
  void copy_in(const Flight& flight);
  void feed_starved();
  void revive_delayed();
  [[nodiscard]] bool take_slot(Flight& flight);
  [[nodiscard]] bool slot_is_free_for(const Flight& flight) const noexcept;
  // How many slots only urgent operations get, once the process uses classes.
  [[nodiscard]] std::size_t slots_for_urgent() const noexcept {
    return classes_in_use() ? options_.slots / 4 : 0;
  }
  // Whether the flight has a slot whose bytes should stay in the CPU's cache.
  [[nodiscard]] static bool counts_for_cache(const Flight& flight) noexcept;

  const MoverOptions options_;
  Ledger& ledger_;
  os::System& system_;
  Background& background_;  // of the crew
  std::unique_ptr<engines::Engine> engine_;
  RegisteredRegions regions_;
  RegisteredFiles files_;
  GpuCopies copies_;
  std::vector<Flight> flights_;
  std::vector<std::uint32_t> free_;     // indexes of unused flights
  std::vector<std::uint32_t> ready_;    // to submit, oldest first
  std::vector<std::uint32_t> starved_;  // waiting for a slot
  std::vector<std::uint32_t> delayed_;  // waiting before another attempt
  std::vector<std::uint32_t> landed_;   // moved; to be shown to a witness or copied out of a slot
  std::vector<engines::Request> requests_;
  Transfers ended_;
  Transfers failed_;
  std::size_t in_flight_ = 0;
  std::uint64_t moved_bytes_ = 0;
  unsigned refusals_ = 0;  // in a row
  int attach_error_ = 0;
  unsigned polls_ = 0;         // in a row that found nothing new
  std::size_t unloading_ = 0;  // flights in that stage
  bool slots_known_to_cuda_ = false;

  // Of wait() and judge_waited() alone.
  std::vector<engines::Completion> completions_;
  int waited_ = 0;  // completions, or -errno

  std::shared_ptr<memory::Region> slot_region_;
  memory::SlotCopy copy_to_slot_;
  std::vector<int> free_slots_;
  std::size_t slot_bytes_under_way_ = 0;  // of flights that count for the cache
};

}  // namespace tensorferry::handle
