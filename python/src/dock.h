// What a user has opened, with the operations that it has in flight: the common part of Handle and
// SwapSpace.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "flight.h"
#include "unlocked.h"

namespace tensorferry::python {

// How one ends: as its user asks for, with all that was begun, or with what would be lost.
enum class Ending : std::uint8_t { with_all, with_writes };

// Guarded by the GIL.
class Dock {
 public:
  using Clock = Operation::Clock;

  Dock();
  virtual ~Dock();
  Dock(const Dock&) = delete;
  Dock& operator=(const Dock&) = delete;

  [[nodiscard]] virtual bool closed() const noexcept = 0;

  // Keeps the flight until it is done. Every so often lets go of those that are.
  PyOperation launch(std::shared_ptr<Flight> flight);
  PyOperation launch(Operation operation, Moves moves, std::vector<Buffer> buffers = {});

  // Takes nothing new, waits for everything in flight, ends, and throws the first failure that
  // nobody has seen. After Ctrl-C it goes on in the background, and can be called again.
  void close();

  // Ends without being asked to: after an exception, without a user, with the interpreter. What is
  // not worth finishing is cancelled. When it returns, no memory is in use, also if other threads
  // are still in a call. What failed unseen, or was cut short, goes to the log. Ctrl-C cancels all
  // that is left; it throws that once all has ended.
  void end();
  // The same for destructors, which cannot throw: Ctrl-C comes back a moment later.
  void end_quietly() noexcept;

  // All that are open, at the end of the interpreter, while Python still works. Those who wait are
  // woken by the end and shall have the GIL before it is gone.
  static void end_all();

  // A warning in Python's log.
  static void log(const std::string& text) noexcept;

 protected:
  [[nodiscard]] bool closing() const noexcept { return closing_; }

 private:
  // Takes what was opened out of the dock. nullptr if it is closed.
  [[nodiscard]] virtual std::shared_ptr<void> take_out() noexcept = 0;
  // Waits a while for all to end, with or without the GIL; true when it has. What is lost is found
  // in the flights.
  virtual bool finish(Ending ending, Clock::time_point deadline) = 0;
  virtual void cancel_all() noexcept = 0;
  // Waits until all has ended. False for Ctrl-C, with the exception set.
  [[nodiscard]] bool finish_or_interrupt(Ending ending);
  // Once all has ended: lets go, and keeps what nobody has seen.
  void settle();

 protected:
  // Whether all flights have ended before the deadline.
  [[nodiscard]] bool landed(Clock::time_point deadline) const;
  void cancel_flights() const noexcept;

 private:
  void keep_unseen(const Error& error) noexcept;
  void sweep();

  std::vector<std::shared_ptr<Flight>> flights_;
  std::size_t sweep_at_ = 64;
  std::size_t launched_bytes_ = 0;
  bool closing_ = false;
  std::optional<Error> unseen_;
};

template <class Opened>
class DockOf : public Dock {
 public:
  template <class Options>
  DockOf(const char* use, const Options& options) : use_(use), opened_(make(options)) {}
  ~DockOf() override { end_quietly(); }

  // Calls `use` with what was opened and without the GIL. Another thread may close it meanwhile:
  // the last user ends it.
  template <typename Use>
  auto with(const Use& use) const {
    std::shared_ptr<Opened> held = opened_;
    if (held == nullptr || closing()) throw invalid(use_, "it is closed; open a new one");
    const Unlocked unlocked;
    const std::shared_ptr<Opened> opened = std::move(held);
    return use(*opened);
  }

  [[nodiscard]] bool closed() const noexcept override { return opened_ == nullptr; }

 private:
  template <class Options>
  static std::shared_ptr<Opened> make(const Options& options) {
    const Unlocked unlocked;
    return std::make_shared<Opened>(options);
  }
  [[nodiscard]] std::shared_ptr<void> take_out() noexcept override {
    return std::exchange(opened_, nullptr);
  }
  bool finish(Ending ending, Clock::time_point deadline) override;
  void cancel_all() noexcept override;

  const char* use_;  // what errors call it: "use handle"
  std::shared_ptr<Opened> opened_;
};

// In handle.cc and swap.cc: what each of them finishes.
template <>
bool DockOf<Handle>::finish(Ending ending, Clock::time_point deadline);
template <>
void DockOf<Handle>::cancel_all() noexcept;
template <>
bool DockOf<SwapSpace>::finish(Ending ending, Clock::time_point deadline);
template <>
void DockOf<SwapSpace>::cancel_all() noexcept;

// close(), closed, __enter__ and __exit__, the same for all.
template <class Class>
void bind_closing(Class& type, const char* enter_signature, const char* closing,
                  const char* after_exception) {
  using Type = typename Class::Type;
  type.def(
          "close", [](Type& self) { self.close(); }, closing)
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig(enter_signature))
      .def(
          "__exit__",
          [](Type& self, nb::handle kind, nb::handle, nb::handle) {
            kind.is_none() ? self.close() : self.end();
          },
          nb::arg().none(), nb::arg().none(), nb::arg().none(),
          nb::sig("def __exit__(self, type: object, value: object, traceback: object, /) -> None"),
          after_exception)
      .def_prop_ro("closed", [](const Type& self) { return self.closed(); });
}

}  // namespace tensorferry::python
