// Letting go of the GIL, safely also while the interpreter ends.
#pragma once

#include <nanobind/nanobind.h>

namespace tensorferry::python {

// Other Python threads run while one of these lives. Once the interpreter is leaving, a daemon
// thread that comes back is parked instead: asking for the GIL then would end it in the middle of
// C++ frames, and with it the process.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  // Called once by the main thread at exit, with the GIL held.
  static void leave();

 private:
  PyThreadState* state_;
};

// Python handles signals on this thread only.
[[nodiscard]] bool on_main_thread() noexcept;

}  // namespace tensorferry::python
