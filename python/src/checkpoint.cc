#include "tensorferry/checkpoint.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "closable.h"
#include "gil_release.h"

namespace tensorferry::python {

namespace {

using Metadata = std::optional<std::map<std::string, std::string>>;
using PyHandle = ClosableOf<Handle>;

Verify parse_verify(const std::string& text) {
  if (text == "no") return Verify::no;
  if (text == "if_present") return Verify::if_present;
  if (text == "required") return Verify::required;
  throw invalid("read tensors",
                "verify is '" + text + "'; it must be 'no', 'if_present' or 'required'");
}

// Raises what Python raises for an object that is no text, or no text that UTF-8 can have.
std::string to_text(nb::handle value) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &length);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<std::size_t>(length)};
}

DType parse_dtype(const std::string& name) {
  if (const auto dtype = dtype_named(name)) return *dtype;
  throw invalid("use tensor", "dtype is '" + name + "', which safetensors does not have");
}

// (name, dtype, shape, file, offset, bytes)
nb::list list_of(const std::vector<TensorInfo>& tensors) {
  nb::list out;
  for (const TensorInfo& tensor : tensors) {
    out.append(nb::make_tuple(tensor.name, std::string(to_string(tensor.dtype)), tensor.shape,
                              tensor.file, tensor.offset, tensor.bytes));
  }
  return out;
}

nb::object row_of(nb::handle item, std::size_t least, std::size_t most, const char* what) {
  nb::object row = nb::steal(PySequence_Tuple(item.ptr()));
  if (!row.is_valid()) throw nb::python_error();
  const std::size_t fields = nb::len(row);
  if (fields < least || fields > most) throw invalid("use tensors", what);
  return row;
}

// Each item is (name, buffer) or (name, buffer, [(begin, end), ...]).
PyOperation read(const Safetensors& self, PyHandle& handle, nb::handle list,
                 const std::string& verify) {
  const Verify how = parse_verify(verify);
  std::vector<std::string> names;
  std::vector<Buffer> buffers;
  std::vector<std::vector<IndexRange>> ranges;
  for (const nb::handle item : nb::iter(list)) {
    const nb::object row =
        row_of(item, 2, 3, "each item must be (name, buffer) or (name, buffer, ranges)");
    names.push_back(to_text(nb::object(row[0])));
    buffers.emplace_back(nb::object(row[1]), Use::fill, Reach::gpu_too);
    auto& of_item = ranges.emplace_back();
    if (nb::len(row) < 3) continue;
    for (const nb::handle range : nb::iter(nb::object(row[2]))) {
      const nb::object pair = row_of(range, 2, 2, "each range must be (begin, end)");
      of_item.push_back({to_bytes(nb::object(pair[0]), "begin", "read tensors"),
                         to_bytes(nb::object(pair[1]), "end", "read tensors")});
    }
  }
  std::vector<TensorRead> reads;
  for (std::size_t i = 0; i < names.size(); ++i) {
    reads.push_back({names[i], buffers[i].bytes(), std::move(ranges[i]), buffers[i].stream()});
  }
  Operation operation = handle.with([&](Handle& opened) { return self.read(opened, reads, how); });
  return handle.hold(std::move(operation), Moves::in, std::move(buffers));
}

// Asks Python, about ten times a second, whether to go on: for Ctrl-C and for the caller's
// function.
class AskPython {
 public:
  explicit AskPython(nb::object function) : function_(std::move(function)) {}

  bool operator()(std::uint64_t done, std::uint64_t total) {
    const nb::gil_scoped_acquire acquired;
    try {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (!function_.is_none()) function_(done, total);
      return true;
    } catch (nb::python_error& error) {
      raised_.emplace(std::move(error));
      return false;
    }
  }

  // What Python raised, if anything, instead of `error`.
  void rethrow() {
    if (raised_) throw nb::python_error(std::move(*raised_));
  }

 private:
  nb::object function_;
  std::optional<nb::python_error> raised_;
};

// Each item is (name, dtype, shape, buffer).
void save(PyHandle& handle, nb::handle path, nb::handle list, Metadata metadata, bool checksums,
          std::size_t alignment, unsigned permissions, nb::object progress) {
  const std::string target = to_path(path);
  std::vector<Buffer> buffers;
  std::vector<TensorWrite> tensors;
  for (const nb::handle item : nb::iter(list)) {
    const nb::object row = row_of(item, 4, 4, "each item must be (name, dtype, shape, buffer)");
    const Buffer& buffer = buffers.emplace_back(nb::object(row[3]), Use::take, Reach::gpu_too);
    tensors.push_back({to_text(nb::object(row[0])), parse_dtype(to_text(nb::object(row[1]))),
                       nb::cast<std::vector<std::uint64_t>>(row[2]), buffer.bytes(),
                       buffer.stream()});
  }
  AskPython ask(std::move(progress));
  const SafetensorsOptions options{.metadata = std::move(metadata),
                                   .checksums = checksums,
                                   .alignment = alignment,
                                   .permissions = permissions,
                                   .progress = std::ref(ask)};
  try {
    handle.with([&](Handle& opened) { save_safetensors(opened, target, tensors, options); });
  } catch (const Error&) {
    ask.rethrow();
    throw;
  }
}

