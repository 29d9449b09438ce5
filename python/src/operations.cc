#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <mutex>

#include "bindings.h"
#include "gil_release.h"
#include "held_operation.h"

namespace tensorferry::python {

namespace {

using Clock = Operation::Clock;

std::uint64_t wait_or_raise(PyOperation& self, std::optional<double> timeout) {
  const std::shared_ptr<HeldOperation> held = self.held;
  if (!held->wait(deadline_after(timeout))) {
    throw Error({.operation = "wait",
                 .code = ETIMEDOUT,
                 .hint = "the operation is not done after " + std::to_string(timeout.value_or(0)) +
                         " s; it goes on: wait again or cancel() it"});
  }
  return held->operation.bytes();
}

bool is_done(const PyOperation& self) {
  const std::shared_ptr<HeldOperation> held = self.held;
  if (!held->operation.done()) return false;
  held->let_go();
  return true;
}

void check_process(const PyOperation& self) {
  self.held->operation.when_done([] {});
}

void raise_for_waiter(const PyOperation& self) {
  try {
    (void)self.held->operation.wait_for({});
  } catch (const Error&) {
    if (!self.held->operation.done()) throw;
  }
}

nb::str describe(const PyOperation& self) {
  const Operation& operation = self.held->operation;
  std::string text = "<tensorferry.Operation: ";
  if (!operation.done()) {
    text += "in flight, ";
  } else if (const auto error = operation.error()) {
    text += std::string("failed: ") + error->what() + ", ";
  } else {
    const auto timing = operation.timing();
    const std::chrono::duration<double, std::milli> took = timing.finished - timing.queued;
    std::array<char, 32> number{};
    std::snprintf(number.data(), number.size(), "%.3f", took.count());
    text += std::string("done in ") + number.data() + " ms, ";
  }
  return shown(text + std::to_string(operation.bytes()) + " bytes, " +
               std::string(operation.engine()) + ">");
}

// A list of the operations that are done, by number, and a descriptor to wait on. Threads of the
// engine fill it, without Python.
class Completions {
 public:
  Completions() : list_(std::make_shared<List>()) {}

  [[nodiscard]] int descriptor() const noexcept { return list_->descriptor; }

  void watch(const PyOperation& operation, std::uint64_t token) const {
    operation.held->operation.when_done([list = list_, token] {
      const std::lock_guard lock(list->mutex);
      list->done.push_back(token);
      const std::uint64_t one = 1;
      [[maybe_unused]] const ssize_t put = ::write(list->descriptor, &one, sizeof one);
    });
  }

  [[nodiscard]] nb::list take() const {
    std::vector<std::uint64_t> done;
    {
      const std::lock_guard lock(list_->mutex);
      done.swap(list_->done);
    }
    nb::list tokens;
    for (const std::uint64_t token : done) tokens.append(token);
    return tokens;
  }

 private:
  struct List {
    List() : descriptor(::eventfd(0, EFD_CLOEXEC)) {
      if (descriptor >= 0) return;
      throw Error({.operation = "eventfd",
                   .code = errno,
                   .hint = "needed for callbacks; close files or raise ulimit -n"});
    }
    ~List() { ::close(descriptor); }
    List(const List&) = delete;
    List& operator=(const List&) = delete;
    const int descriptor;
    std::mutex mutex;
    std::vector<std::uint64_t> done;
  };
  std::shared_ptr<List> list_;
};

}  // namespace

Clock::time_point deadline_after(std::optional<double> timeout) {
  constexpr double longest_wait_seconds = 1e9;
  if (timeout && std::isnan(*timeout)) {
    throw invalid("wait", "timeout is NaN; it must be a number of seconds");
  }
  if (!timeout || *timeout > longest_wait_seconds) return Clock::time_point::max();
  const std::chrono::duration<double> seconds(std::max(*timeout, 0.0));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds);
}

bool HeldOperation::wait(Clock::time_point deadline) {
  bool ended = operation.done();
  while (!ended) {
    {
      const GilRelease released;
      // done() and the error below tell how it ended: the wait itself may throw the same error.
      try {
        const auto slice = on_main_thread() ? Clock::now() + signal_interval : deadline;
        ended = operation.wait_until(std::min(slice, deadline));
      } catch (const Error&) {
        if (!operation.done()) throw;  // the parent's operation after a fork
        ended = true;
      }
    }
    if (ended) break;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (Clock::now() >= deadline) return false;
  }
  seen = true;
  const std::optional<Error> failed = operation.error();
  let_go();
  if (failed) throw Error(*failed);
  return true;
}

