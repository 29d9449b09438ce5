#include "handle/crew.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "handle/worker.h"

namespace tensorferry::handle {

namespace {

// An operation of more blocks is not small: submitting it would take its caller long.
constexpr std::uint64_t lane_blocks_max = 16;

// The number of a thread that uses lanes: the lowest that no living thread has, so that neighbours
// get different lanes, and threads that come and go get the same. Beyond 64 threads they come in
// turn.
class ThreadNumber {
 public:
  ThreadNumber() noexcept {
    std::uint64_t before = taken.load(std::memory_order_relaxed);
    do {
      value_ = static_cast<std::size_t>(std::countr_one(before));
      if (value_ == lanes_max) {
        value_ += beyond.fetch_add(1, std::memory_order_relaxed);
        return;
      }
    } while (!taken.compare_exchange_weak(before, before | bit()));
  }
  ~ThreadNumber() {
    if (value_ < lanes_max) taken.fetch_and(~bit());
  }
  ThreadNumber(const ThreadNumber&) = delete;
  ThreadNumber& operator=(const ThreadNumber&) = delete;

  [[nodiscard]] std::size_t value() const noexcept { return value_; }

 private:
  [[nodiscard]] std::uint64_t bit() const noexcept { return std::uint64_t{1} << value_; }

  static inline std::atomic<std::uint64_t> taken{0};
  static inline std::atomic<std::size_t> beyond{0};
  std::size_t value_ = 0;
};
static_assert(lanes_max == 64);  // a bit for each

std::size_t number_of_this_thread() noexcept {
  thread_local const ThreadNumber own;
  return own.value();
}

// A reference to a leg that keeps its transfer.
std::shared_ptr<Leg> shared(Leg& leg) { return {leg.transfer->shared_from_this(), &leg}; }

// Keeps the crews of a transfer while somebody who belongs to one of them uses the others.
std::vector<std::shared_ptr<Crew>> all_kept(const Transfer& transfer) {
  std::vector<std::shared_ptr<Crew>> crews;
  for (const Leg& leg : transfer.legs) crews.push_back(leg.owner.lock());
  return crews;
}

inline std::vector<std::shared_ptr<Crew>> others_kept(const Transfer& transfer) {
  if (transfer.legs.size() < 2) return {};
  return all_kept(transfer);
}

}  // namespace

Crew::Crew(const CrewOptions& options, std::string engine_reason, OpenEngine open_engine,
           os::System& system, std::shared_ptr<Ledger> ledger, ProcessShare share)
    : options_(options),
      share_(std::move(share)),
      engine_reason_(std::make_shared<const std::string>(std::move(engine_reason))),
      lane_reason_(options.engine == EngineKind::libaio
                       ? engine_reason_
                       : std::make_shared<const std::string>(
                             "auto: small operations go by libaio: any thread can wait for them")),
      open_engine_(std::move(open_engine)),
      system_(system),
      ledger_(std::move(ledger)),
      queue_(*options.governor, options.rate) {}

Result<std::shared_ptr<Crew>> Crew::start(const CrewOptions& options, std::string engine_reason,
                                          OpenEngine open_engine, os::System& system,
                                          std::shared_ptr<Ledger> ledger, ProcessShare share) {
  std::shared_ptr<Crew> crew(new Crew(options, std::move(engine_reason), std::move(open_engine),
                                      system, std::move(ledger), std::move(share)));
  for (unsigned i = 0; i < options.workers; ++i) {
    auto engine = crew->open_engine_(options.engine, options.mover.queue_depth, system);
    if (!engine.ok()) return engine.error();
    crew->workers_.push_back(std::make_unique<Worker>(*crew, std::move(engine.value())));
  }
  return crew;
}

Status Crew::start_workers() {
  if (workers_started_.load(std::memory_order_acquire)) return Nothing{};
  const std::lock_guard lock(mutex_);
  if (workers_started_) return Nothing{};
  Status status = Nothing{};
  std::size_t count = 0;
  for (const auto& worker : workers_) {
    status = worker->start();
    if (!status.ok()) break;
    ++count;
  }
  if (count == 0) return status;
  if (count < workers_.size()) {
    ledger_->note_fallback(std::string(status.error().what()) + "; fewer workers move the bytes");
  }
  started_ += count;
  end_of_regions_ = std::make_unique<memory::EndOfRegions>([this] { wake_all(); });
  workers_started_.store(true, std::memory_order_release);
  return Nothing{};
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
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return all_left(); };
  if (!deadline) {
    thread_left_.wait(lock, ended);
  } else if (!thread_left_.wait_until(lock, *deadline, ended)) {
    return false;
  }
  for (const auto& worker : workers_) worker->join();
  keeper_.join();
  end_of_regions_.reset();
  return true;
}

