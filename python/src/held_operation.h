// An operation, with the Python objects that it keeps alive because it uses their memory.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "buffer.h"
#include "tensorferry/operation.h"

namespace tensorferry::python {

// Whether an operation fills memory, or changes the drive: a write or a sync.
enum class Moves : std::uint8_t { in, out };

// Keeps the buffers of an operation alive. The user's Operation holds it, and so does the Handle
// until the operation is done: a user may drop both operation and tensor. Engine threads never see
// it. Destroyed with the GIL.
struct HeldOperation {
  Operation operation;
  std::vector<Buffer> buffers;
  bool seen = false;  // the program knows how it ended, or has cancelled it
  Moves moves = Moves::in;

  // Lets go of the memory. This may run finalizers, which may call anything: touches nothing after.
  void let_go() { const std::vector<Buffer> gone = std::exchange(buffers, {}); }

  // Waits without the GIL. Returns false if the deadline comes first. Throws Error if the operation
  // failed, nb::python_error if a signal handler raised, as at Ctrl-C.
  bool wait(Operation::Clock::time_point deadline = Operation::Clock::time_point::max());

  // Waits until the operation ends, with success or without. Call it without the GIL.
  void reap() const noexcept;

  // Ends an interrupted synchronous call. When it returns, the caller has the buffer back.
  void cancel_and_reap();
};

struct PyOperation {
  std::shared_ptr<HeldOperation> held;
};

}  // namespace tensorferry::python
