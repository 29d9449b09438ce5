// One thread of a crew that serves its lanes when nobody waits for what is on them: it looks at
// them every millisecond while they are in use, and at once if somebody asked to be called. It also
// calls listeners on behalf of threads of the user.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/result.h"

namespace tensorferry::handle {

class Crew;

class Keeper {
 public:
  explicit Keeper(Crew& crew) : crew_(crew) {}
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  [[nodiscard]] Status start();
  // Waits for the thread's end; the crew must be closing. The thread itself lets go.
  void join();
  // Lets the thread end by itself.
  void detach();
  [[nodiscard]] bool is_this_thread() const noexcept { return id_ == std::this_thread::get_id(); }

  void wake() const noexcept;
  // Call it after the lanes have got something to do: wakes the keeper if it sleeps for good.
  void rouse() const noexcept {
    if (dormant_.load()) wake();
  }
  // Takes the listeners and calls each soon, on the keeper's thread. Returns false, and takes none,
  // if that has ended.
  [[nodiscard]] bool call_later(std::vector<std::function<void()>>& listeners);

 private:
  void run();
  void sleep();
  void call_listeners();
  // Whether nobody has left a listener; from then on nobody can.
  [[nodiscard]] bool end();

  Crew& crew_;
  int wake_fd_ = -1;
  std::atomic<bool> dormant_{false};
  unsigned idle_rounds_ = 0;
  std::mutex mutex_;  // guards the next two
  bool ended_ = false;
  std::vector<std::function<void()>> listeners_;
  std::thread thread_;
  std::thread::id id_;  // stays known after detach()
};

}  // namespace tensorferry::handle
