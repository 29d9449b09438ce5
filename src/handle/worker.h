// One thread and the mover it owns. It claims blocks from its crew and sleeps in one place only:
// the engine's reap().
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/result.h"
#include "engines/engine.h"
#include "handle/crew.h"
#include "handle/mover.h"
#include "handle/transfer.h"

namespace tensorferry::handle {

class Worker {
 public:
  Worker(Crew& crew, std::unique_ptr<engines::Engine> engine);
  ~Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  [[nodiscard]] Status start();
  // Waits for the thread's end; the crew must be closing. The thread itself lets go.
  void join();
  // Lets the thread end by itself.
  void detach();
  [[nodiscard]] bool is_this_thread() const noexcept { return id_ == std::this_thread::get_id(); }
  void wake() noexcept { mover_.wake(); }
  [[nodiscard]] double cpu_seconds();

  bool asleep = false;  // guarded by the crew's lock
  // How long what the last claim() left in the queue has to wait; for the worker's own thread.
  std::chrono::nanoseconds held_for = std::chrono::nanoseconds::max();

  // For the crew, on the worker's own thread.
  [[nodiscard]] bool starving() const noexcept { return mover_.starving(); }
  [[nodiscard]] bool has_slots_for(const Run& run, Priority priority) const noexcept {
    return mover_.has_slots_for(run, priority);
  }
  [[nodiscard]] std::size_t flights_left_for_background() const noexcept {
    return mover_.flights_left_for_background();
  }

 private:
  [[nodiscard]] std::shared_ptr<Crew> run();
  void obey_cancellations();
  void take_up_claims();
  void report();
  void note_use();
  void wait();

  Crew& crew_;
  Mover mover_;
  std::vector<Claim> claims_;
  bool queue_was_empty_ = false;  // at the last look
  std::uint64_t cancellations_seen_ = 0;
  bool busy_ = false;  // as the crew knows it

  std::thread thread_;
  std::thread::id id_;  // stays known after detach()
  std::atomic<double> cpu_seconds_at_end_{0};
};

}  // namespace tensorferry::handle
