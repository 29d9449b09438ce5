// An operation from the inside: its plans, its progress, and how it ended. Workers report blocks,
// users wait. The lock of a crew guards the claiming of its leg; everything else is thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/one_or_many.h"
#include "engines/engine.h"
#include "files/growth.h"
#include "files/open_file.h"
#include "handle/ledger.h"
#include "handle/plan.h"
#include "handle/retry.h"
#include "handle/witness.h"
#include "memory/region.h"
#include "os/gpu_stream.h"
#include "tensorferry/error.h"
#include "tensorferry/operation.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

class Crew;
class Lane;
class Transfer;

enum class Outcome : std::uint8_t { succeeded, failed };

// A plan with what it takes to carry it out.
struct Run {
  Plan plan;
  std::shared_ptr<files::OpenFile> file;
  std::size_t leg = 0;
  int direct_fd = -1;
  int buffered_fd = -1;
  std::uint32_t alignment = 1;             // of direct requests
  std::shared_ptr<memory::Region> region;  // that holds the memory, if it is page-locked
  bool fresh = false;                      // a read into memory that has no pages yet
  alignas(8) mutable std::uintptr_t pages_made_to = 0;         // of fresh memory, by atomic_ref
  int gpu = -1;                                                // that has the memory; -1: the CPU
  std::shared_ptr<const engines::GpuFile> gpu_file = nullptr;  // if the engine moves its memory

  [[nodiscard]] int fd_for(const Block& block) const noexcept {
    return block.descriptor == Descriptor::direct ? direct_fd : buffered_fd;
  }
};

// Numbers operations over all handles of the process, from 1.
[[nodiscard]] std::uint64_t next_operation_id() noexcept;

// The request for a block before anything has moved.
[[nodiscard]] Attempt first_attempt(Direction direction, const Block& block,
                                    std::uint32_t alignment) noexcept;

// Judges a completion of a block. If the file seems to have ended, looks at its size.
[[nodiscard]] Judgement judge_block(Attempt& attempt, const Block& block, files::OpenFile& file,
                                    std::int32_t result);

// The Error of a block or a sync step that failed with `code`, for the user.
[[nodiscard]] Error transfer_error(const Attempt& attempt, const Block& block,
                                   files::OpenFile& file, int code);
[[nodiscard]] Error sync_error(engines::RequestKind kind, const files::OpenFile& file,
                               const files::Directory* directory, int code);

// One step towards durability, after all bytes have moved: the sync of a file, or of its directory.
struct SyncStep {
  engines::RequestKind kind = engines::RequestKind::sync_data;
  int fd = -1;
  std::shared_ptr<files::OpenFile> file;
  std::size_t leg = 0;
  std::shared_ptr<const files::Directory> directory = nullptr;
};

// One piece of work for a worker: a block of a run, or a sync step.
struct Claim {
  std::shared_ptr<class Transfer> transfer;
  const Run* run = nullptr;
  const SyncStep* step = nullptr;
  Block block;
  std::uint32_t background_bytes = 0;  // that count as under way in the background
};

// After this many blocks of an operation, claimed by one worker or by several, it is the next
// operation's turn. A worker claims no more at a time: a block that waits for its slot could have
// gone to another worker.
inline constexpr std::size_t turn_blocks = 8;

// What one crew does of a transfer: the blocks, and later the sync steps, of the files on its
// device. The crew's lock guards it, except for `owner`. Of a transfer on a lane there is one leg,
// which the lane claims before anybody else sees the transfer.
struct Leg {
  std::weak_ptr<Crew> owner;  // for users, who may come after the crew's end
  Crew* crew = nullptr;       // for crews: it lives at least as long as the transfer is not done
  Transfer* transfer = nullptr;
  std::size_t run = 0;  // of the next block
  std::size_t step = 0;
  std::uint64_t block = 0;
  std::uint64_t unclaimed = 0;  // blocks or steps
  std::size_t turn_left = turn_blocks;
  bool linked = false;  // in the crew's list of those that have not ended
  Leg* live_before = nullptr;
  Leg* live_after = nullptr;
};

