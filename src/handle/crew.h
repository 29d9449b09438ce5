// The workers of one engine and the queue they share. Operations are queued here; workers claim
// blocks of them in turn, so a small operation does not wait for a large one to end.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
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

// A worker looks at up to this many completions before it refills the queue. As many flights and
// slots beyond the depth are being emptied meanwhile.
inline constexpr std::size_t reap_batch = 16;

struct CrewOptions {
  EngineKind engine = EngineKind::threads;
  unsigned queue_depth = 1;
  unsigned workers = 1;
  Submit submit = Submit::batch;
  Overlap overlap = Overlap::on;
  std::size_t slot_block_bytes = 0;  // size of one slot
  unsigned slots_per_worker = 1;
  // How many bytes may be under way in the slots of a worker at a time, for memory of the CPU. One
  // block always may.
  std::size_t slot_bytes_in_flight = 0;
};

class Crew {
 public:
  // Opens an engine for each worker and starts them. The Error is the engine's.
  [[nodiscard]] static Result<std::shared_ptr<Crew>> start(const CrewOptions& options,
                                                           const OpenEngine& open_engine,
                                                           os::System& system,
                                                           std::shared_ptr<Ledger> ledger);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // Cancels every operation, waits for what is in flight, ends the workers. Nothing may be queued
  // at the same time or later; drop() may be called.
  void close() noexcept;

  // Keeps the crew, which is `self`, for ever and as it is: for a forked child.
  void abandon(std::shared_ptr<Crew> self) noexcept { self_ = std::move(self); }

  [[nodiscard]] const CrewOptions& options() const noexcept { return options_; }
  [[nodiscard]] double cpu_seconds();

  // Queues an operation (or completes it at once if there is nothing to do).
  void enqueue(const std::shared_ptr<Transfer>& transfer);

  // Takes back what of a stopping operation was not claimed. It is completed here, or by the worker
  // that finishes the last of its blocks in flight.
  void drop(Transfer& transfer) noexcept;

  // Ends an operation because the handle closes.
  void stop(Transfer& transfer) noexcept;

  // --- For workers ---
  // Claims up to out.size() blocks. With none to be had, the worker counts as asleep from then on
  // and will be woken.
  [[nodiscard]] std::size_t claim(Worker& worker, std::span<Claim> out);
  // The last block of a transfer has ended: goes on to make it durable, or completes it.
  void blocks_finished(const std::shared_ptr<Transfer>& transfer) noexcept;
  void step_finished(const std::shared_ptr<Transfer>& transfer) noexcept;
  // Grows whenever operations in flight should be cancelled.
  [[nodiscard]] std::uint64_t cancellations() const noexcept { return cancellations_.load(); }
  [[nodiscard]] bool closing() const noexcept { return closing_.load(); }
  // Whether something is queued that waits for a GPU: that is to be asked again and again.
  [[nodiscard]] bool fenced() const noexcept { return fenced_.load(std::memory_order_relaxed); }
  [[nodiscard]] Ledger& ledger() noexcept { return *ledger_; }
  [[nodiscard]] os::System& system() noexcept { return system_; }

 private:
  Crew(const CrewOptions& options, os::System& system, std::shared_ptr<Ledger> ledger);
  // With the lock held.
  void push(const std::shared_ptr<Transfer>& transfer, std::uint64_t claims);
  void stop_queued() noexcept;
  void wake_all() noexcept;

  const CrewOptions options_;
  os::System& system_;
  const std::shared_ptr<Ledger> ledger_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Transfer>> queue_;
  std::vector<std::unique_ptr<Worker>> workers_;  // fixed once started
  std::atomic<std::uint64_t> cancellations_{0};
  std::atomic<bool> closing_{false};
  std::atomic<bool> fenced_{false};
  std::unique_ptr<memory::EndOfRegions> end_of_regions_;
  std::shared_ptr<Crew> self_;
};

}  // namespace tensorferry::handle
