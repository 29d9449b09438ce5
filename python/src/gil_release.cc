#include "gil_release.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace tensorferry::python {

namespace {

std::atomic<int> returning{0};  // threads that want the GIL back

// A forked child has one thread, which holds the GIL.
[[maybe_unused]] const int at_fork = ::pthread_atfork(nullptr, nullptr, [] { returning = 0; });

// Before Python 3.13 it has another name and is not part of the stable ABI.
bool finalizing() noexcept {
  using Question = int (*)();
  static const auto ask = [] {
    void* found = ::dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    if (found == nullptr) found = ::dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    return reinterpret_cast<Question>(found);
  }();
  return ask != nullptr && ask() != 0;
}

// Stops, for ever, a thread that wants the GIL back.
[[noreturn]] void park() noexcept {
  --returning;
  for (;;) ::pause();
}

}  // namespace

bool on_main_thread() noexcept { return ::getpid() == ::gettid(); }

GilRelease::~GilRelease() {
  ++returning;
  if (finalizing() && !on_main_thread()) park();
  try {
    PyEval_RestoreThread(state_);
  } catch (const abi::__forced_unwind&) {  // it finalizes since then, and Python ends the thread
    park();
  }
  --returning;
}

void GilRelease::let_others_return() {
  PyThreadState* state = PyEval_SaveThread();
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (returning > 0 && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  PyEval_RestoreThread(state);
}

}  // namespace tensorferry::python
