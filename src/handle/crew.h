// Those who move the bytes of one device: workers with an engine each and the queue they share, and
// lanes for small operations. Workers claim blocks of queued operations in turn, so a small one
// does not wait for a large one to end.
#pragma once

#include <poll.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/one_or_many.h"
#include "base/result.h"
#include "engines/engine.h"
#include "handle/claim_queue.h"
#include "handle/governor.h"
#include "handle/keeper.h"
#include "handle/lane.h"
#include "handle/ledger.h"
#include "handle/mover.h"
#include "handle/process_share.h"
#include "handle/transfer.h"
#include "memory/region.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

class Worker;

using OpenEngine = std::function<Result<std::unique_ptr<engines::Engine>>(
    EngineKind kind, unsigned depth, os::System& system)>;

struct CrewOptions {
  EngineKind engine = EngineKind::threads;
  unsigned workers = 1;
  Overlap overlap = Overlap::on;
  MoverOptions mover;  // of each worker
  // Of each lane, and how many lanes there are; 0: none.
  MoverOptions lane_mover = {};
  unsigned lanes = 0;
  // How long a finishing crew goes on while no byte moves.
  std::chrono::nanoseconds close_limit{};
  Governor* governor = &Governor::of("");  // of the drive
  std::shared_ptr<Rate> rate = nullptr;    // of the handle, if it has one
};

// The most lanes that a crew may have.
inline constexpr unsigned lanes_max = 64;

class Crew : public std::enable_shared_from_this<Crew> {
 public:
  using Clock = Operation::Clock;

  // Opens an engine for each worker. Their threads start with the first operation that is queued.
  // `engine_reason` says why this engine. The Error is the engine's.
  [[nodiscard]] static Result<std::shared_ptr<Crew>> start(
      const CrewOptions& options, std::string engine_reason, OpenEngine open_engine,
      os::System& system, std::shared_ptr<Ledger> ledger, ProcessShare share);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // Refuses new operations and ends the workers when all operations have ended. Finishes writes;
  // finishes reads or cancels them. Gives up what does not move for close_limit and notes it in the
  // ledger. Waits without limit for what the kernel has in hand.
  void finish(OpenReads reads) noexcept;
  // Waits until the threads of a finishing crew are gone. Returns false if the deadline passes
  // first.
  [[nodiscard]] bool wait_for_end(std::optional<Clock::time_point> deadline) noexcept;
  // For a callback, which cannot wait for its own thread: the threads of a finishing crew keep it
  // until they are gone.
  void end_alone() noexcept;
  // Whether the calling thread is one of this crew.
  [[nodiscard]] bool is_this_thread() noexcept;

  // Cancels every operation that has not ended.
  void cancel_all() noexcept;

  [[nodiscard]] const CrewOptions& options() const noexcept { return options_; }
  [[nodiscard]] const std::shared_ptr<const std::string>& engine_reason() const noexcept {
    return engine_reason_;
  }
  [[nodiscard]] double cpu_seconds();

  // What the workers have moved, and how long at least one of them had a request under way. Lanes
  // count from the first call on: before, nobody needs it, and they are quick.
  struct Use {
    std::uint64_t bytes = 0;
    double busy_seconds = 0;
  };
  [[nodiscard]] Use use() noexcept;

  // Starts the workers, if they have not started. Succeeds if at least one can.
  [[nodiscard]] Status start_workers();

  // Queues an operation with the crews of its legs, whose workers have started, or completes it at
  // once if it has nothing to do. A finishing crew cancels it.
  static void enqueue(const std::shared_ptr<Transfer>& transfer);

  // Takes back the unclaimed blocks of a stopping operation. Completes it, unless blocks are in
  // flight: then whoever finishes the last of them does. The crews must not end meanwhile.
  static void drop(Transfer& transfer) noexcept;

  // An operation has got a higher priority: moves its leg to that class.
  void raise(Leg& leg) noexcept;

  // The last block of a transfer, or the last of its queued sync steps, has ended: queues the next
  // sync steps, or completes it.
  static void blocks_finished(const std::shared_ptr<Transfer>& transfer) noexcept;

  // --- Lanes ---
  // Carries out an operation of one leg on the lane of the calling thread. Returns false, and does
  // nothing, if it does not fit there: then queue it.
  [[nodiscard]] bool take_on_lane(const std::shared_ptr<Transfer>& transfer);
  // For lanes: one more operation, or one less, is under way on them. A finishing crew allows no
  // more: lane_takes() returns false.
  [[nodiscard]] bool lane_takes() noexcept;
  void lane_gave_back() noexcept;
  [[nodiscard]] bool lanes_in_use() const noexcept { return on_lanes_.load() > 0; }
  // For the keeper.
  void look_at_lanes() noexcept;
  void add_watched(std::vector<pollfd>& fds);
  void wake_keeper() noexcept { keeper_.wake(); }
  // Has the listeners called by the keeper, and takes them; returns false if there is none.
  [[nodiscard]] bool call_later(std::vector<std::function<void()>>& listeners);

  // --- For workers and lanes ---
  [[nodiscard]] Background& background() noexcept { return queue_.background(); }

