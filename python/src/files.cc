#include <nanobind/stl/string.h>

#include <optional>

#include "bindings.h"
#include "unlocked.h"

namespace tensorferry::python {

namespace {

// A File that can be closed, as Python users expect.
struct PyFile {
  std::optional<File> file;

  [[nodiscard]] File& open() {
    if (!file) throw invalid("use file", "this File is closed");
    return *file;
  }
};

File open_path(const std::string& path, Access access) {
  const Unlocked unlocked;  // a slow or remote file system must not stop Python
  return File::open(path, access);
}

Access parse_access(const std::string& text) {
  if (text == "read") return Access::read;
  if (text == "write") return Access::write;
  if (text == "read_write") return Access::read_write;
  throw invalid("open", "access is '" + text + "'; it must be 'read', 'write' or 'read_write'");
}

std::string describe(PyFile& self) {
  if (!self.file) return "<tensorferry.File: closed>";
  const File& file = *self.file;
  std::string text = "<tensorferry.File '" + file.path() + "': ";
  text += file.direct() ? "direct, alignment " + std::to_string(file.offset_alignment())
                        : "buffered, " + file.direct_reason();
  return text + ">";
}

}  // namespace

std::string to_path(nb::handle path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw nb::python_error();
  const nb::object owner = nb::steal(bytes);
  return {PyBytes_AsString(bytes), static_cast<std::size_t>(PyBytes_Size(bytes))};
}

File to_file(nb::handle file, Access access) {
  if (nb::isinstance<PyFile>(file)) return nb::cast<PyFile&>(file).open();
  if (PyLong_Check(file.ptr()) && !PyBool_Check(file.ptr())) {
    int overflow = 0;
    const long descriptor = PyLong_AsLongAndOverflow(file.ptr(), &overflow);
    if (overflow != 0 || descriptor < 0 || descriptor > INT32_MAX) {
      throw invalid("use descriptor", "not a descriptor: " + std::string(nb::repr(file).c_str()));
    }
    const Unlocked unlocked;
    return File::borrow(static_cast<int>(descriptor));
  }
  return open_path(to_path(file), access);
}

void bind_files(nb::module_& module) {
  nb::class_<PyFile>(module, "File", R"(An open file: direct (O_DIRECT) and buffered, as needed.

A missing file is made when it may be written; an existing one is never cut. Opening once saves
the opening at every transfer.

>>> import tensorferry
>>> with tensorferry.File("weights.bin", "read_write") as file, tensorferry.Handle() as handle:
...     handle.write_now(b"layer 0", file)
...     file.size
7
)")
      .def(
          "__init__",
          [](PyFile* self, nb::handle path, const std::string& access) {
            new (self) PyFile{open_path(to_path(path), parse_access(access))};
          },
          nb::arg("path"), nb::arg("access") = "read",
          nb::sig("def __init__(self, path: str | bytes | os.PathLike, access: "
                  "Literal['read', 'write', 'read_write'] = 'read') -> None"))
      .def_static(
          "borrow", [](int descriptor) { return PyFile{File::borrow(descriptor)}; },
          nb::arg("descriptor"),
          "Uses a descriptor that the caller keeps and may close at any time. It may be O_DIRECT "
          "and of any access; O_APPEND, which ignores offsets, is refused.")
      .def(
          "close", [](PyFile& self) { self.file.reset(); },
          "Operations in flight keep the file open by themselves.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> File"))
      .def(
          "__exit__", [](PyFile& self, nb::args) { self.file.reset(); },
          nb::sig("def __exit__(self, *args: object) -> None"))
      .def(
          "resize",
          [](PyFile& self, nb::handle bytes) { self.open().resize(to_bytes(bytes, "bytes")); },
          nb::arg("bytes"), nb::sig("def resize(self, bytes: int) -> None"),
          "Cuts the file or extends it with zeros.")
      .def_prop_ro("closed", [](const PyFile& self) { return !self.file.has_value(); })
      .def_prop_ro("path", [](PyFile& self) { return self.open().path(); })
      .def_prop_ro(
          "size", [](PyFile& self) { return self.open().size(); }, "In bytes, as of now.")
      .def_prop_ro(
          "direct", [](PyFile& self) { return self.open().direct(); },
          "Whether bytes bypass the page cache.")
      .def_prop_ro(
          "direct_reason", [](PyFile& self) { return self.open().direct_reason(); },
          "Why not, if not.")
      .def_prop_ro(
          "memory_alignment", [](PyFile& self) { return self.open().memory_alignment(); },
          "What a transfer in place needs; any other goes through a slot.")
      .def_prop_ro("offset_alignment", [](PyFile& self) { return self.open().offset_alignment(); })
      .def_prop_ro(
          "block_bytes", [](PyFile& self) { return self.open().block_bytes(); },
          "The request size that suits the device.")
      .def("__repr__", &describe);
}

}  // namespace tensorferry::python
