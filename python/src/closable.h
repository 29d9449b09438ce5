// The common part of Handle and SwapSpace: users open and close them, and they hold the operations
// in flight.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "gil_release.h"
#include "held_operation.h"

namespace tensorferry::python {

// What an ending object finishes: everything, as close() does, or only the writes, which would be
// lost.
enum class Ending : std::uint8_t { with_all, with_writes };

// Guarded by the GIL.
class Closable {
 public:
  using Clock = Operation::Clock;

  Closable();
  virtual ~Closable();
  Closable(const Closable&) = delete;
  Closable& operator=(const Closable&) = delete;

  [[nodiscard]] virtual bool closed() const noexcept = 0;

  // Keeps the operation and its buffers until it is done. Now and then drops those that are done.
  PyOperation hold(Operation operation, Moves moves, std::vector<Buffer> buffers = {});

  // Accepts no new work, waits for all operations, ends, and throws the first failure that the
  // program has not seen. After Ctrl-C the work goes on in the background; close() may be called
  // again.
  void close();

  // Ends without close(): after an exception, without a user, with the interpreter. Finishes writes
  // and cancels reads. When it returns, no operation uses memory, even if other threads are still
  // in a call. Unseen failures and cancelled reads go to the log. Ctrl-C cancels the rest; end()
  // throws it once all operations have ended.
  void end();
  // The same for destructors, which cannot throw: Python raises Ctrl-C a moment later.
  void end_quietly() noexcept;

  // Ends all open objects at the end of the interpreter, while Python still works. Threads that
  // waited for them get the GIL once more before it is gone.
  static void end_all();

  // Writes a warning to Python's log.
  static void log(const std::string& text) noexcept;

 protected:
  [[nodiscard]] bool closing() const noexcept { return closing_; }

 private:
  // Hands over the C++ object and leaves this one closed. nullptr if it is closed already.
  [[nodiscard]] virtual std::shared_ptr<void> take_out() noexcept = 0;
  // Waits for all operations until the deadline, without the GIL. Returns whether they have ended.
  // The held operations tell what is lost.
  virtual bool finish(Ending ending, Clock::time_point deadline) = 0;
  virtual void cancel_all() noexcept = 0;
  // Waits until all operations have ended. Returns false at Ctrl-C, with the exception set.
  [[nodiscard]] bool finish_or_interrupt(Ending ending);
  // After the end of all operations: drops them, and keeps failures that nobody has seen.
  void settle();

 protected:
  // Waits, and returns whether all held operations have ended before the deadline.
  [[nodiscard]] bool all_done(Clock::time_point deadline) const;
  void cancel_held() const noexcept;

 private:
  void keep_unseen(const Error& error) noexcept;
  void sweep();

  std::vector<std::shared_ptr<HeldOperation>> held_;
  std::size_t sweep_at_ = 64;
  std::size_t held_bytes_ = 0;
  bool closing_ = false;
  std::optional<Error> unseen_;
};

template <class Opened>
class ClosableOf : public Closable {
 public:
  template <class Options>
  ClosableOf(const char* use, const Options& options) : use_(use), opened_(make(options)) {}
  ~ClosableOf() override { end_quietly(); }

  // Calls `use` with the C++ object, without the GIL. Another thread may close it meanwhile: the
  // last user destroys it.
  template <typename Use>
  auto with(const Use& use) const {
    std::shared_ptr<Opened> held = opened_;
    if (held == nullptr || closing()) throw invalid(use_, "it is closed; open a new one");
    const GilRelease released;
    const std::shared_ptr<Opened> opened = std::move(held);
    return use(*opened);
  }

  [[nodiscard]] bool closed() const noexcept override { return opened_ == nullptr; }

 private:
  template <class Options>
  static std::shared_ptr<Opened> make(const Options& options) {
    const GilRelease released;
    return std::make_shared<Opened>(options);
  }
  [[nodiscard]] std::shared_ptr<void> take_out() noexcept override {
    return std::exchange(opened_, nullptr);
  }
  bool finish(Ending ending, Clock::time_point deadline) override;
  void cancel_all() noexcept override;

  const char* use_;  // the operation that errors name: "use handle"
  std::shared_ptr<Opened> opened_;
};

// In handle.cc and swap.cc.
template <>
bool ClosableOf<Handle>::finish(Ending ending, Clock::time_point deadline);
template <>
void ClosableOf<Handle>::cancel_all() noexcept;
template <>
bool ClosableOf<SwapSpace>::finish(Ending ending, Clock::time_point deadline);
template <>
void ClosableOf<SwapSpace>::cancel_all() noexcept;

// Binds close(), closed, __enter__ and __exit__.
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