nb::bytes pieces_of(nb::handle data) {
  const Buffer buffer(data, Use::take);
  std::vector<std::uint64_t> pieces;
  {
    const GilRelease released;
    pieces = checksums_of_pieces(buffer.bytes());
  }
  return nb::bytes(pieces.data(), pieces.size() * sizeof(std::uint64_t));
}

nb::tuple header_of(nb::handle list, Metadata metadata, std::size_t alignment,
                    const std::optional<nb::object>& pieces) {
  std::vector<TensorWrite> tensors;
  for (const nb::handle item : nb::iter(list)) {
    const nb::object row = row_of(item, 3, 3, "each item must be (name, dtype, shape)");
    tensors.push_back({to_text(nb::object(row[0])),
                       parse_dtype(to_text(nb::object(row[1]))),
                       nb::cast<std::vector<std::uint64_t>>(row[2]),
                       {}});
  }
  std::vector<std::vector<std::uint64_t>> of_tensors;
  if (pieces) {
    for (const nb::handle item : nb::iter(*pieces)) {
      const Buffer buffer(item, Use::take);
      auto& numbers = of_tensors.emplace_back(buffer.bytes().size() / sizeof(std::uint64_t));
      std::memcpy(numbers.data(), buffer.bytes().data(), numbers.size() * sizeof(std::uint64_t));
    }
  }
  const SafetensorsHeader made = make_safetensors_header(
      tensors, {.metadata = std::move(metadata), .alignment = alignment}, of_tensors);
  return nb::make_tuple(nb::bytes(made.bytes.data(), made.bytes.size()), made.order);
}

nb::tuple parse(nb::handle data) {
  const Buffer buffer(data, Use::take);
  const SafetensorsContents contents = parse_safetensors(buffer.bytes());
  return nb::make_tuple(list_of(contents.tensors), contents.metadata);
}

// A NewFile that ends by commit() or discard(). Both close its File.
struct PyNewFile {
  std::optional<NewFile> made;
  std::string path;
  nb::object file;

  NewFile& get() {
    if (!made) throw invalid("use file", "the new file is committed or discarded already");
    return *made;
  }
  void discard() {
    if (!made) return;
    std::optional<NewFile> gone = std::exchange(made, std::nullopt);
    file.attr("close")();
    const GilRelease released;
    gone.reset();
  }
  void commit() {
    NewFile& file = get();
    {
      const GilRelease released;
      file.commit();
    }
    discard();
  }
};

void bind_new_file(nb::module_& module) {
  nb::class_<PyNewFile>(module, "NewFile",
                        R"(A file that takes its name only when it is whole.

Until commit() its bytes are in a hidden file beside it, and whatever has the name stays as it is.
commit() makes the file durable and gives it its name; without it, nothing is left.

>>> import tensorferry
>>> with tensorferry.NewFile("model.bin") as new, tensorferry.Handle() as handle:
...     handle.write_now(b"all bytes", new.file)
...     new.commit()
)")
      .def(
          "__init__",
          [](PyNewFile* self, nb::handle path, unsigned permissions) {
            std::string name = to_path(path);
            std::optional<NewFile> made;
            {
              const GilRelease released;
              made.emplace(NewFile::create(name, permissions));
            }
            nb::object file = python_file(made->file());
            new (self) PyNewFile{std::move(made), std::move(name), std::move(file)};
          },
          nb::arg("path"), nb::kw_only(), nb::arg("permissions") = File::usual_permissions,
          nb::sig("def __init__(self, path: _Path, *, permissions: int = 0o666) -> None"))
      .def_prop_ro(
          "file", [](const PyNewFile& self) { return self.file; },
          nb::sig("def file(self) -> File"), "The hidden file, for writing.")
      .def_prop_ro("path", [](const PyNewFile& self) { return path_text(self.path); })
      .def(
          "reserve",
          [](PyNewFile& self, nb::handle bytes) {
            const std::uint64_t wanted = to_bytes(bytes, "bytes", "reserve");
            NewFile& file = self.get();
            const GilRelease released;
            file.reserve(wanted);
          },
          nb::arg("bytes"), nb::sig("def reserve(self, bytes: int) -> None"),
          "Takes space for a file of so many bytes, all of which must be written. Several writes "
          "to one file are faster then.")
      .def("commit", &PyNewFile::commit,
           "Syncs the file, gives it its name and syncs the directory. All writes must be done.")
      .def("discard", &PyNewFile::discard, "Removes the hidden file, unless it was committed.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> NewFile"))
      .def(
          "__exit__", [](PyNewFile& self, const nb::args&) { self.discard(); },
          nb::sig("def __exit__(self, *args: object) -> None"));
}

}  // namespace

