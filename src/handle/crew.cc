#include "handle/crew.h"

#include <algorithm>
#include <string>
#include <utility>

#include "handle/worker.h"

namespace tensorferry::handle {

Crew::Crew(const CrewOptions& options, std::string engine_reason, os::System& system,
           std::shared_ptr<Ledger> ledger)
    : options_(options),
      engine_reason_(std::make_shared<const std::string>(std::move(engine_reason))),
      system_(system),
      ledger_(std::move(ledger)) {}

Result<std::shared_ptr<Crew>> Crew::start(const CrewOptions& options, std::string engine_reason,
                                          const OpenEngine& open_engine, os::System& system,
                                          std::shared_ptr<Ledger> ledger) {
  std::shared_ptr<Crew> crew(
      new Crew(options, std::move(engine_reason), system, std::move(ledger)));
  for (unsigned i = 0; i < options.workers; ++i) {
    auto engine = open_engine(options.engine, options.queue_depth, system);
    if (!engine.ok()) return engine.error();
    crew->workers_.push_back(std::make_unique<Worker>(*crew, std::move(engine.value())));
  }
  for (const auto& worker : crew->workers_) {
    if (Status started = worker->start(); !started.ok()) return started.error();
    ++crew->started_;
  }
  crew->end_of_regions_ =
      std::make_unique<memory::EndOfRegions>([raw = crew.get()] { raw->wake_all(); });
  return crew;
}

Crew::~Crew() {
  finish(OpenReads::cancel);
  (void)wait_for_end(std::nullopt);
}

// --- The end ---------------------------------------------------------------------------------

void Crew::finish(OpenReads reads) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!finishing_) progress_seen_ = Clock::now();
    finishing_ = true;
  }
  for (const auto& transfer : live()) {
    if (transfer->stopping()) {
      drop(*transfer);  // the thread that cancels it may be late
    } else if (reads == OpenReads::cancel && transfer->direction() == Direction::read) {
      stop(*transfer, "the handle was closed");
    }
  }
  end_if_done();
  wake_all();
}

bool Crew::wait_for_end(std::optional<Clock::time_point> deadline) noexcept {
  const auto is_this_thread = [](const auto& worker) { return worker->is_this_thread(); };
  std::unique_lock lock(mutex_);
  const auto all_left = [this] { return left_ == started_; };
  if (!all_left() && std::ranges::any_of(workers_, is_this_thread)) {
    self_ = shared_from_this();
    for (const auto& worker : workers_) worker->detach();
    return true;
  }
  if (!deadline) {
    worker_left_.wait(lock, all_left);
  } else if (!worker_left_.wait_until(lock, *deadline, all_left)) {
    return false;
  }
  for (const auto& worker : workers_) worker->join();
  end_of_regions_.reset();
  return true;
}

std::shared_ptr<Crew> Crew::leave() noexcept {
  std::shared_ptr<Crew> self;
  {
    const std::lock_guard lock(mutex_);
    ++left_;
    worker_left_.notify_all();
    if (left_ == started_) self = std::move(self_);
  }
  if (self != nullptr) ledger_->report_lost();  // the handle did not wait for this
  return self;
}

void Crew::end_if_done() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!finishing_ || live_ != nullptr) return;
    closing_ = true;
  }
  wake_all();
}

void Crew::look_after_end() noexcept {
  if (!finishing_ || closing_) return;
  {
    const std::lock_guard lock(mutex_);
    const std::uint64_t progress = ledger_->value(&Stats::written_bytes) +
                                   ledger_->value(&Stats::read_bytes) +
                                   ledger_->value(&Stats::operations);
    const Clock::time_point now = Clock::now();
    if (std::exchange(progress_, progress) != progress) progress_seen_ = now;
    if (now - progress_seen_ < options_.close_limit) return;
    progress_seen_ = now;
  }
  give_up();
}

// Leaves out syncs: the kernel cannot take back one that it has begun.
void Crew::give_up() noexcept {
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(options_.close_limit);
  const std::string why = "its handle was closed and nothing moved for " +
                          std::to_string(limit.count()) + " ms, so the operation was given up";
  for (const auto& transfer : live()) {
    if (transfer->stopping() || transfer->syncing()) continue;
    if (transfer->direction() == Direction::write) transfer->give_up(why);
    stop(*transfer, why);
  }
}

void Crew::cancel_all() noexcept {
  for (const auto& transfer : live()) stop(*transfer, "cancelled by the caller");
}

void Crew::stop(Transfer& transfer, const std::string& why) noexcept {
  transfer.fail_cancelled(why);
  drop(transfer);
}

std::vector<std::shared_ptr<Transfer>> Crew::live() noexcept {
  std::vector<std::shared_ptr<Transfer>> all;
  const std::lock_guard lock(mutex_);
  for (Transfer* one = live_; one != nullptr; one = one->live_after) {
    all.push_back(one->shared_from_this());
  }
  std::ranges::reverse(all);  // oldest first, as in the queue
  return all;
}

void Crew::link(Transfer& transfer) noexcept {
  transfer.live_after = live_;
  if (live_ != nullptr) live_->live_before = &transfer;
  live_ = &transfer;
}

