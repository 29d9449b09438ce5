// The extension module. The other files of this folder bind the classes.
#include <nanobind/stl/string.h>
#include <sys/auxv.h>

#include <chrono>

#include "bindings.h"
#include "buffer.h"
#include "gil_release.h"

namespace tensorferry::python {

std::uint64_t to_bytes(nb::handle number, const char* name, const char* operation) {
  const nb::object index = nb::steal(PyNumber_Index(number.ptr()));
  if (!index.is_valid()) throw nb::python_error();
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || value < 0) {
    const std::string text = nb::str(index).c_str();
    throw invalid(operation,
                  std::string(name) + " is " + text + "; it must be from 0 to 9223372036854775807");
  }
  return static_cast<std::uint64_t>(value);
}

}  // namespace tensorferry::python

NB_MODULE(_core, module) {  // NOLINT(misc-use-anonymous-namespace): nanobind's own names
  using namespace tensorferry::python;
  module.doc() = "The extension of tensorferry. Import tensorferry instead.";
  module.attr("__version__") = TENSORFERRY_VERSION;
  nb::set_leak_warnings(false);  // at exit a thread may still hold the object that it waits for
  bind_checksums(module);
  bind_masters(module);
  bind_moments(module);
  bind_errors(module);
  bind_files(module);
  bind_memory(module);
  bind_operations(module);
  bind_priority(module);
  bind_handle(module);
  bind_swap(module);
  bind_checkpoint(module);
  module.def(
      "privileged", [] { return ::getauxval(AT_SECURE) != 0; },
      "Returns whether this program has rights that its user may lack (setuid, setgid, file "
      "capabilities). If so, tensorferry ignores its variables of the environment.");
  module.def("tracing", &tensorferry::tracing,
             "Returns whether TENSORFERRY_TRACE asks for a "
             "trace.");
  module.def(
      "trace_span",
      [](const std::string& name, std::int64_t begin_ns, std::int64_t end_ns) {
        using Time = std::chrono::steady_clock::time_point;
        tensorferry::trace_span(name, Time(std::chrono::nanoseconds(begin_ns)),
                                Time(std::chrono::nanoseconds(end_ns)));
      },
      nb::arg("name"), nb::arg("begin_ns"), nb::arg("end_ns"),
      "Adds work of this thread to the trace. The times are those of time.monotonic_ns().");
  module.def(
      "validate",
      [](nb::handle buffer, nb::handle path, nb::handle offset) {
        const Buffer memory(buffer, Use::take, Reach::gpu_too);
        const std::string name = to_path(path);
        const std::uint64_t at = to_bytes(offset, "offset");
        in_pieces(memory.bytes().size(), [&](std::size_t begin, std::size_t bytes) {
          tensorferry::validate(memory.bytes().subspan(begin, bytes), name, at + begin,
                                memory.stream());
        });
      },
      nb::arg("buffer").none(), nb::arg("path").none(), nb::arg("offset") = 0,
      nb::sig("def validate(buffer: object, path: _Path, offset: int = 0) -> None"),
      "Compares the buffer with an ordinary read of the file. Raises OSError (EBADMSG) with "
      "the first offset that differs.");
}
