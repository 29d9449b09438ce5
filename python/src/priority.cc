// Classes and rates.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "bindings.h"

namespace tensorferry::python {

namespace {

// As PriorityScope of C++, for `with`. Guarded by the GIL; used by one thread.
class PyPriorityScope {
 public:
  explicit PyPriorityScope(Priority priority) : priority_(priority) {}

  void enter() {
    if (scope_) throw invalid("priority scope", "it is entered already; make another one");
    scope_.emplace(priority_);
  }
  void leave() noexcept { scope_.reset(); }

 private:
  const Priority priority_;
  std::optional<PriorityScope> scope_;
};

}  // namespace

std::optional<Priority> to_priority(nb::handle priority) {
  if (priority.is_none()) return std::nullopt;
  if (PyUnicode_Check(priority.ptr()) == 0) {
    throw nb::type_error("priority must be 'urgent', 'normal' or 'background'");
  }
  return parse_priority(nb::cast<std::string>(priority));
}

std::uint64_t to_rate(nb::handle rate, const char* operation) {
  const std::uint64_t bytes = to_bytes(rate, "rate", operation);
  if (bytes == 0) {
    throw invalid(operation, "rate is 0; it must be at least 1 byte per second, or None");
  }
  return bytes;
}

void bind_priority(nb::module_& module) {
  nb::class_<PyPriorityScope>(module, "PriorityScope",
                              R"(Gives what a thread starts, and what it waits for, a priority.

Inside `with`, operations that this thread starts have the priority, unless their call names
another; and what this thread waits for is raised to it. Scopes nest.

>>> import tensorferry
>>> with tensorferry.Handle() as handle, tensorferry.PriorityScope("background"):
...     handle.write(b"a snapshot", "snapshot.bin").wait()
10
)")
      .def(
          "__init__",
          [](PyPriorityScope* self, const std::string& priority) {
            new (self) PyPriorityScope(parse_priority(priority));
          },
          nb::arg("priority"), nb::sig("def __init__(self, priority: _Priority) -> None"))
      .def(
          "__enter__",
          [](nb::handle self) {
            nb::cast<PyPriorityScope&>(self).enter();
            return nb::borrow(self);
          },
          nb::sig("def __enter__(self) -> PriorityScope"))
      .def(
          "__exit__",
          [](PyPriorityScope& self, nb::handle, nb::handle, nb::handle) { self.leave(); },
          nb::arg().none(), nb::arg().none(), nb::arg().none(),
          nb::sig("def __exit__(self, type: object, value: object, traceback: object, /) -> None"));
  module.def(
      "set_rate",
      [](const std::string& priority, nb::handle rate) {
        const Priority of = parse_priority(priority);
        set_rate(of, rate.is_none() ? 0 : to_rate(rate, "set rate"));
      },
      nb::arg("priority"), nb::arg("rate").none(),
      nb::sig("def set_rate(priority: _Priority, rate: int | None) -> None"),
      "Lets the operations of a class, of all handles of the process together, move at most `rate` "
      "bytes in a second. None takes the limit back.");
  module.def(
      "rate",
      [](const std::string& priority) -> std::optional<std::uint64_t> {
        const std::uint64_t now = rate(parse_priority(priority));
        return now > 0 ? std::optional(now) : std::nullopt;
      },
      nb::arg("priority"), nb::sig("def rate(priority: _Priority) -> int | None"),
      "The rate of a class in bytes per second; None if it has no limit.");
}

}  // namespace tensorferry::python
