// A way for small operations on which no other thread is needed: the thread that starts one submits
// it, and the thread that waits for it reaps it. The engine serves any thread. If nobody waits, the
// keeper of the crew reaps.
//
// One thread at a time attends the lane: it sleeps in the engine and judges what arrives, its own
// and that of others. A second thread follows: it sleeps until the first is done or leaves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "handle/mover.h"
#include "handle/process_share.h"
#include "handle/transfer.h"

namespace tensorferry::handle {

class Crew;

// Thread-safe. Lives as long as its crew.
class Lane {
 public:
  using Clock = Operation::Clock;

  // `share` is that of its engine.
  Lane(Crew& crew, const MoverOptions& options, std::unique_ptr<engines::Engine> engine,
       ProcessShare share);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Takes up all blocks of an operation and submits them. Returns false, and does nothing, if they
  // do not all fit now, if they need slots and the process may have no more, or if the crew is
  // finishing.
  [[nodiscard]] bool take(const std::shared_ptr<Transfer>& transfer);

  // Returns when the operation is done, its blocks are off the lane, or the deadline has passed.
  void wait_until(Transfer& transfer, std::optional<Clock::time_point> deadline);
  // Judges what has arrived, if nobody attends. Never waits.
  void look();
  // Ends blocks of operations that stop.
  void end_stopping();
  // The operations that have blocks here.
  [[nodiscard]] std::vector<std::shared_ptr<Transfer>> transfers();

  // Somebody wants to be called when an operation is done: the keeper shall look as soon as
  // something arrives, for a while.
  void watch();
  // For the keeper, at each of its rounds: the descriptor to poll, or -1 if nobody wants that.
  [[nodiscard]] int watched_fd();

 private:
  using Lock = std::unique_lock<std::mutex>;

  // Attends for one round of the engine. Called with the lock held, lets go of it.
  void attend(Lock& lock, engines::Engine::Nanoseconds limit);
  // Follows until the one who attends ends a round, or until the deadline.
  void follow(Lock& lock, std::optional<Clock::time_point> deadline);
  // Tells the crew what has ended, and followers that they may attend. Called with the lock held,
  // lets go of it.
  void report(Lock& lock);
  void report_one(Lock& lock);
  // With the lock held: tells the crew what it has moved and whether it is busy.
  void note_use();
  // With the lock held: whether slots for so many blocks are free.
  [[nodiscard]] bool may_use_slots(std::uint64_t blocks);
  [[nodiscard]] engines::Engine::Nanoseconds limit_until(
      std::optional<Clock::time_point> deadline) const;

  Crew& crew_;
  const ProcessShare share_;
  std::optional<ProcessShare> slot_share_;  // once it has slots
  std::mutex mutex_;
  Mover mover_;
  bool attended_ = false;
  bool busy_ = false;  // as the crew was told
  unsigned followers_ = 0;
  std::condition_variable changed_;
  int ready_fd_ = -1;
  std::atomic<unsigned> watch_rounds_{0};
};

}  // namespace tensorferry::handle
