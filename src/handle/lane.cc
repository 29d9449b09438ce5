#include "handle/lane.h"

#include <algorithm>
#include <utility>

#include "handle/crew.h"

namespace tensorferry::handle {

namespace {

// The keeper watches a lane for so many rounds after the last call of watch().
constexpr unsigned watch_rounds = 64;

}  // namespace

Lane::Lane(Crew& crew, const MoverOptions& options, std::unique_ptr<engines::Engine> engine,
           ProcessShare share)
    : crew_(crew),
      share_(std::move(share)),
      mover_(options, std::move(engine), *crew.ledger(), crew.system(), crew.background()) {
  mover_.attach();
}

Lane::~Lane() { mover_.detach(); }

bool Lane::take(const std::shared_ptr<Transfer>& transfer) {
  const std::uint64_t blocks = transfer->blocks();
  Lock lock(mutex_);
  if (mover_.flights_left() < blocks) return false;
  const auto needs_slots = [](const Run& run) { return run.plan.needs_slots(); };
  if (std::ranges::any_of(transfer->runs, needs_slots) && !may_use_slots(blocks)) return false;
  if (!crew_.lane_takes()) return false;
  transfer->lane = this;
  transfer->set_on_lane(true);
  for (std::uint64_t i = 0; i < blocks; ++i) {
    Claim claim;
    transfer->claim(transfer, transfer->legs.front(), claim);
    mover_.take_up(std::move(claim));
  }
  mover_.submit_ready();
  note_use();
  if (!mover_.failed().empty() || !mover_.ended().empty()) report(lock);
  return true;
}

void Lane::note_use() {
  const std::uint64_t bytes = mover_.take_moved_bytes();
  if (!crew_.use_is_asked()) return;
  if (const bool busy = mover_.in_flight(); busy != std::exchange(busy_, busy)) {
    busy ? crew_.mover_begins() : crew_.mover_rests();
  }
  if (bytes > 0) crew_.add_moved(bytes);
}

bool Lane::may_use_slots(std::uint64_t blocks) {
  if (!slot_share_) {
    const MoverOptions& options = crew_.options().lane_mover;
    auto share = share_.try_more({.slot_bytes = options.slots * options.slot_block_bytes});
    if (!share) return false;
    slot_share_.emplace(std::move(*share));
  }
  return mover_.has_slots(blocks);
}

engines::Engine::Nanoseconds Lane::limit_until(std::optional<Clock::time_point> deadline) const {
  const auto limit = mover_.wait_limit();
  if (!deadline) return limit;
  return std::clamp<engines::Engine::Nanoseconds>(*deadline - Clock::now(),
                                                  engines::Engine::Nanoseconds::zero(), limit);
}

void Lane::wait_until(Transfer& transfer, std::optional<Clock::time_point> deadline) {
  while (transfer.on_lane()) {
    if (deadline && Clock::now() >= *deadline) return;
    Lock lock(mutex_);
    if (!transfer.on_lane()) return;  // somebody else has ended it before the lock was free
    if (attended_) {
      follow(lock, deadline);
    } else {
      attend(lock, limit_until(deadline));
    }
  }
}

void Lane::follow(Lock& lock, std::optional<Clock::time_point> deadline) {
  ++followers_;
  if (deadline) {
    changed_.wait_until(lock, *deadline);
  } else {
    changed_.wait(lock);
  }
  --followers_;
}

void Lane::look() {
  Lock lock(mutex_);
  if (attended_ || mover_.idle()) return;
  attend(lock, engines::Engine::Nanoseconds::zero());
}

void Lane::attend(Lock& lock, engines::Engine::Nanoseconds limit) {
  attended_ = true;
  lock.unlock();
  mover_.wait(limit);
  lock.lock();
  mover_.judge_waited();
  mover_.revive();
  mover_.submit_ready();
  mover_.unload();
  note_use();
  attended_ = false;
  report(lock);
}

void Lane::report(Lock& lock) {
  if (mover_.ended().size() == 1 && mover_.failed().empty()) {
    report_one(lock);
    return;
  }
  OneOrMany<std::shared_ptr<Transfer>> ended;
  for (auto& transfer : mover_.ended()) {
    transfer->set_on_lane(false);
    ended.push_back(std::move(transfer));
  }
  mover_.ended().clear();
  Mover::Transfers failed;
  if (!mover_.failed().empty()) failed.swap(mover_.failed());
  const bool others_wait = followers_ > 0;
  lock.unlock();
  for (const auto& transfer : failed) Crew::drop(*transfer);
  for (auto& transfer : ended) {
    Crew::blocks_finished(transfer);
    transfer.reset();
    crew_.lane_gave_back();
  }
  if (others_wait) changed_.notify_all();
}

// The usual case, without any list.
void Lane::report_one(Lock& lock) {
  std::shared_ptr<Transfer> ended = std::move(mover_.ended().front());
  mover_.ended().clear();
  ended->set_on_lane(false);
  const bool others_wait = followers_ > 0;
  lock.unlock();
  Crew::blocks_finished(ended);
  ended.reset();
  crew_.lane_gave_back();
  if (others_wait) changed_.notify_all();
}

void Lane::end_stopping() {
  Lock lock(mutex_);
  mover_.end_stopping();
  note_use();
  report(lock);
}

std::vector<std::shared_ptr<Transfer>> Lane::transfers() {
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<Transfer>> found;
  mover_.for_each_flight([&](const std::shared_ptr<Transfer>& transfer) {
    if (std::ranges::find(found, transfer) == found.end()) found.push_back(transfer);
  });
  return found;
}

void Lane::watch() {
  if (watch_rounds_.exchange(watch_rounds) == 0) crew_.wake_keeper();
}

int Lane::watched_fd() {
  unsigned rounds = watch_rounds_.load();
  if (rounds == 0) return -1;
  watch_rounds_.compare_exchange_strong(rounds, rounds - 1);
  const Lock lock(mutex_);
  if (ready_fd_ < 0) ready_fd_ = mover_.engine().ready_fd();
  return ready_fd_;
}

}  // namespace tensorferry::handle
