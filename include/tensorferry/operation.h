// One transfer of the user, or many that one call started. You can wait for it, poll and cancel it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "tensorferry/error.h"
#include "tensorferry/export.h"

namespace tensorferry {

namespace handle {
class Transfer;
}

// A reference to an operation; copies refer to the same one. Every operation completes exactly
// once: with all its bytes or with an error. The memory must stay valid until done(), unless it
// lies in a PinnedBuffer, which the operation keeps alive. Destroying an Operation neither cancels
// the transfer nor waits for it. When its Handle is destroyed, that finishes a write and cancels a
// read. All members may be called from any thread, also after the Handle is destroyed.
//
// After fork() an operation goes on in the parent. In the child an operation that was done keeps
// its result. One that was not never becomes done there: wait() and when_done() throw Error
// (ECHILD), and cancel() does nothing.
class [[nodiscard]] TENSORFERRY_EXPORT Operation {
 public:
  using Clock = std::chrono::steady_clock;

  struct Timing {
    Clock::time_point queued;    // the call
    Clock::time_point started;   // a worker took its first request
    Clock::time_point finished;  // the last byte arrived, or the error
  };

  // Blocks until the operation is done. Throws its Error if it failed or was cancelled. Waiting
  // raises it to the priority of the calling thread, if that is higher (see Priority).
  void wait() const;

  // The same with a deadline. Returns false if that passes first; the operation goes on.
  [[nodiscard]] bool wait_until(Clock::time_point deadline) const;
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds limit) const {
    const auto now = Clock::now();
    constexpr auto end_of_time = Clock::time_point::max();
    return wait_until(limit < end_of_time - now ? now + limit : end_of_time);
  }

  [[nodiscard]] bool done() const noexcept;

  // Asks for an early end and returns at once. Requests that have not started never start; those in
  // flight are cancelled or awaited. The operation is done() soon, with Error (ECANCELED) unless
  // all bytes had moved before.
  void cancel() const noexcept;

  // Calls `then` exactly once when the operation is done: on a thread of the library, or at once on
  // this one if it has ended. `then` must be quick, must not throw and must not wait for
  // an operation. It may destroy the Handle: the workers then finish the other operations alone, so
  // their memory must stay valid until they are done(). It may fork and call exec() in the child. A
  // child that returns from `then` on a thread of the library exits there, with status 0.
  void when_done(std::function<void()> then) const;

  [[nodiscard]] std::optional<Error> error() const;    // nullopt before done() and after success
  [[nodiscard]] std::uint64_t bytes() const noexcept;  // moved so far
  [[nodiscard]] Timing timing() const;                 // complete once done()

  // The engine that moves the bytes, and the reason for it: `auto` may choose another engine for a
  // single file.
  [[nodiscard]] std::string_view engine() const noexcept;
  [[nodiscard]] const std::string& engine_reason() const noexcept;

  // For the library's own rooms.
  explicit Operation(std::shared_ptr<handle::Transfer> transfer) : transfer_(std::move(transfer)) {}
  [[nodiscard]] handle::Transfer& transfer() const noexcept { return *transfer_; }

 private:
  std::shared_ptr<handle::Transfer> transfer_;
};

}  // namespace tensorferry
