#include "handle/transfer.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "handle/crew.h"
#include "handle/governor.h"
#include "handle/lane.h"
#include "os/system.h"
#include "os/thread.h"

namespace tensorferry::handle {

namespace {

std::atomic<std::uint64_t> last_id{0};

}  // namespace

std::uint64_t next_operation_id() noexcept {
  return last_id.fetch_add(1, std::memory_order_relaxed) + 1;
}

Attempt first_attempt(Direction direction, const Block& block, std::uint32_t alignment) noexcept {
  using engines::RequestKind;
  return {
      .kind = direction == Direction::read ? RequestKind::read : RequestKind::write,
      .bytes = block.bytes,
      .needed = static_cast<std::uint32_t>(block.wanted_offset - block.offset) + block.wanted_bytes,
      .alignment = block.descriptor == Descriptor::direct ? alignment : 1};
}

Judgement judge_block(Attempt& attempt, const Block& block, files::OpenFile& file,
                      std::int32_t result) {
  const Judgement judgement = judge(attempt, result);
  if (judgement.verdict != Verdict::ended) return judgement;
  const Result<std::uint64_t> size = file.size();
  const bool longer = size.ok() && size.value() >= block.wanted_offset + block.wanted_bytes;
  return longer ? judge_false_end(attempt) : judgement;
}

Error transfer_error(const Attempt& attempt, const Block& block, files::OpenFile& file, int code) {
  std::string hint = hint_for(code);
  if (code == ENODATA) {
    const Result<std::uint64_t> size = file.size();
    const std::uint64_t seen = block.offset + std::max(attempt.done, attempt.reached);
    hint = "the file ends at offset " + std::to_string(size.ok() ? size.value() : seen) +
           ", before the last byte asked for";
  } else if (code == ENOSPC) {
    hint = "the file system is full: " + std::to_string(block.wanted_bytes) +
           " more bytes are needed here and " + std::to_string(file.free_bytes()) +
           " are free; free space, or write to another drive";
  }
  if (const auto own = engines::own_code(code)) {
    hint = own->text;
    code = own->error;
  }
  return Error({.operation = engines::verb(attempt.kind),
                .path = file.path(),
                .offset = block.wanted_offset,
                .length = block.wanted_bytes,
                .code = code,
                .hint = std::move(hint)});
}

Error sync_error(engines::RequestKind kind, const files::OpenFile& file,
                 const files::Directory* directory, int code) {
  std::string hint =
      "the written bytes may be lost, and a second sync would not notice; write them again";
  if (directory != nullptr) {
    hint =
        "the directory " + directory->path() +
        " could not be synced: the file may be lost, and a second sync would not notice; write it "
        "again";
  }
  return Error({.operation = engines::verb(kind),
                .path = file.path(),
                .code = without_second_meaning(code),
                .hint = std::move(hint)});
}

Transfer::Transfer(Direction direction, const char* verb, std::shared_ptr<Ledger> ledger)
    : direction_(direction),
      verb_(verb),
      ledger_(std::move(ledger)),
      id_(next_operation_id()),
      generation_(os::fork_generation()),
      queued_(Clock::now()) {}

Transfer::~Transfer() {
  if (generation_ != os::fork_generation()) return;
  ended_.~condition_variable();
  if (error_ && error_->code() != ECANCELED && !seen_) ledger_->note_lost(*error_);
}

void Transfer::count_blocks() {
  std::uint64_t blocks = 0;
  for (std::size_t i = runs.size(); i > 0; --i) {
    const Run& run = runs[i - 1];
    Leg& leg = legs[run.leg];
    leg.run = i - 1;  // in the end, the leg's first
    leg.unclaimed += run.plan.block_count();
    blocks += run.plan.block_count();
    asked_bytes_ += run.plan.kept_bytes();
  }
  unfinished_.store(blocks, std::memory_order_relaxed);
  if (!runs.empty()) {
    path_ = runs.front().file->shared_path();
    offset_ = runs.front().plan.offset();
  } else if (!steps.empty()) {
    path_ = steps.front().file->shared_path();
  }
}

const Run& Transfer::next_run(Leg& leg) noexcept {
  while (leg.block == runs[leg.run].plan.block_count()) {
    ++leg.run;
    leg.block = 0;
  }
  return runs[leg.run];
}

const Run* Transfer::next_through_slot(Leg& leg) noexcept {
  if (syncing_) return nullptr;
  const Run& run = next_run(leg);
  return run.plan.block(leg.block).memory == nullptr ? &run : nullptr;
}

void Transfer::claim(const std::shared_ptr<Transfer>& self, Leg& leg, Claim& out) {
  out.transfer = self;
  out.background_bytes = 0;
  --leg.unclaimed;
  if (syncing_) {
    out.run = nullptr;
    out.step = &steps[leg.step++];
    return;
  }
  out.run = &next_run(leg);
  out.step = nullptr;
  out.block = out.run->plan.block(leg.block++);
}

std::uint64_t Transfer::prepare_steps() noexcept {
  if (stopping()) return 0;
  if (syncing_) {
    if (std::exchange(directories_found_, true)) return 0;
    Result<std::vector<SyncStep>> found = directory_steps();
    if (!found.ok()) {
      fail(found.error());
      return 0;
    }
    steps = std::move(found.value());
  }
  if (steps.empty()) return 0;
  for (std::size_t i = steps.size(); i > 0; --i) legs[steps[i - 1].leg].step = i - 1;
  syncing_ = true;
  unfinished_.store(steps.size(), std::memory_order_relaxed);
  return steps.size();
}

Result<std::vector<SyncStep>> Transfer::directory_steps() const {
  std::vector<SyncStep> found;
  std::set<files::Identity> known;
  for (const SyncStep& step : steps) {
    if (step.kind != engines::RequestKind::sync_full) continue;
    auto directory = step.file->directory();
    if (!directory.ok()) return directory.error();
    if (directory.value() == nullptr) continue;
    if (!known.insert(directory.value()->identity()).second) continue;
    const int fd = directory.value()->fd();
    found.push_back({step.kind, fd, step.file, step.leg, std::move(directory.value())});
  }
  return found;
}

void Transfer::mark_started(Clock::time_point now) noexcept {
  if (started_.load(std::memory_order_relaxed) != 0) return;
  std::int64_t none = 0;
  started_.compare_exchange_strong(none, now.time_since_epoch().count(), std::memory_order_relaxed);
}

void Transfer::add_bytes(std::uint64_t bytes) noexcept {
  moved_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  ledger_->add_moved(direction_, bytes);
}

void Transfer::fail(Error error) noexcept {
  const std::lock_guard lock(mutex_);
  if (ending_) return;
  if (!error_) error_ = std::make_unique<const Error>(std::move(error));
  stopping_.store(true, std::memory_order_release);
}

void Transfer::give_up(const std::string& why) noexcept {
  Error error = cancelled(why);
  const std::lock_guard lock(mutex_);
  if (ending_ || error_) return;
  error_ = std::make_unique<const Error>(std::move(error));
  given_up_ = true;
  stopping_.store(true, std::memory_order_release);
}

Error Transfer::cancelled(const std::string& why) const {
  return Error({.operation = verb_,
                .path = path_ != nullptr ? *path_ : std::string(),
                .offset = offset_,
                .length = asked_bytes_,
                .code = ECANCELED,
                .hint = why});
}

bool Transfer::finish_blocks(std::uint64_t count) noexcept {
  return unfinished_.fetch_sub(count, std::memory_order_acq_rel) == count;
}

// Cuts off what a failed write has added to its files. If only the sync failed, all bytes are
// written and stay.
void Transfer::settle_growths() noexcept {
  if (growths.empty()) return;
  for (files::Growth& growth : growths) {
    if (bytes() == asked_bytes_) {
      growth.keep();
    } else if (const Status cut = growth.cut_back(); !cut.ok()) {
      ledger_->note_fallback(std::string("the end of a failed write could not be cut off: ") +
                             cut.error().what());
    }
  }
  growths.clear();
}

// Bytes that are wrong are an error, even if a cancellation came after the last of them.
void Transfer::hear_witness(bool all_moved, bool all_done) noexcept {
  const std::shared_ptr<Witness> heard = std::move(witness);
  if (!all_moved) return;
  const std::optional<Error> wrong = heard->verdict();
  if (!wrong) return;
  const std::lock_guard lock(mutex_);
  const bool late = all_done && error_ && error_->code() == ECANCELED;
  if (!error_ || late) error_ = std::make_unique<const Error>(*wrong);
}

void Transfer::complete() noexcept {
  settle_growths();
  // A cancellation that came after the last byte has changed nothing.
  const bool all_moved = bytes() == asked_bytes_;
  const bool all_done = !syncing() && steps.empty() && asked_bytes_ > 0 && all_moved;
  if (witness != nullptr) hear_witness(all_moved, all_done);
  // Closes files and lets go of memory before anyone sees the end, and outside the lock: letting go
  // of memory may call back.
  runs.clear();
  if (!steps.empty()) std::vector<SyncStep>().swap(steps);
  pieces.clear();
  regions.clear();
  if (!fences.empty()) fences.clear();

  std::unique_lock lock(mutex_);
  if (all_done && error_ && error_->code() == ECANCELED) error_.reset();
  ending_ = true;
  if (!attendants_.empty()) {
    std::vector<std::function<void(Outcome)>> attendants = std::move(attendants_);
    attendants_.clear();
    lock.unlock();
    for (const auto& then : attendants) then(outcome());
    attendants.clear();
    lock.lock();
  }
  release(lock);
}

bool Transfer::hold() noexcept {
  const std::lock_guard lock(mutex_);
  if (holds_ == 0) return false;
  ++holds_;
  return true;
}

void Transfer::release() noexcept {
  std::unique_lock lock(mutex_);
  release(lock);
}

void Transfer::release(std::unique_lock<std::mutex>& lock) noexcept {
  if (--holds_ > 0) return;
  finished_ = Clock::now();
  if (error_ && given_up_) ledger_->note_lost(*error_);
  static const std::string no_path;
  ledger_->operation_ended({.verb = verb_,
                            .id = id_,
                            .path = path_ != nullptr ? *path_ : no_path,
                            .bytes = bytes(),
                            .begin = queued_,
                            .end = finished_,
                            .error = error_.get()});
  done_.store(true, std::memory_order_release);
  const bool awaited = waiters_ > 0;
  std::vector<std::function<void()>> listeners = std::move(listeners_);
  lock.unlock();
  if (awaited) ended_.notify_all();  // whoever completes it keeps it: nobody destroys it here
  if (listeners.empty()) return;
  // Whoever attends a lane completes operations of others too, one after the other: a listener may
  // want a lock that somebody holds who waits for the next of them.
  const std::shared_ptr<Crew> crew = lane != nullptr ? legs.front().owner.lock() : nullptr;
  if (crew != nullptr && crew->call_later(listeners)) return;
  for (const auto& then : listeners) {
    then();
    os::end_forked_thread(generation_);
  }
}

std::shared_ptr<Crew> Transfer::crew_of_lane() const noexcept {
  if (!on_lane() || generation_ != os::fork_generation()) return nullptr;
  return legs.front().owner.lock();
}

bool Transfer::look_done() noexcept {
  if (done()) return true;
  if (const auto crew = crew_of_lane()) lane->look();
  return done();
}

void Transfer::when_done(std::function<void()> then) {
  if (!done()) {
    check_process();
    std::unique_lock lock(mutex_);
    if (!done()) {
      listeners_.push_back(std::move(then));
      lock.unlock();
      if (const auto crew = crew_of_lane()) lane->watch();
      return;
    }
  }
  then();
}

void Transfer::before_done(std::function<void(Outcome)> then) {
  {
    const std::lock_guard lock(mutex_);
    if (!ending_) {
      attendants_.push_back(std::move(then));
      return;
    }
  }
  then(outcome());
}

void Transfer::check_process() const {
  if (generation_ == os::fork_generation()) return;
  throw Error({.operation = "wait",
               .code = ECHILD,
               .hint = "the operation was started before fork() and belongs to the parent"});
}

bool Transfer::wait_until(std::optional<Clock::time_point> deadline) {
  if (done()) return true;
  check_process();
  raise_for_waiter();
  if (const auto crew = crew_of_lane()) {
    lane->wait_until(*this, deadline);
    if (done()) return true;
  }
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return done(); };
  ++waiters_;
  if (deadline) {
    ended_.wait_until(lock, *deadline, ended);
  } else {
    ended_.wait(lock, ended);
  }
  --waiters_;
  return done();
}

