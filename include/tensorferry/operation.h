// One user transfer, or many made by one call. It can be waited for, polled and cancelled.
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

// A reference to an operation under way; copies refer to the same one. Every operation completes
// exactly once: with all its bytes or with an error. The memory must stay valid until done(),
// unless it lies in a PinnedBuffer (which is then kept alive). Letting go of an Operation neither
// cancels it nor waits for it; its Handle finishes a write and cancels a read when it is destroyed.
// All members may be called from any thread, also after the Handle is gone.
//
// After fork() an operation goes on in the parent. In the child one that was done tells how it
// ended; one that was not stays so: wait() and when_done() throw Error (ECHILD), cancel() does
// nothing.
class [[nodiscard]] TENSORFERRY_EXPORT Operation {
 public:
  using Clock = std::chrono::steady_clock;

  struct Timing {
    Clock::time_point queued;    // the call
    Clock::time_point started;   // the first request was taken up
    Clock::time_point finished;  // the last byte, or the error
  };

  // Blocks until the operation is done. Throws its Error if it failed or was cancelled.
  void wait() const;

  // The same with a limit: false if it passed first (the operation goes on).
  [[nodiscard]] bool wait_until(Clock::time_point deadline) const;
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds limit) const {
    const auto now = Clock::now();
    constexpr auto end_of_time = Clock::time_point::max();
    return wait_until(limit < end_of_time - now ? now + limit : end_of_time);
  }

  [[nodiscard]] bool done() const noexcept;

  // Asks for an early end: requests not yet started never start, those in flight are cancelled or
  // reaped. done() follows soon, with Error ECANCELED unless all bytes had moved before.
  void cancel() const noexcept;

  // Calls `then` exactly once when the operation is done: on the thread that ends it, or at once on
  // this one if it has ended. `then` must be quick and must not throw, nor wait for an operation.
  // It may destroy the Handle: its workers then end the rest by themselves, so memory in use must
  // stay valid until the other operations are done(). It may fork: a child that returns from `then`
  // on a thread of the library ends there, with status 0, and one that calls exec() is not
  // concerned.
  void when_done(std::function<void()> then) const;

  [[nodiscard]] std::optional<Error> error() const;    // none before done() and after success
  [[nodiscard]] std::uint64_t bytes() const noexcept;  // moved so far
  [[nodiscard]] Timing timing() const;                 // complete once done()

  // Which engine moves it, and why that one: `auto` may choose another for one file.
  [[nodiscard]] std::string_view engine() const noexcept;
  [[nodiscard]] const std::string& engine_reason() const noexcept;

  // For the library's own rooms.
  explicit Operation(std::shared_ptr<handle::Transfer> transfer) : transfer_(std::move(transfer)) {}
  [[nodiscard]] handle::Transfer& transfer() const noexcept { return *transfer_; }

 private:
  std::shared_ptr<handle::Transfer> transfer_;
};

}  // namespace tensorferry
