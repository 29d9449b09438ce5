#include "handle/worker.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "os/numa.h"
#include "os/thread.h"

namespace tensorferry::handle {

namespace {

using Nanoseconds = engines::Engine::Nanoseconds;

// While the crew finishes, a worker looks this often whether bytes still move.
constexpr Nanoseconds finishing_pause = std::chrono::milliseconds(20);

// How long to sleep before the next look at the GPU's work that a transfer waits for.
Nanoseconds fence_poll_pause(unsigned polls) noexcept {
  constexpr unsigned doublings_max = 6;
  return std::chrono::microseconds(16) * (1U << std::min(polls / 4, doublings_max));
}

}  // namespace

Worker::Worker(Crew& crew, std::unique_ptr<engines::Engine> engine)
    : crew_(crew),
      mover_(crew.options().mover, std::move(engine), *crew.ledger(), crew.system(),
             crew.background()),
      claims_(std::min<std::size_t>(crew.options().mover.queue_depth, turn_blocks)) {}

void Worker::join() {
  if (is_this_thread()) detach();
  if (thread_.joinable()) thread_.join();
}

void Worker::detach() {
  if (thread_.joinable()) thread_.detach();
}

Status Worker::start() {
  // The last owner of the crew destroys it, and this worker with it.
  auto thread = os::start_thread("ferry-worker", [this] { const auto last = run(); });
  if (!thread) {
    return Error(
        {.operation = "start worker thread",
         .code = EAGAIN,
         .hint = "the system allows no more threads; use fewer workers or raise ulimit -u"});
  }
  thread_ = std::move(*thread);
  id_ = thread_.get_id();
  return Nothing{};
}

double Worker::cpu_seconds() {
  const double used = thread_.joinable() ? os::cpu_seconds(thread_) : cpu_seconds_at_end_.load();
  return used + mover_.engine().cpu_seconds();
}

std::shared_ptr<Crew> Worker::run() {
  const std::string refused = os::prefer_node(crew_.system(), crew_.options().mover.numa_node);
  if (!refused.empty()) crew_.ledger()->note_fallback(refused);
  mover_.attach();
  while (!(crew_.closing() && mover_.idle())) {
    crew_.look_after_end();
    obey_cancellations();
    mover_.revive();
    crew_.ask_fences();
    take_up_claims();
    mover_.submit_ready();
    mover_.unload();
    note_use();
    report();
    // An empty mover whose last look at the queue was skipped must look again.
    const bool must_look = mover_.idle() && !queue_was_empty_;
    if (!mover_.work_at_hand() && !must_look) wait();
  }
  mover_.detach();
  cpu_seconds_at_end_ = os::cpu_seconds_of_this_thread();
  return crew_.leave();
}

void Worker::obey_cancellations() {
  const std::uint64_t cancellations = crew_.cancellations();
  if (cancellations != std::exchange(cancellations_seen_, cancellations)) mover_.end_stopping();
}

// Fills the mover with blocks. Without overlap it first drains the engine.
void Worker::take_up_claims() {
  queue_was_empty_ = false;
  if (crew_.options().overlap == Overlap::off && !mover_.idle()) return;
  while (!queue_was_empty_ && mover_.flights_left() > 0) {
    const std::size_t wanted = std::min(mover_.flights_left(), claims_.size());
    const std::size_t count = crew_.claim(*this, {claims_.data(), wanted});
    for (std::size_t i = 0; i < count; ++i) mover_.take_up(std::move(claims_[i]));
    queue_was_empty_ = count < wanted;
    if (count > 0) mover_.note_work();
  }
}

void Worker::note_use() {
  if (const bool busy = mover_.in_flight(); busy != std::exchange(busy_, busy)) {
    busy ? crew_.mover_begins() : crew_.mover_rests();
  }
  if (const std::uint64_t bytes = mover_.take_moved_bytes(); bytes > 0) crew_.add_moved(bytes);
}

void Worker::report() {
  while (!mover_.failed().empty() || !mover_.ended().empty()) {
    for (const auto& transfer : std::exchange(mover_.failed(), {})) Crew::drop(*transfer);
    for (const auto& transfer : std::exchange(mover_.ended(), {})) Crew::blocks_finished(transfer);
  }
}

void Worker::wait() {
  if (crew_.closing() && mover_.idle()) return;
  Nanoseconds limit = mover_.wait_limit();
  if (crew_.fenced()) limit = std::min(limit, fence_poll_pause(mover_.polls()));
  if (crew_.finishing()) limit = std::min(limit, finishing_pause);
  limit = std::min(limit, std::exchange(held_for, Nanoseconds::max()));
  mover_.wait(limit);
  mover_.judge_waited();
  note_use();
  report();
}

}  // namespace tensorferry::handle
