// An operation under way, with the Python objects whose memory it uses.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "buffer.h"
#include "tensorferry/operation.h"

namespace tensorferry::python {

// Whether an operation fills memory or brings something to the drive, a sync included.
enum class Moves : std::uint8_t { in, out };

// Held by the Operation that the user has, and by its Handle until the operation is done: a user
// may let go of both operation and tensor. Engine threads never see it. Destroyed with the GIL.
struct Flight {
  Operation operation;
  std::vector<Buffer> buffers;
  bool seen = false;  // somebody has learnt how it ended, or cancelled it
  Moves moves = Moves::in;

  // Lets go of the memory. Finalizers may run, and call anything: nothing is touched after that.
  void let_go() { const std::vector<Buffer> gone = std::exchange(buffers, {}); }

  // Waits with the GIL released, and for Ctrl-C. False when `seconds` (negative: no limit) passed.
  // Throws Error if the operation failed, nb::python_error if a signal handler raised.
  bool wait(double seconds);

  // Waits for its end, however it ends. Without the GIL.
  void reap() const noexcept;

  // After a synchronous call was interrupted: the buffer is the caller's again when this returns.
  void cancel_and_reap();
};

struct PyOperation {
  std::shared_ptr<Flight> flight;
};

}  // namespace tensorferry::python