void HeldOperation::reap() const noexcept {
  try {
    operation.wait();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): how it ended is asked later
  }
}

void HeldOperation::cancel_and_reap() {
  operation.cancel();
  {
    const GilRelease released;
    reap();
  }
  seen = true;
  let_go();
}

namespace {

void bind_completions(nb::module_& module) {
  nb::class_<Completions>(module, "Completions", "For tensorferry._callbacks.")
      .def(nb::init<>())
      .def("fileno", &Completions::descriptor)
      .def("watch", &Completions::watch)
      .def("take", &Completions::take, nb::sig("def take(self) -> list[int]"));
}

using OperationClass = nb::class_<PyOperation>;

void bind_facts(OperationClass& operation) {
  operation
      .def_prop_ro(
          "bytes", [](const PyOperation& self) { return self.held->operation.bytes(); },
          "The number of bytes moved so far.")
      .def_prop_ro(
          "engine", [](const PyOperation& self) { return self.held->operation.engine(); },
          "The engine that moves the bytes. `auto` may choose another one for one file.")
      .def_prop_ro("engine_reason",
                   [](const PyOperation& self) { return self.held->operation.engine_reason(); })
      .def_prop_ro(
          "seconds",
          [](const PyOperation& self) -> std::optional<double> {
            if (!self.held->operation.done()) return std::nullopt;
            const auto timing = self.held->operation.timing();
            return std::chrono::duration<double>(timing.finished - timing.queued).count();
          },
          "The time from the call to the end; None before the end.")
      .def("__repr__", &describe);
}

}  // namespace

void bind_operations(nb::module_& module) {
  bind_completions(module);
  OperationClass operation(module, "Operation",
                           R"(A transfer in flight, or several that one call started.

It ends exactly once: with all its bytes, or with an OSError. It keeps the memory alive until then,
even if you drop the buffer or give the tensor other memory; only do not resize the storage. You can
wait for it, poll it, cancel it and await it.

>>> import tensorferry
>>> data = bytearray(b"weights")
>>> with tensorferry.Handle() as handle:
...     operation = handle.write(data, "weights.bin")
...     operation.wait(timeout=60)
7
)");
  operation
      .def("wait", &wait_or_raise, nb::arg("timeout") = nb::none(),
           "Waits until the operation ends, without the GIL, and returns the number of "
           "bytes.\n\nRaises its OSError if it failed or was cancelled (errno.ECANCELED). "
           "Raises TimeoutError if `timeout` seconds pass first, and KeyboardInterrupt at "
           "Ctrl-C; the operation then goes on.")
      .def("result", &wait_or_raise, nb::arg("timeout") = nb::none(), "Does the same as wait().")
      .def("done", &is_done, "Returns whether the operation has ended, with success or without.")
      .def(
          "cancel",
          [](const PyOperation& self) {
            self.held->seen = true;
            self.held->operation.cancel();
          },
          "Asks the operation to end early. Nothing touches the buffer once done() is true.")
      .def(
          "exception",
          [](PyOperation& self) -> nb::object {
            if (!is_done(self)) return nb::none();
            self.held->seen = true;
            const auto error = self.held->operation.error();
            return error ? as_exception(*error) : nb::none();
          },
          nb::sig("def exception(self) -> OSError | None"),
          "Returns the error of the operation; None before the end and after success.")
      .def(
          "add_done_callback",
          [](nb::handle self, nb::handle callback) {
            nb::module_::import_("tensorferry._callbacks").attr("add")(self, callback);
          },
          nb::arg("callback"),
          nb::sig("def add_done_callback(self, callback: Callable[[Operation], object]) -> None"),
          "Calls callback(operation) when the operation ends, on a thread that all callbacks "
          "share; at once on this thread if it has ended already. A callback that waits for "
          "another callback waits for ever.")
      .def(
          "__await__",
          [](nb::handle self) {
            return nb::module_::import_("tensorferry._callbacks").attr("wait")(self);
          },
          nb::sig("def __await__(self) -> Generator[object, None, int]"))
      .def("raise_for_waiter", &raise_for_waiter,
           "Gives the operation the priority of this thread, which is going to await it, if that "
           "is higher.")
      .def("check_process", &check_process,
           "Raises ChildProcessError in a forked child if its parent started the operation.");
  bind_facts(operation);
}

}  // namespace tensorferry::python
