#include "unlocked.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace tensorferry::python {

namespace {

std::atomic<bool> leaving{false};
std::atomic<int> returning{0};  // threads between their look at `leaving` and the GIL

}  // namespace

bool on_main_thread() noexcept { return ::getpid() == ::gettid(); }

Unlocked::~Unlocked() {
  ++returning;
  if (leaving && !on_main_thread()) {
    --returning;
    for (;;) ::pause();
  }
  PyEval_RestoreThread(state_);
  --returning;
}

void Unlocked::leave() {
  leaving = true;
  PyThreadState* state = PyEval_SaveThread();
  // Those who did not see the flag get the GIL now, while it can still be had.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (returning > 0 && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  PyEval_RestoreThread(state);
}

}  // namespace tensorferry::python