bool Crew::is_this_thread() noexcept {
  const std::lock_guard lock(mutex_);
  return keeper_.is_this_thread() ||
         std::ranges::any_of(workers_, [](const auto& one) { return one->is_this_thread(); });
}

void Crew::end_alone() noexcept {
  const std::lock_guard lock(mutex_);
  if (all_left()) return;
  self_ = shared_from_this();
  for (const auto& worker : workers_) worker->detach();
  keeper_.detach();
}

std::shared_ptr<Crew> Crew::leave() noexcept {
  std::shared_ptr<Crew> self;
  {
    const std::lock_guard lock(mutex_);
    ++left_;
    thread_left_.notify_all();
    if (left_ == started_) self = std::move(self_);
  }
  if (self != nullptr) ledger_->report_lost();  // the handle did not wait for this
  return self;
}

void Crew::end_if_done() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!finishing_ || live_ != nullptr || on_lanes_ > 0) return;
    closing_ = true;
    thread_left_.notify_all();
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
  {
    const std::lock_guard lock(mutex_);
    for (Leg* one = live_; one != nullptr; one = one->live_after) {
      all.push_back(one->transfer->shared_from_this());
    }
  }
  std::ranges::reverse(all);  // oldest first, as in the queue
  for_each_lane([&](Lane& lane) {
    for (auto& transfer : lane.transfers()) all.push_back(std::move(transfer));
  });
  return all;
}

void Crew::link(Leg& leg) noexcept {
  leg.linked = true;
  leg.live_after = live_;
  if (live_ != nullptr) live_->live_before = &leg;
  live_ = &leg;
}

void Crew::unlink(Leg& leg) noexcept {
  if (!std::exchange(leg.linked, false)) return;
  (leg.live_before != nullptr ? leg.live_before->live_after : live_) = leg.live_after;
  if (leg.live_after != nullptr) leg.live_after->live_before = leg.live_before;
  leg.live_before = nullptr;
  leg.live_after = nullptr;
}

// Tells the user last: a callback may destroy the handle.
void Crew::complete(Transfer& transfer) noexcept {
  const auto kept = others_kept(transfer);
  for (Leg& leg : transfer.legs) {
    if (leg.linked) {  // nobody else changes it any more
      const std::lock_guard lock(leg.crew->mutex_);
      leg.crew->unlink(leg);
    }
    if (leg.crew->finishing_) leg.crew->end_if_done();
  }
  transfer.complete();
}

// --- The queue -------------------------------------------------------------------------------

double Crew::cpu_seconds() {
  const std::lock_guard lock(mutex_);
  double sum = 0;
  for (const auto& worker : workers_) sum += worker->cpu_seconds();
  return sum;
}

Crew::Use Crew::use() noexcept {
  use_is_asked_.store(true, std::memory_order_relaxed);
  const std::lock_guard lock(use_mutex_);
  Clock::duration busy = busy_;
  if (busy_movers_ > 0) busy += Clock::now() - busy_since_;
  return {moved_bytes_.load(std::memory_order_relaxed),
          std::chrono::duration<double>(busy).count()};
}

void Crew::mover_begins() noexcept {
  const std::lock_guard lock(use_mutex_);
  if (busy_movers_++ == 0) busy_since_ = Clock::now();
}

void Crew::mover_rests() noexcept {
  const std::lock_guard lock(use_mutex_);
  if (--busy_movers_ == 0) busy_ += Clock::now() - busy_since_;
}

void Crew::wake_all() noexcept {
  if (workers_started_) {
    for (const auto& worker : workers_) worker->wake();
  }
  if (keeper_started_) keeper_.wake();
}

void Crew::enqueue(const std::shared_ptr<Transfer>& transfer) {
  if (!transfer->legs.empty()) {
    const Crew& first = *transfer->legs.front().crew;
    transfer->engine_name = to_string(first.options_.engine);
    transfer->engine_reason = first.engine_reason_;
  }
  const bool empty = transfer->runs.empty();  // before a worker may complete it
  bool refused = false;
  for (Leg& leg : transfer->legs) refused |= !leg.crew->take_leg(leg);
  if (refused) transfer->fail_cancelled("the handle was closed");
  if (empty) {
    blocks_finished(transfer);
  } else if (refused) {
    drop(*transfer);
  }
}

