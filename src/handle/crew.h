// The workers of one engine and the queue they share. Operations are queued here; workers claim
// blocks of them in turn, so a small operation does not wait for a large one to end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "engines/engine.h"
#include "handle/ledger.h"
#include "handle/transfer.h"
#include "memory/region.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

class Worker;

using OpenEngine = std::function<Result<std::unique_ptr<engines::Engine>>(
    EngineKind kind, unsigned depth, os::System& system)>;

// A worker handles up to this many completions before it refills the queue. Beyond the depth it has
// as many flights and slots, which it empties meanwhile.
inline constexpr std::size_t reap_batch = 16;

struct CrewOptions {
  EngineKind engine = EngineKind::threads;
  unsigned queue_depth = 1;
  unsigned workers = 1;
  Submit submit = Submit::batch;
  Overlap overlap = Overlap::on;
  std::size_t slot_block_bytes = 0;  // size of one slot
  unsigned slots_per_worker = 1;
  // How many bytes of CPU memory may be under way in the slots of a worker. One block always may.
  std::size_t slot_bytes_in_flight = 0;
  int numa_node = -1;  // that workers and their slots keep to; -1: any
  // How long a finishing crew goes on while no byte moves.
  std::chrono::nanoseconds close_limit{};
};

class Crew : public std::enable_shared_from_this<Crew> {
 public:
  using Clock = Operation::Clock;

  // Opens an engine for each worker and starts them. `engine_reason` says why this engine. The
  // Error is the engine's.
  [[nodiscard]] static Result<std::shared_ptr<Crew>> start(const CrewOptions& options,
                                                           std::string engine_reason,
                                                           const OpenEngine& open_engine,
                                                           os::System& system,
                                                           std::shared_ptr<Ledger> ledger);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // Refuses new operations and ends the workers when all operations have ended. Finishes writes;
  // finishes reads or cancels them. Gives up what does not move for close_limit and notes it in the
  // ledger. Waits without limit for what the kernel has in hand.
  void finish(OpenReads reads) noexcept;
  // Waits until the workers of a finishing crew are gone. Returns false if the deadline passes
  // first. A worker of this crew, in a callback, cannot wait for itself: the call returns at once,
  // and the workers keep the crew until they are gone.
  [[nodiscard]] bool wait_for_end(std::optional<Clock::time_point> deadline) noexcept;

  // Cancels every operation that has not ended.
  void cancel_all() noexcept;

  [[nodiscard]] const CrewOptions& options() const noexcept { return options_; }
  [[nodiscard]] const std::shared_ptr<const std::string>& engine_reason() const noexcept {
    return engine_reason_;
  }
  [[nodiscard]] double cpu_seconds();

  // Queues an operation, or completes it at once if it has nothing to do. A finishing crew cancels
  // it.
  void enqueue(const std::shared_ptr<Transfer>& transfer);

  // Takes back the unclaimed blocks of a stopping operation. Completes it, unless blocks are in
  // flight: then the worker that finishes the last of them does.
  void drop(Transfer& transfer) noexcept;

  // --- For workers ---
  // Claims up to out.size() blocks. A worker that gets fewer counts as asleep: the crew wakes it
  // for the next ones.
  [[nodiscard]] std::size_t claim(Worker& worker, std::span<Claim> out);
  // Queues the operations whose fences have passed.
  void ask_fences();
  // Gives up what no longer moves, if the crew is finishing.
  void look_after_end() noexcept;
  [[nodiscard]] bool finishing() const noexcept { return finishing_.load(); }
  // The last call of a worker. If it returns the crew, the worker drops it as its very last act.
  [[nodiscard]] std::shared_ptr<Crew> leave() noexcept;
  // The last block of a transfer, or the last of its queued sync steps, has ended: queues the next
  // sync steps, or completes it.
  void blocks_finished(const std::shared_ptr<Transfer>& transfer) noexcept;
  // Grows whenever operations in flight should be cancelled.
  [[nodiscard]] std::uint64_t cancellations() const noexcept { return cancellations_.load(); }
  [[nodiscard]] bool closing() const noexcept { return closing_.load(); }
  // Whether operations wait for a GPU: workers must ask it again and again.
  [[nodiscard]] bool fenced() const noexcept { return fenced_.load(std::memory_order_relaxed); }
  [[nodiscard]] const std::shared_ptr<Ledger>& ledger() const noexcept { return ledger_; }
  [[nodiscard]] os::System& system() noexcept { return system_; }

 private:
  Crew(const CrewOptions& options, std::string engine_reason, os::System& system,
       std::shared_ptr<Ledger> ledger);
  // With the lock held.
  void push(const std::shared_ptr<Transfer>& transfer, std::uint64_t claims);
  void wake(std::uint64_t workers) noexcept;
  void link(Transfer& transfer) noexcept;
  void unlink(Transfer& transfer) noexcept;

  [[nodiscard]] std::vector<std::shared_ptr<Transfer>> live() noexcept;
  void stop(Transfer& transfer, const std::string& why) noexcept;
  void complete(Transfer& transfer) noexcept;  // once it is unlinked
  void end_if_done() noexcept;
  void give_up() noexcept;
  void wake_all() noexcept;

  const CrewOptions options_;
  const std::shared_ptr<const std::string> engine_reason_;
  os::System& system_;
  const std::shared_ptr<Ledger> ledger_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Transfer>> queue_;
  std::vector<std::shared_ptr<Transfer>> waiting_;  // for a GPU, not queued yet
  Transfer* live_ = nullptr;                        // the newest that has not ended; a list
  std::vector<std::unique_ptr<Worker>> workers_;    // fixed once started
  std::size_t started_ = 0;                         // workers
  std::size_t left_ = 0;                            // workers that have ended
  std::condition_variable worker_left_;
  std::atomic<std::uint64_t> cancellations_{0};
  std::atomic<bool> finishing_{false};
  std::atomic<bool> closing_{false};
  std::atomic<bool> fenced_{false};
  std::mutex fences_mutex_;  // held by the worker that asks the GPUs
  std::unique_ptr<memory::EndOfRegions> end_of_regions_;
  std::shared_ptr<Crew> self_;  // while the workers keep the crew

  // Of a finishing crew: how much has moved, and since when that is unchanged.
  std::uint64_t progress_ = 0;
  Clock::time_point progress_seen_;
};

}  // namespace tensorferry::handle
