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

// Guarded by the GIL.
class Dock {
 public:
  Dock();
  virtual ~Dock();
  Dock(const Dock&) = delete;
  Dock& operator=(const Dock&) = delete;

  [[nodiscard]] virtual bool closed() const noexcept = 0;

  // Keeps the flight until it is done. Every so often lets go of those that are.
  PyOperation launch(std::shared_ptr<Flight> flight);
  PyOperation launch(Operation operation, std::vector<Buffer> buffers = {});

  // Waits for everything in flight, ends, and throws the first failure that nobody has seen.
  void close();

  // Cancels what is in flight and ends. When it returns, no memory is in use, also if other threads
  // are still in a call. What failed unseen, or was cut short, goes to the log.
  void end();

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
  ~DockOf() override { end(); }

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

  const char* use_;  // what errors call it: "use handle"
  std::shared_ptr<Opened> opened_;
};

// close(), closed, __enter__ and __exit__, the same for all.
template <class Class>
void bind_closing(Class& type, const char* enter_signature) {
  using Type = typename Class::Type;
  type.def(
          "close", [](Type& self) { self.close(); },
          "Waits for all operations and ends. Raises the first failure that nobody has seen.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig(enter_signature))
      .def(
          "__exit__",
          [](Type& self, nb::handle kind, nb::handle, nb::handle) {
            kind.is_none() ? self.close() : self.end();
          },
          nb::arg().none(), nb::arg().none(), nb::arg().none(),
          nb::sig("def __exit__(self, type: object, value: object, traceback: object, /) -> None"),
          "As close(); after an exception what is in flight is cancelled instead.")
      .def_prop_ro("closed", [](const Type& self) { return self.closed(); });
}

}  // namespace tensorferry::python
