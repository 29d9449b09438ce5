#include <nanobind/stl/string.h>

#include <optional>
#include <utility>

#include "bindings.h"
#include "gil_release.h"

namespace tensorferry::python {

namespace {

// A File with close(), as Python users expect.
struct PyFile {
  std::optional<File> file;

  // Returns a copy: another thread may close this one meanwhile.
  [[nodiscard]] File open() const {
    if (!file) throw invalid("use file", "this File is closed; open another one");
    return *file;
  }

  void close() {
    std::optional<File> closing = std::exchange(file, std::nullopt);
    const GilRelease released;
    closing.reset();
  }
};

File open_path(const std::string& path, Access access,
               unsigned permissions = File::usual_permissions) {
  const GilRelease released;  // a slow or remote file system must not stop Python
  return File::open(path, access, permissions);
}

Access parse_access(const std::string& text) {
  if (text == "read") return Access::read;
  if (text == "write") return Access::write;
  if (text == "read_write") return Access::read_write;
  throw invalid("open", "access is '" + text + "'; it must be 'read', 'write' or 'read_write'");
}

nb::str describe(PyFile& self) {
  if (!self.file) return shown("<tensorferry.File: closed>");
  const File& file = *self.file;
  std::string text = "<tensorferry.File '" + file.path() + "': ";
  text += file.direct() ? "direct, alignment " + std::to_string(file.offset_alignment())
                        : "buffered, " + file.direct_reason();
  return shown(text + ">");
}

}  // namespace

std::string to_path(nb::handle path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), static_cast<void*>(&bytes)) == 0) throw nb::python_error();
  const nb::object owner = nb::steal(bytes);
  return {PyBytes_AsString(bytes), static_cast<std::size_t>(PyBytes_Size(bytes))};
}

File to_file(nb::handle file, Access access) {
  if (nb::isinstance<PyFile>(file)) return nb::cast<const PyFile&>(file).open();
  if (PyLong_Check(file.ptr()) && !PyBool_Check(file.ptr())) {
    int overflow = 0;
    const long descriptor = PyLong_AsLongAndOverflow(file.ptr(), &overflow);
    if (overflow != 0 || descriptor < 0 || descriptor > INT32_MAX) {
      throw invalid("use descriptor", "the descriptor is " + std::string(nb::repr(file).c_str()) +
                                          "; it must be from 0 to 2147483647");
    }
    const GilRelease released;
    return File::borrow(static_cast<int>(descriptor));
  }
  return open_path(to_path(file), access);
}

nb::object python_file(const File& file) { return nb::cast(PyFile{file}); }

using FileClass = nb::class_<PyFile>;

namespace {

void bind_facts(FileClass& file) {
  file.def_prop_ro("closed", [](const PyFile& self) { return !self.file.has_value(); })
      .def_prop_ro("path", [](PyFile& self) { return path_text(self.open().path()); })
      .def_prop_ro(
          "size",
          [](PyFile& self) {
            const File file = self.open();
            const GilRelease released;
            return file.size();
          },
          "The current size in bytes.")
      .def_prop_ro(
          "direct", [](PyFile& self) { return self.open().direct(); },
          "Whether transfers bypass the page cache.")
      .def_prop_ro(
          "direct_reason", [](PyFile& self) { return self.open().direct_reason(); },
          "Why transfers use the page cache; empty if they bypass it.")
      .def_prop_ro(
          "memory_alignment", [](PyFile& self) { return self.open().memory_alignment(); },
          "The alignment of memory that a transfer needs to avoid a copy.")
      .def_prop_ro("offset_alignment", [](PyFile& self) { return self.open().offset_alignment(); })
      .def_prop_ro(
          "block_bytes", [](PyFile& self) { return self.open().block_bytes(); },
          "The request size that suits the device.")
      .def("__repr__", &describe);
}

}  // namespace

void bind_files(nb::module_& module) {
  FileClass file(module, "File",
                 R"(An open file. It uses direct I/O (O_DIRECT) and the page cache as needed.

Opening a file to write makes a missing one, with `permissions` less the umask, and never cuts an
existing one. A File that stays open saves an open() in every transfer.

>>> import tensorferry
>>> with tensorferry.File("weights.bin", "read_write") as file, tensorferry.Handle() as handle:
...     handle.write_now(b"layer 0", file)
...     file.size
7
)");
  file.def(
          "__init__",
          [](PyFile* self, nb::handle path, const std::string& access, unsigned permissions) {
            new (self) PyFile{open_path(to_path(path), parse_access(access), permissions)};
          },
          nb::arg("path"), nb::arg("access") = "read", nb::kw_only(),
          nb::arg("permissions") = File::usual_permissions,
          nb::sig(
              "def __init__(self, path: _Path, access: Literal['read', 'write', 'read_write'] = "
              "'read', *, permissions: int = 0o666) -> None"))
      .def_static(
          "borrow",
          [](int descriptor) {
            const GilRelease released;
            return PyFile{File::borrow(descriptor)};
          },
          nb::arg("descriptor"),
          "Uses a descriptor of the caller, who may close it at any time. It may be O_DIRECT "
          "and have any access. O_APPEND, which ignores offsets, is refused.")
      .def("close", &PyFile::close,
           "Closes the file. Operations in flight keep it open until "
           "they end.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> File"))
      .def(
          "__exit__", [](PyFile& self, const nb::args&) { self.close(); },
          nb::sig("def __exit__(self, *args: object) -> None"))
      .def(
          "resize",
          [](PyFile& self, nb::handle bytes) {
            const std::uint64_t size = to_bytes(bytes, "bytes");
            File file = self.open();
            const GilRelease released;
            file.resize(size);
          },
          nb::arg("bytes"), nb::sig("def resize(self, bytes: int) -> None"),
          "Cuts the file or extends it with zeros.");
  bind_facts(file);
}

}  // namespace tensorferry::python