void Transfer::raise_for_waiter() noexcept {
  if (classes_in_use()) [[unlikely]]
    raise(scope_priority().value_or(of_waiters_));
}

void Transfer::raise(Priority priority) noexcept {
  if (done() || generation_ != os::fork_generation()) return;
  Priority before = this->priority();
  do {
    if (priority >= before) return;  // urgent is the first
  } while (!priority_.compare_exchange_weak(before, priority));
  for (Leg& leg : legs) {
    if (const std::shared_ptr<Crew> crew = leg.owner.lock()) crew->raise(leg);
  }
}

void Transfer::cancel(const char* why) noexcept {
  if (done() || generation_ != os::fork_generation()) return;
  std::vector<std::shared_ptr<Crew>> crews;  // keeps them until the end
  for (const Leg& leg : legs) crews.push_back(leg.owner.lock());
  if (std::ranges::find(crews, nullptr) != crews.end()) return;
  fail_cancelled(why);
  Crew::drop(*this);
}

// After done() nobody changes the error or the times.
std::optional<Error> Transfer::error() const {
  if (!done()) return std::nullopt;
  seen_.store(true, std::memory_order_relaxed);
  return error_ ? std::optional(*error_) : std::nullopt;
}

Operation::Timing Transfer::timing() const {
  const Clock::time_point finished = done() ? finished_ : Clock::time_point{};
  const Clock::time_point started{Clock::duration(started_.load(std::memory_order_relaxed))};
  return {.queued = queued_, .started = started, .finished = finished};
}

}  // namespace tensorferry::handle