  // --- For workers ---
  // Claims up to out.size() blocks. A worker that gets fewer counts as asleep: the crew wakes it
  // for the next ones. If a rate or the governor holds some back, it looks again after held_for.
  [[nodiscard]] std::size_t claim(Worker& worker, std::span<Claim> out);
  // Queues the operations whose fences have passed.
  void ask_fences();
  // Gives up what no longer moves, if the crew is finishing.
  void look_after_end() noexcept;
  [[nodiscard]] bool finishing() const noexcept { return finishing_.load(); }
  // A worker, or a lane once somebody asks for the use, has got something to do, or has moved so
  // much and has nothing left.
  void mover_begins() noexcept;
  void mover_rests() noexcept;
  [[nodiscard]] bool use_is_asked() const noexcept {
    return use_is_asked_.load(std::memory_order_relaxed);
  }
  void add_moved(std::uint64_t bytes) noexcept {
    moved_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  // The last call of a worker. If it returns the crew, the worker drops it as its very last act.
  [[nodiscard]] std::shared_ptr<Crew> leave() noexcept;
  // Grows whenever operations in flight should be cancelled.
  [[nodiscard]] std::uint64_t cancellations() const noexcept { return cancellations_.load(); }
  [[nodiscard]] bool closing() const noexcept { return closing_.load(); }
  // Whether operations wait for a GPU: workers must ask it again and again.
  [[nodiscard]] bool fenced() const noexcept { return fenced_.load(std::memory_order_relaxed); }
  [[nodiscard]] const std::shared_ptr<Ledger>& ledger() const noexcept { return ledger_; }
  [[nodiscard]] os::System& system() const noexcept { return system_; }

 private:
  Crew(const CrewOptions& options, std::string engine_reason, OpenEngine open_engine,
       os::System& system, std::shared_ptr<Ledger> ledger, ProcessShare share);
  // With the lock held.
  void link(Leg& leg) noexcept;
  void unlink(Leg& leg) noexcept;
  // Takes the workers that sleep off the list of sleepers, at most `count`; wake() wakes them,
  // without the lock.
  using Sleepers = OneOrMany<Worker*>;
  [[nodiscard]] Sleepers sleepers(std::uint64_t count) noexcept;
  static void wake(const Sleepers& sleepers) noexcept;

  // Without the lock. Queues the leg's blocks; returns false if the crew is finishing.
  [[nodiscard]] bool take_leg(Leg& leg);
  // Queues the leg's steps, which count already.
  void queue_steps(Leg& leg, std::uint64_t steps) noexcept;
  // Takes the leg's unclaimed blocks or steps back, and returns their number.
  [[nodiscard]] std::uint64_t abandon(Leg& leg) noexcept;
  [[nodiscard]] std::vector<std::shared_ptr<Transfer>> live() noexcept;
  static void stop(Transfer& transfer, const std::string& why) noexcept;
  static void complete(Transfer& transfer) noexcept;
  void end_if_done() noexcept;
  // With the lock held: whether all threads of a closing crew have ended.
  [[nodiscard]] bool all_left() const noexcept { return closing_ && left_ == started_; }
  void give_up() noexcept;
  void wake_all() noexcept;
  // The lane of the calling thread; nullptr if it cannot have one.
  [[nodiscard]] Lane* lane() noexcept;
  [[nodiscard]] Lane* open_lane(std::size_t index) noexcept;
  // With the lock held. The lane of another thread, if the process may have no more engines or
  // threads; nullptr if there is none.
  [[nodiscard]] Lane* shared_lane(std::size_t index) noexcept;
  // Calls visit(lane) for each that is open.
  template <class Visit>
  void for_each_lane(Visit visit) {
    for (const auto& lane : std::span(lanes_).first(options_.lanes)) {
      if (Lane* const open = lane.load(std::memory_order_acquire)) visit(*open);
    }
  }

  const CrewOptions options_;
  const ProcessShare share_;
  const std::shared_ptr<const std::string> engine_reason_;
  const std::shared_ptr<const std::string> lane_reason_;
  const OpenEngine open_engine_;
  os::System& system_;
  const std::shared_ptr<Ledger> ledger_;
  std::mutex mutex_;
  ClaimQueue queue_;
  std::vector<std::shared_ptr<Leg>> waiting_;     // for a GPU, not queued yet
  Leg* live_ = nullptr;                           // the newest that has not ended; a list
  std::vector<std::unique_ptr<Worker>> workers_;  // fixed from the beginning
  std::atomic<bool> workers_started_{false};
  std::size_t started_ = 0;  // threads
  std::size_t left_ = 0;     // threads that have ended
  std::condition_variable thread_left_;
  std::atomic<std::uint64_t> cancellations_{0};
  std::atomic<bool> finishing_{false};
  std::atomic<bool> closing_{false};
  std::atomic<bool> fenced_{false};
  std::mutex fences_mutex_;  // held by the worker that asks the GPUs
  std::unique_ptr<memory::EndOfRegions> end_of_regions_;
  std::shared_ptr<Crew> self_;  // while the threads keep the crew

  std::array<std::atomic<Lane*>, lanes_max> lanes_{};  // opened at first use, by the lock
  std::vector<std::unique_ptr<Lane>> open_lanes_;
  bool lanes_refused_ = false;
  bool lane_shares_ended_ = false;  // noted in the ledger
  std::optional<ProcessShare> keeper_share_;
  std::atomic<std::uint64_t> on_lanes_{0};  // operations
  Keeper keeper_{*this};
  std::atomic<bool> keeper_started_{false};

  std::mutex use_mutex_;  // guards the next three
  unsigned busy_movers_ = 0;
  Clock::time_point busy_since_;
  Clock::duration busy_{};
  std::atomic<std::uint64_t> moved_bytes_{0};
  std::atomic<bool> use_is_asked_{false};

  // Of a finishing crew: how much has moved, and since when that is unchanged.
  std::uint64_t progress_ = 0;
  Clock::time_point progress_seen_;
};

}  // namespace tensorferry::handle
