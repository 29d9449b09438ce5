// Releases the GIL for a scope, safely also while the interpreter ends.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstddef>

namespace tensorferry::python {

// Other Python threads run while one of these lives. Once the interpreter finalizes, the destructor
// parks a daemon thread for ever: asking for the GIL would end the thread in the middle of C++
// frames, and with it the process.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

  // Lets threads that are about to take the GIL back have it, before it is gone. The main thread
  // calls this at exit, with the GIL held.
  static void let_others_return();

 private:
  PyThreadState* state_;
};

// Calls work(begin, bytes) for pieces of `bytes`, without the GIL. Raises Ctrl-C between pieces.
template <typename Work>
void in_pieces(std::size_t bytes, const Work& work) {
  constexpr std::size_t piece_bytes = std::size_t{64} << 20;
  std::size_t begin = 0;
  do {
    const std::size_t piece = std::min(piece_bytes, bytes - begin);
    {
      const GilRelease released;
      work(begin, piece);
    }
    begin += piece;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
  } while (begin < bytes);
}

// How often a waiting thread looks for Ctrl-C.
inline constexpr std::chrono::milliseconds signal_interval{50};

// Python handles signals on the main thread only.
[[nodiscard]] bool on_main_thread() noexcept;

}  // namespace tensorferry::python
