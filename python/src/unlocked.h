// Letting go of the GIL, safely also while the interpreter ends.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstddef>

namespace tensorferry::python {

// Other Python threads run while one of these lives. Once the interpreter finalizes, a daemon
// thread that comes back is parked instead: asking for the GIL then would end it in the middle of
// C++ frames, and with it the process.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  // Lets those who come back at this moment have the GIL, while it can still be had. Called by the
  // main thread at exit, with the GIL held.
  static void let_others_return();

 private:
  PyThreadState* state_;
};

// Calls work(begin, bytes) for pieces of `bytes` with the GIL released, and lets Ctrl-C in between.
template <typename Work>
void in_pieces(std::size_t bytes, const Work& work) {
  constexpr std::size_t piece_bytes = std::size_t{64} << 20;
  std::size_t begin = 0;
  do {
    const std::size_t piece = std::min(piece_bytes, bytes - begin);
    {
      const Unlocked unlocked;
      work(begin, piece);
    }
    begin += piece;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
  } while (begin < bytes);
}

// How long Ctrl-C may go unnoticed.
inline constexpr std::chrono::milliseconds signal_interval{50};

// Python handles signals on this thread only.
[[nodiscard]] bool on_main_thread() noexcept;

}  // namespace tensorferry::python