bool Crew::take_leg(Leg& leg) {
  Sleepers awake;
  {
    const std::lock_guard lock(mutex_);
    if (finishing_) return false;
    // Another leg may have failed already, and then abandoned this one: nobody would unlink it.
    if (leg.unclaimed == 0 && leg.transfer->stopping()) return true;
    link(leg);
    if (leg.unclaimed == 0) return true;
    if (leg.transfer->fences.empty()) {
      queue_.push(shared(leg));
      awake = sleepers(leg.unclaimed);
    } else {
      waiting_.push_back(shared(leg));
      fenced_ = true;
      awake = sleepers(1);
    }
  }
  wake(awake);
  return true;
}

Crew::Sleepers Crew::sleepers(std::uint64_t count) noexcept {
  Sleepers found;
  for (const auto& worker : workers_) {
    if (found.size() == count) break;
    if (std::exchange(worker->asleep, false)) found.push_back(worker.get());
  }
  return found;
}

void Crew::wake(const Sleepers& sleepers) noexcept {
  for (Worker* worker : sleepers) worker->wake();
}

// Asks without the lock: the driver may be slow, and others must be able to queue.
void Crew::ask_fences() {
  if (!fenced()) return;
  const std::unique_lock asking(fences_mutex_, std::try_to_lock);
  if (!asking.owns_lock()) return;
  std::vector<std::pair<std::shared_ptr<Leg>, std::vector<std::shared_ptr<os::GpuFence>>>> asked;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& leg : waiting_) asked.emplace_back(leg, leg->transfer->fences);
  }
  std::erase_if(asked, [](const auto& one) {
    return !std::ranges::all_of(one.second, [](const auto& fence) { return fence->passed(); });
  });
  Sleepers awake;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [leg, fences] : asked) {
      if (std::erase(waiting_, leg) > 0) queue_.push(leg);
    }
    fenced_ = !waiting_.empty();
    if (!asked.empty()) awake = sleepers(workers_.size());
  }
  wake(awake);
}

std::size_t Crew::claim(Worker& worker, std::span<Claim> out) {
  const std::lock_guard lock(mutex_);
  worker.asleep = false;
  const std::size_t count = queue_.claim(worker, out, finishing_ ? Bounds::lifted : Bounds::kept);
  worker.asleep = count < out.size();
  return count;
}

void Crew::raise(Leg& leg) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (std::shared_ptr<Leg> queued = queue_.take_out(leg)) queue_.push(std::move(queued));
  }
  wake_all();  // blocks that wait for slots may get those for urgent ones
}

void Crew::blocks_finished(const std::shared_ptr<Transfer>& transfer) noexcept {
  // The transfer is in no queue and has nothing in flight.
  if (transfer->prepare_steps() == 0) {
    complete(*transfer);
    return;
  }
  std::vector<std::uint64_t> counts(transfer->legs.size());
  for (const SyncStep& step : transfer->steps) ++counts[step.leg];
  const auto kept = others_kept(*transfer);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) transfer->legs[i].crew->queue_steps(transfer->legs[i], counts[i]);
  }
}

void Crew::queue_steps(Leg& leg, std::uint64_t steps) noexcept {
  // A lane's operation has come without any worker. If none can start, nobody can sync.
  if (Status started = start_workers(); !started.ok()) leg.transfer->fail(started.error());
  bool stopping = false;
  Sleepers awake;
  {
    const std::lock_guard lock(mutex_);
    if (!leg.linked) link(leg);
    stopping = leg.transfer->stopping();
    if (!stopping) {
      leg.unclaimed = steps;
      queue_.push(shared(leg));
      awake = sleepers(steps);
    }
  }
  if (!stopping) {
    wake(awake);
  } else if (leg.transfer->finish_blocks(steps)) {
    complete(*leg.transfer);
  }
}

std::uint64_t Crew::abandon(Leg& leg) noexcept {
  std::shared_ptr<Leg> queued;  // outlives the lock
  const std::lock_guard lock(mutex_);
  queued = queue_.take_out(leg);
  const auto is_it = [&](const auto& other) { return other.get() == &leg; };
  if (const auto waits = std::ranges::find_if(waiting_, is_it); waits != waiting_.end()) {
    queued = std::move(*waits);
    waiting_.erase(waits);
  }
  return std::exchange(leg.unclaimed, 0);
}