class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  using Clock = Operation::Clock;

  // `verb` names it in errors and in the trace: "read", "write", "sync".
  Transfer(Direction direction, const char* verb, std::shared_ptr<Ledger> ledger);
  // Notes in the ledger a failure that nobody has asked about.
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // --- Before it is queued, by its builder alone ---
  OneOrMany<Piece> pieces;
  OneOrMany<Run> runs;
  OneOrMany<std::shared_ptr<memory::Region>> regions;  // kept alive until the end
  std::vector<SyncStep> steps;         // of the files; their directories follow later
  std::vector<files::Growth> growths;  // of the files that it makes longer
  std::vector<std::shared_ptr<os::GpuFence>> fences;  // must pass before anything is claimed
  std::shared_ptr<Witness> witness;                   // sees all bytes; usually nobody
  OneOrMany<Leg> legs;  // one for each crew; runs and steps are in their order
  std::string_view engine_name;
  std::shared_ptr<const std::string> engine_reason;
  void count_blocks();  // once all of the above is set

  // --- Its class ---
  // Before it is queued: its priority, and that of threads that wait for it without a scope.
  void set_priority(Priority own, Priority of_waiters) noexcept {
    priority_.store(own, std::memory_order_relaxed);
    of_waiters_ = of_waiters;
  }
  [[nodiscard]] Priority priority() const noexcept {
    return priority_.load(std::memory_order_relaxed);
  }
  // Gives it this priority, if that is higher.
  void raise(Priority priority) noexcept;
  // The same for the calling thread, which waits for it or is about to.
  void raise_for_waiter() noexcept;

  // --- Claiming: only with the lock of the leg's crew held ---
  [[nodiscard]] bool claimable(const Leg& leg) const noexcept {
    return leg.unclaimed > 0 && !stopping();
  }
  // The run of the next block, if that block goes through a slot.
  [[nodiscard]] const Run* next_through_slot(Leg& leg) noexcept;
  void claim(const std::shared_ptr<Transfer>& self, Leg& leg, Claim& out);
  [[nodiscard]] bool syncing() const noexcept { return syncing_; }

  // --- On a lane ---
  // Set before a user sees the transfer. The lane lives as long as its crew.
  Lane* lane = nullptr;
  // Whether blocks are on the lane.
  [[nodiscard]] bool on_lane() const noexcept { return on_lane_.load(std::memory_order_acquire); }
  void set_on_lane(bool on) noexcept { on_lane_.store(on, std::memory_order_release); }
  [[nodiscard]] std::uint64_t blocks() const noexcept {
    return unfinished_.load(std::memory_order_relaxed);
  }

  // --- Progress, by workers ---
  [[nodiscard]] Direction direction() const noexcept { return direction_; }
  void mark_started(Clock::time_point now) noexcept;
  void add_bytes(std::uint64_t bytes) noexcept;
  // Keeps the first error and stops the operation: nothing more of it starts. After complete() it
  // changes nothing.
  void fail(Error error) noexcept;
  void fail_cancelled(const std::string& why) noexcept { fail(cancelled(why)); }
  // The same for a write whose handle closes. Notes it in the ledger, unless all bytes arrive after
  // all.
  void give_up(const std::string& why) noexcept;
  [[nodiscard]] Error cancelled(const std::string& why) const;
  [[nodiscard]] bool stopping() const noexcept { return stopping_.load(std::memory_order_acquire); }
  // Counts off blocks or steps. Returns true to the one caller that brings the count to zero.
  [[nodiscard]] bool finish_blocks(std::uint64_t count) noexcept;
  // For that caller, without any crew's lock: finds the next sync steps, which the legs then may
  // claim, and returns their number. First come all files, then each directory that holds one of
  // them now, once. May open directories.
  [[nodiscard]] std::uint64_t prepare_steps() noexcept;
  // Reports done. Lets go of files and memory before anyone can see that.
  void complete() noexcept;

  // --- For users. In a forked child they take no lock: a thread of the parent may hold it ---
  [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // The same, after a look at what has arrived on the lane.
  [[nodiscard]] bool look_done() noexcept;
  [[nodiscard]] bool wait_until(std::optional<Clock::time_point> deadline);
  void when_done(std::function<void()> then);
  // As when_done(), but calls `then` before anybody can see the end, or at once after it. `then`
  // must not wait; it calls hold() to put the end off.
  void before_done(std::function<void(Outcome)> then);
  // Puts the end off until release() has been called as often. The last release() reports done.
  // Returns false if the transfer is done already.
  [[nodiscard]] bool hold() noexcept;
  void release() noexcept;
  void cancel(const char* why) noexcept;
  [[nodiscard]] std::optional<Error> error() const;  // asked for, it is no longer lost
  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return moved_bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] Operation::Timing timing() const;
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }

 private:
  // Throws Error (ECHILD) in a forked child: there an operation of the parent never ends.
  void check_process() const;
  void settle_growths() noexcept;
  void hear_witness(bool all_moved, bool all_done) noexcept;
  // With the lock held; lets go of it if it reports done.
  void release(std::unique_lock<std::mutex>& lock) noexcept;
  // Final once ending_ is set.
  [[nodiscard]] Outcome outcome() const noexcept {
    return error_ ? Outcome::failed : Outcome::succeeded;
  }

  const Direction direction_;
  const char* const verb_;
  const std::shared_ptr<Ledger> ledger_;
  const std::uint64_t id_;
  const std::uint64_t generation_;
  std::uint64_t asked_bytes_ = 0;
  std::shared_ptr<const std::string> path_;  // of the first file, with the offset in it
  std::uint64_t offset_ = 0;

  // The run of the leg's next block. There must be one.
  [[nodiscard]] const Run& next_run(Leg& leg) noexcept;
  // The crew of the lane, while blocks are on it; else nullptr.
  [[nodiscard]] std::shared_ptr<Crew> crew_of_lane() const noexcept;
  [[nodiscard]] Result<std::vector<SyncStep>> directory_steps() const;

  std::atomic<std::uint64_t> unfinished_{0};
  std::atomic<std::uint64_t> moved_bytes_{0};
  std::atomic<std::int64_t> started_{0};  // since the clock's epoch; 0: not yet

  std::atomic<Priority> priority_{Priority::normal};
  Priority of_waiters_ = Priority::normal;
  std::atomic<bool> on_lane_{false};
  std::atomic<bool> syncing_{false};
  bool directories_found_ = false;  // used by prepare_steps() alone
  std::atomic<bool> stopping_{false};
  std::atomic<bool> done_{false};
  mutable std::atomic<bool> seen_{false};  // somebody has asked how it ended
  bool given_up_ = false;  // error_, if any, says so; mutex_ guards this and what follows
  bool ending_ = false;    // the outcome is final
  unsigned holds_ = 1;     // complete() has one itself
  unsigned waiters_ = 0;   // for ended_
  mutable std::mutex mutex_;
  // In a union, so that a forked child need not destroy it: that would wait for the parent's
  // threads.
  union {
    std::condition_variable ended_{};  // NOLINT(readability-identifier-naming): a private member
  };
  std::unique_ptr<const Error> error_;  // kept small: few operations fail
  std::vector<std::function<void(Outcome)>> attendants_;
  std::vector<std::function<void()>> listeners_;
  const Clock::time_point queued_;
  Clock::time_point finished_;
};

}  // namespace tensorferry::handle
