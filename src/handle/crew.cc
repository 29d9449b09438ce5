#include "handle/crew.h"

#include <algorithm>
#include <utility>

#include "handle/worker.h"

namespace tensorferry::handle {

Crew::Crew(const CrewOptions& options, os::System& system, std::shared_ptr<Ledger> ledger)
    : options_(options), system_(system), ledger_(std::move(ledger)) {}

Result<std::shared_ptr<Crew>> Crew::start(const CrewOptions& options, const OpenEngine& open_engine,
                                          os::System& system, std::shared_ptr<Ledger> ledger) {
  std::shared_ptr<Crew> crew(new Crew(options, system, std::move(ledger)));
  for (unsigned i = 0; i < options.workers; ++i) {
    auto engine = open_engine(options.engine, options.queue_depth, system);
    if (!engine.ok()) return engine.error();
    crew->workers_.push_back(std::make_unique<Worker>(*crew, std::move(engine.value())));
  }
  for (const auto& worker : crew->workers_) {
    if (Status started = worker->start(); !started.ok()) return started.error();
  }
  crew->end_of_regions_ =
      std::make_unique<memory::EndOfRegions>([raw = crew.get()] { raw->wake_all(); });
  return crew;
}

Crew::~Crew() { close(); }

void Crew::close() noexcept {
  if (closing_) return;
  end_of_regions_.reset();
  closing_ = true;
  stop_queued();
  ++cancellations_;
  wake_all();
  for (const auto& worker : workers_) worker->join();
  stop_queued();  // what a worker queued for its sync phase at the last moment
}

void Crew::stop_queued() noexcept {
  std::deque<std::shared_ptr<Transfer>> left;
  {
    const std::lock_guard lock(mutex_);
    left = queue_;
  }
  for (const auto& transfer : left) stop(*transfer);
}

void Crew::stop(Transfer& transfer) noexcept {
  transfer.fail_cancelled("the handle was closed");
  drop(transfer);
}

double Crew::cpu_seconds() {
  double sum = 0;
  for (const auto& worker : workers_) sum += worker->cpu_seconds();
  return sum;
}

void Crew::wake_all() noexcept {
  for (const auto& worker : workers_) worker->wake();
}

void Crew::enqueue(const std::shared_ptr<Transfer>& transfer) {
  std::uint64_t blocks = 0;
  for (const Run& run : transfer->runs) blocks += run.plan.block_count();
  if (blocks == 0) {
    blocks_finished(transfer);
  } else {
    const std::lock_guard lock(mutex_);
    push(transfer, blocks);
  }
}

void Crew::push(const std::shared_ptr<Transfer>& transfer, std::uint64_t claims) {
  queue_.push_back(transfer);
  for (const auto& worker : workers_) {
    if (claims == 0) break;
    if (std::exchange(worker->asleep, false)) {
      worker->wake();
      --claims;
    }
  }
}

std::size_t Crew::claim(Worker& worker, std::span<Claim> out) {
  const std::lock_guard lock(mutex_);
  worker.asleep = false;
  std::size_t count = 0;
  std::size_t looked_at = 0;
  bool any_fenced = false;
  while (count < out.size() && looked_at < queue_.size()) {
    std::shared_ptr<Transfer> transfer = std::move(queue_.front());
    queue_.pop_front();
    // Sync steps come one after the other; the next is queued when this one has ended.
    const bool syncing = transfer->syncing();
    const std::size_t turn_end = std::min(out.size(), count + (syncing ? 1 : transfer->turn_left));
    const std::size_t before = count;
    const bool fenced = transfer->fenced();
    any_fenced |= fenced;
    const auto starved = [&] {
      const Run* run = worker.starving() ? transfer->next_through_slot() : nullptr;
      return run != nullptr && !worker.has_slots_for(*run);
    };
    while (!fenced && count < turn_end && transfer->claimable() && !starved()) {
      transfer->claim(transfer, out[count++]);
    }
    const bool took = count != before;
    looked_at = took ? 0 : looked_at + 1;
    if (!syncing) transfer->turn_left -= count - before;
    // One that is being stopped stays until drop() takes it.
    const bool stays = syncing ? !took : transfer->claimable() || transfer->stopping();
    if (stays && took && count == out.size() && transfer->turn_left > 0) {
      // Whoever has room next goes on with the turn: what came later shall not overtake it.
      queue_.push_front(std::move(transfer));
      break;
    }
    if (transfer->turn_left == 0) transfer->turn_left = turn_blocks;
    if (stays) queue_.push_back(std::move(transfer));
  }
  worker.asleep = count < out.size();
  if (worker.asleep) fenced_.store(any_fenced, std::memory_order_relaxed);
  return count;
}

void Crew::blocks_finished(const std::shared_ptr<Transfer>& transfer) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!transfer->stopping() && transfer->needs_sync()) {
      transfer->start_sync_phase();
      push(transfer, 1);
      return;
    }
  }
  transfer->complete();
}

void Crew::step_finished(const std::shared_ptr<Transfer>& transfer) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (transfer->claimable()) {
      push(transfer, 1);
      return;
    }
  }
  transfer->complete();
}

void Crew::drop(Transfer& transfer) noexcept {
  std::shared_ptr<Transfer> queued;
  std::uint64_t abandoned = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(queue_.begin(), queue_.end(),
                                    [&](const auto& other) { return other.get() == &transfer; });
    if (found != queue_.end()) {
      queued = std::move(*found);
      queue_.erase(found);
    }
    abandoned = transfer.abandon_unclaimed();
  }
  // In the sync phase there are no blocks left; what was queued is the next step.
  const bool last =
      abandoned > 0 ? transfer.finish_blocks(abandoned) : queued != nullptr && transfer.syncing();
  if (last) {
    transfer.complete();
  } else {
    ++cancellations_;
    wake_all();
  }
}

}  // namespace tensorferry::handle
