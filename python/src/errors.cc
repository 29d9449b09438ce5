// Raises tensorferry::Error as OSError, or as the subclass that Python has for its errno.
#include <nanobind/stl/string.h>

#include <cerrno>
#include <optional>

#include "bindings.h"

namespace tensorferry::python {

namespace {

PyObject* invalid_argument = nullptr;  // tensorferry.InvalidArgument, alive as long as the module

std::string text_of(const Error& error) {
  std::string what = error.system_text();
  const auto add = [&](const std::string& part) { what += (what.empty() ? "" : ", ") + part; };
  if (const auto offset = error.offset()) add("offset " + std::to_string(*offset));
  if (const auto length = error.length()) add("length " + std::to_string(*length));
  std::string text = error.operation();
  if (!what.empty()) text += ": " + what;
  if (!error.hint().empty()) text += ": " + error.hint();
  return text;
}

template <typename T>
nb::object or_none(const std::optional<T>& value) {
  return value ? nb::object(nb::int_(*value)) : nb::none();
}

}  // namespace

nb::str path_text(const std::string& path) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

nb::str shown(const std::string& text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

Error invalid(const char* operation, std::string hint) {
  return Error({.operation = operation, .code = EINVAL, .hint = std::move(hint)});
}

nb::object as_exception(const Error& error) {
  const nb::handle type = error.code() == EINVAL ? invalid_argument : PyExc_OSError;
  const nb::object path = error.path().empty() ? nb::none() : nb::object(path_text(error.path()));
  nb::object exception = path.is_none() ? type(error.code(), shown(text_of(error)))
                                        : type(error.code(), shown(text_of(error)), path);
  exception.attr("operation") = error.operation();
  exception.attr("offset") = or_none(error.offset());
  exception.attr("length") = or_none(error.length());
  exception.attr("hint") = shown(error.hint());
  return exception;
}

void bind_errors(nb::module_& module) {
  invalid_argument = PyErr_NewExceptionWithDoc(
      "tensorferry.InvalidArgument",
      "An argument that tensorferry cannot accept: an OSError with errno EINVAL, and a "
      "ValueError.",
      nb::make_tuple(nb::borrow(PyExc_OSError), nb::borrow(PyExc_ValueError)).ptr(), nullptr);
  if (invalid_argument == nullptr) throw nb::python_error();
  module.attr("InvalidArgument") = nb::borrow(invalid_argument);

  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void*) {
        try {
          std::rethrow_exception(thrown);
        } catch (const Error& error) {
          const nb::object exception = as_exception(error);
          PyErr_SetObject(exception.type().ptr(), exception.ptr());
        }
      },
      nullptr);
}

}  // namespace tensorferry::python