void Crew::unlink(Transfer& transfer) noexcept {
  (transfer.live_before != nullptr ? transfer.live_before->live_after : live_) =
      transfer.live_after;
  if (transfer.live_after != nullptr) transfer.live_after->live_before = transfer.live_before;
}

// Tells the user last: a callback may destroy the handle.
void Crew::complete(Transfer& transfer) noexcept {
  if (finishing_) end_if_done();
  transfer.complete();
}

// --- The queue -------------------------------------------------------------------------------

double Crew::cpu_seconds() {
  const std::lock_guard lock(mutex_);
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
  bool refused = false;
  {
    const std::lock_guard lock(mutex_);
    refused = finishing_;
    if (!refused && blocks > 0) {
      if (transfer->fences.empty()) {
        push(transfer, blocks);
      } else {
        waiting_.push_back(transfer);
        fenced_ = true;
        wake(1);
      }
    }
    if (!refused) link(*transfer);
  }
  if (refused) {
    transfer->fail_cancelled("the handle was closed");
    transfer->complete();
  } else if (blocks == 0) {
    blocks_finished(transfer);
  }
}

void Crew::push(const std::shared_ptr<Transfer>& transfer, std::uint64_t claims) {
  queue_.push_back(transfer);
  wake(claims);
}

void Crew::wake(std::uint64_t workers) noexcept {
  for (const auto& worker : workers_) {
    if (workers == 0) break;
    if (std::exchange(worker->asleep, false)) {
      worker->wake();
      --workers;
    }
  }
}

// Asks without the lock: the driver may be slow, and others must be able to queue.
void Crew::ask_fences() {
  if (!fenced()) return;
  const std::unique_lock asking(fences_mutex_, std::try_to_lock);
  if (!asking.owns_lock()) return;
  std::vector<std::pair<std::shared_ptr<Transfer>, std::vector<std::shared_ptr<os::GpuFence>>>>
      asked;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& transfer : waiting_) asked.emplace_back(transfer, transfer->fences);
  }
  std::erase_if(asked, [](const auto& one) {
    return !std::ranges::all_of(one.second, [](const auto& fence) { return fence->passed(); });
  });
  const std::lock_guard lock(mutex_);
  for (const auto& [transfer, fences] : asked) {
    if (std::erase(waiting_, transfer) > 0) push(transfer, workers_.size());
  }
  fenced_ = !waiting_.empty();
}

std::size_t Crew::claim(Worker& worker, std::span<Claim> out) {
  const std::lock_guard lock(mutex_);
  worker.asleep = false;
  std::size_t count = 0;
  std::size_t looked_at = 0;
  while (count < out.size() && looked_at < queue_.size()) {
    std::shared_ptr<Transfer> transfer = std::move(queue_.front());
    queue_.pop_front();
    const std::size_t turn_end = std::min(out.size(), count + transfer->turn_left);
    const std::size_t before = count;
    const auto starved = [&] {
      const Run* run = worker.starving() ? transfer->next_through_slot() : nullptr;
      return run != nullptr && !worker.has_slots_for(*run);
    };
    while (count < turn_end && transfer->claimable() && !starved()) {
      transfer->claim(transfer, out[count++]);
    }
    const bool took = count != before;
    looked_at = took ? 0 : looked_at + 1;
    transfer->turn_left -= count - before;
    // A stopping one stays until drop() takes it.
    const bool stays = transfer->claimable() || transfer->stopping();
    if (stays && took && count == out.size() && transfer->turn_left > 0) {
      // The next worker with room goes on with this turn: later operations must not overtake it.
      queue_.push_front(std::move(transfer));
      break;
    }
    if (transfer->turn_left == 0) transfer->turn_left = turn_blocks;
    if (stays) queue_.push_back(std::move(transfer));
  }
  worker.asleep = count < out.size();
  return count;
}

void Crew::blocks_finished(const std::shared_ptr<Transfer>& transfer) noexcept {
  // The transfer is in no queue and has nothing in flight.
  transfer->prepare_steps();
  {
    const std::lock_guard lock(mutex_);
    const std::uint64_t steps = transfer->stopping() ? 0 : transfer->start_steps();
    if (steps > 0) {
      push(transfer, steps);
      return;
    }
    unlink(*transfer);
  }
  complete(*transfer);
}

void Crew::drop(Transfer& transfer) noexcept {
  std::shared_ptr<Transfer> queued;  // outlives the lock
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    const auto is_it = [&](const auto& other) { return other.get() == &transfer; };
    if (const auto found = std::ranges::find_if(queue_, is_it); found != queue_.end()) {
      queued = std::move(*found);
      queue_.erase(found);
    } else if (const auto waits = std::ranges::find_if(waiting_, is_it); waits != waiting_.end()) {
      queued = std::move(*waits);
      waiting_.erase(waits);
    }
    const std::uint64_t abandoned = transfer.abandon_unclaimed();
    last = abandoned > 0 && transfer.finish_blocks(abandoned);
    if (last) unlink(transfer);
  }
  if (last) {
    complete(transfer);
  } else {
    ++cancellations_;
    wake_all();
  }
}

}  // namespace tensorferry::handle