void Crew::drop(Transfer& transfer) noexcept {
  const auto self = transfer.weak_from_this().lock();  // completing it may let go of the last one
  const auto kept = others_kept(transfer);
  bool last = false;
  for (Leg& leg : transfer.legs) {
    const std::uint64_t abandoned = leg.crew->abandon(leg);
    last |= abandoned > 0 && transfer.finish_blocks(abandoned);
  }
  if (last) {
    complete(transfer);
    return;
  }
  for (Leg& leg : transfer.legs) {
    ++leg.crew->cancellations_;
    leg.crew->wake_all();
  }
  if (transfer.on_lane()) transfer.lane->end_stopping();
}

// --- Lanes -----------------------------------------------------------------------------------

bool Crew::take_on_lane(const std::shared_ptr<Transfer>& transfer) {
  const auto needs_page_cache = [](const Run& run) { return run.plan.needs_buffered_descriptor(); };
  if (transfer->blocks() == 0 || transfer->blocks() > lane_blocks_max ||
      std::ranges::any_of(transfer->runs, needs_page_cache)) {
    return false;
  }
  Lane* const own = lane();
  if (own == nullptr) return false;
  if (!own->take(transfer)) return false;
  transfer->engine_name = to_string(EngineKind::libaio);
  transfer->engine_reason = lane_reason_;
  return true;
}

Lane* Crew::lane() noexcept {
  const std::size_t index = number_of_this_thread() % options_.lanes;
  Lane* const known = lanes_[index].load(std::memory_order_acquire);
  return known != nullptr ? known : open_lane(index);
}

Lane* Crew::open_lane(std::size_t index) noexcept {
  const std::lock_guard lock(mutex_);
  if (lanes_refused_ || finishing_) return nullptr;
  if (Lane* const known = lanes_[index].load(std::memory_order_acquire)) return known;
  auto share = share_.try_more({.engines = 1});
  auto keeper_share = share_.try_more({.threads = keeper_started_ ? 0U : 1U});
  if (!share || !keeper_share) return shared_lane(index);
  auto engine = open_engine_(EngineKind::libaio, options_.lane_mover.queue_depth, system_);
  Status opened = engine.ok() ? Status(Nothing{}) : Status(engine.error());
  if (opened.ok() && engine.value()->capabilities().service != engines::Service::any_thread) {
    lanes_refused_ = true;  // a test's engine
    return nullptr;
  }
  if (opened.ok() && !keeper_started_) opened = keeper_.start();
  if (!opened.ok()) {
    lanes_refused_ = true;
    ledger_->note_fallback(std::string(opened.error().what()) +
                           "; workers move small operations too, which takes longer");
    return nullptr;
  }
  if (!keeper_started_.exchange(true)) {
    ++started_;
    keeper_share_.emplace(std::move(*keeper_share));
  }
  open_lanes_.push_back(std::make_unique<Lane>(*this, options_.lane_mover,
                                               std::move(engine.value()), std::move(*share)));
  lanes_[index].store(open_lanes_.back().get(), std::memory_order_release);
  return open_lanes_.back().get();
}

Lane* Crew::shared_lane(std::size_t index) noexcept {
  if (!std::exchange(lane_shares_ended_, true)) {
    ledger_->note_fallback(
        "the process has all the threads or engines it may have: small operations of several "
        "threads go one way, or by the workers");
  }
  return open_lanes_.empty() ? nullptr : open_lanes_[index % open_lanes_.size()].get();
}

// Counts first and asks then: one who ends the crew in between has seen the count.
bool Crew::lane_takes() noexcept {
  on_lanes_.fetch_add(1);
  if (finishing_) {
    lane_gave_back();
    return false;
  }
  ledger_->add(&Stats::lane_operations);
  keeper_.rouse();
  return true;
}

void Crew::lane_gave_back() noexcept {
  if (on_lanes_.fetch_sub(1) == 1 && finishing_) end_if_done();
}

void Crew::look_at_lanes() noexcept {
  for_each_lane([](Lane& lane) { lane.look(); });
}

void Crew::add_watched(std::vector<pollfd>& fds) {
  for_each_lane([&](Lane& lane) {
    const int fd = lane.watched_fd();
    if (fd >= 0) fds.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  });
}

bool Crew::call_later(std::vector<std::function<void()>>& listeners) {
  return keeper_started_ && keeper_.call_later(listeners);
}

}  // namespace tensorferry::handle