void bind_checkpoint(nb::module_& module) {
  bind_new_file(module);
  nb::class_<Safetensors>(module, "SafetensorsFile",
                          "The tensors of a safetensors file, or of a set that an index names.")
      .def(
          "__init__",
          [](Safetensors* self, nb::handle path) {
            const std::string name = to_path(path);
            const GilRelease released;
            new (self) Safetensors(Safetensors::open(name));
          },
          nb::arg("path"), nb::sig("def __init__(self, path: _Path) -> None"))
      .def_prop_ro(
          "tensors", [](const Safetensors& self) { return list_of(self.tensors()); },
          nb::sig("def tensors(self) -> list[tuple[str, str, list[int], int, int, int]]"),
          "(name, dtype, shape, index of the file, offset, bytes) of each tensor, by offset.")
      .def_prop_ro("metadata", [](const Safetensors& self) { return self.metadata(); })
      .def_prop_ro("has_checksums", &Safetensors::has_checksums)
      .def_prop_ro(
          "unchecked",
          [](const Safetensors& self) {
            nb::list names;
            for (const std::string_view name : self.unchecked()) {
              names.append(nb::str(name.data(), name.size()));
            }
            return names;
          },
          nb::sig("def unchecked(self) -> list[str]"),
          "The names of the tensors that have bytes and no checksum.")
      .def_prop_ro("checksums_problem", &Safetensors::checksums_problem,
                   "Why the checksums of a file are of no use; else empty.")
      .def_prop_ro(
          "files",
          [](const Safetensors& self) {
            nb::list files;
            for (const File& file : self.files()) files.append(python_file(file));
            return files;
          },
          nb::sig("def files(self) -> list[File]"))
      .def("read", &read, nb::arg("handle"), nb::arg("tensors"), nb::arg("verify") = "no",
           nb::sig("def read(self, handle: Handle, tensors: Iterable[tuple[str, object] | "
                   "tuple[str, object, Iterable[tuple[int, int]]]], verify: Literal['no', "
                   "'if_present', 'required'] = 'no') -> Operation"),
           "Starts to fill the buffers of (name, buffer) or (name, buffer, ranges).");
  module.def("save_safetensors", &save, nb::arg("handle"), nb::arg("path"), nb::arg("tensors"),
             nb::kw_only(), nb::arg("metadata").none() = nb::none(), nb::arg("checksums") = true,
             nb::arg("alignment") = 4096, nb::arg("permissions") = File::usual_permissions,
             nb::arg("progress").none() = nb::none(),
             nb::sig("def save_safetensors(handle: Handle, path: _Path, tensors: "
                     "Iterable[tuple[str, str, Sequence[int], object]], *, metadata: dict[str, "
                     "str] | None = None, checksums: bool = True, alignment: int = 4096, "
                     "permissions: int = 0o666, progress: Callable[[int, int], object] | None = "
                     "None) -> None"),
             "Writes (name, dtype, shape, buffer) to a new file that replaces `path`.");
  module.def("make_safetensors_header", &header_of, nb::arg("tensors"), nb::kw_only(),
             nb::arg("metadata").none() = nb::none(), nb::arg("alignment") = 8,
             nb::arg("pieces").none() = nb::none(),
             nb::sig("def make_safetensors_header(tensors: Iterable[tuple[str, str, "
                     "Sequence[int]]], *, metadata: dict[str, str] | None = None, alignment: int = "
                     "8, pieces: Iterable[object] | None = None) -> tuple[bytes, list[int]]"),
             "Returns the header of a file with these tensors and their order in it. `pieces` has, "
             "for each tensor, the checksums of all its pieces.");
  module.def("checksums_of_pieces", &pieces_of, nb::arg("buffer"),
             nb::sig("def checksums_of_pieces(buffer: object) -> bytes"),
             "Returns the checksums, of 8 bytes, of the pieces of a tensor: of each 64 KiB.");
  module.def("parse_safetensors", &parse, nb::arg("data"),
             nb::sig("def parse_safetensors(data: object) -> tuple[list[tuple[str, str, "
                     "list[int], int, int, int]], dict[str, str] | None]"),
             "Returns the tensors and the metadata of a file that is in memory.");
}

}  // namespace tensorferry::python
