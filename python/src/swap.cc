#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>

#include "bindings.h"
#include "closable.h"

namespace tensorferry::python {

namespace {

using PySwapSpace = ClosableOf<SwapSpace>;
using Clock = SwapSpace::Clock;

// A forked child inherits the views of a swap space, but not its buffers.
bool of_parent(const SwapView& /*view*/) { return false; }
bool of_parent(const SwapBuffer& buffer) { return !in_swap_buffer(buffer.bytes()); }

// Memory of a swap space for NumPy and torch. Their views keep it alive.
template <class Memory>
int get_buffer(PyObject* object, Py_buffer* view, int flags) {
  const auto* const self = nb::inst_ptr<Memory>(object);
  if (of_parent(*self)) {
    PyErr_SetString(PyExc_BufferError,
                    "this buffer was taken before fork() and belongs to the parent; open a "
                    "SwapSpace in the child");
    return -1;
  }
  const std::span<std::byte> bytes = self->bytes();
  return PyBuffer_FillInfo(view, object, bytes.data(), static_cast<Py_ssize_t>(bytes.size()), 0,
                           flags);
}

template <class Memory>
PyType_Slot memory_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer<Memory>)},
    {0, nullptr},
};

std::vector<std::string> to_directories(nb::handle given) {
  const bool one = PyUnicode_Check(given.ptr()) != 0 || PyBytes_Check(given.ptr()) != 0 ||
                   nb::hasattr(given, "__fspath__");
  if (one) return {to_path(given)};
  std::vector<std::string> directories;
  for (const nb::handle directory : nb::iter(given)) directories.push_back(to_path(directory));
  return directories;
}

// Calls `attempt(deadline)` until it returns something, the time is over or `until` is done. Raises
// Ctrl-C between attempts.
template <class Attempt>
auto waiting(std::optional<double> timeout, const Operation* until, const Attempt& attempt) {
  const auto end = deadline_after(timeout);
  for (;;) {
    auto got = attempt(std::min(end, Clock::now() + signal_interval));
    if (got) return std::move(*got);
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (Clock::now() >= end || (until != nullptr && until->done())) {
      throw Error(
          {.operation = "wait for swap buffers",
           .code = ETIMEDOUT,
           .hint = "all buffers are in use; release some, wait for writes, or raise buffer_bytes"});
    }
  }
}

// An operation keeps buffers of the space alive itself, no longer than it needs them. Other memory
// is held until somebody waits.
PyOperation hold(PySwapSpace& self, Operation operation, Moves moves, std::vector<Buffer> buffers) {
  if (in_swap_buffer(buffers.front().bytes())) buffers.clear();
  return self.hold(std::move(operation), moves, std::move(buffers));
}

PyOperation put(PySwapSpace& self, const std::string& key, nb::handle buffer) {
  std::vector<Buffer> buffers;
  buffers.emplace_back(buffer, Use::take, Reach::gpu_too);
  Operation operation = self.with([&](SwapSpace& space) {
    return space.put(key, buffers.front().bytes(), buffers.front().stream());
  });
  return hold(self, std::move(operation), Moves::out, std::move(buffers));
}

PyOperation get(PySwapSpace& self, const std::string& key, nb::handle buffer, nb::handle offset) {
  std::vector<Buffer> buffers;
  buffers.emplace_back(buffer, Use::fill, Reach::gpu_too);
  const std::uint64_t at = to_bytes(offset, "offset");
  Operation operation = self.with([&](SwapSpace& space) {
    return space.get(key, buffers.front().bytes(), at, buffers.front().stream());
  });
  return hold(self, std::move(operation), Moves::in, std::move(buffers));
}

nb::tuple fetch(PySwapSpace& self, const std::string& key, std::optional<double> timeout) {
  auto fetched = waiting(timeout, nullptr, [&](Clock::time_point deadline) {
    return self.with([&](SwapSpace& space) { return space.fetch(key, deadline); });
  });
  return nb::make_tuple(fetched.buffer, self.hold(fetched.operation, Moves::in));
}

SwapBuffer take(PySwapSpace& self, nb::handle bytes, std::optional<double> timeout,
                const PyOperation* other) {
  const std::uint64_t wanted = to_bytes(bytes, "bytes");
  const Operation* const until = other != nullptr ? &other->held->operation : nullptr;
  return waiting(timeout, until, [&](Clock::time_point deadline) {
    return self.with([&](SwapSpace& space) {
      return until != nullptr ? space.take(wanted, *until, deadline) : space.take(wanted, deadline);
    });
  });
}

SwapView view(PySwapSpace& self, nb::handle parts) {
  std::vector<std::string> keys;
  std::vector<SwapPart> list;
  for (const nb::handle item : nb::iter(parts)) {
    const nb::object row = nb::steal(PySequence_Tuple(item.ptr()));
    if (!row.is_valid()) throw nb::python_error();
    if (nb::len(row) != 3) throw invalid("view", "each part must be (key, offset, bytes)");
    keys.push_back(nb::cast<std::string>(row[0]));
    list.push_back(
        {{}, to_bytes(nb::object(row[1]), "offset"), to_bytes(nb::object(row[2]), "bytes")});
  }
  for (std::size_t i = 0; i < keys.size(); ++i) list[i].key = keys[i];
  return self.with([&](SwapSpace& space) { return space.view(list); });
}

nb::dict stats(const PySwapSpace& self) {
  const SwapStats now = self.with([](SwapSpace& space) { return space.stats(); });
  nb::dict out;
  out["tensors"] = now.tensors;
  out["tensor_bytes"] = now.tensor_bytes;
  out["file_bytes"] = now.file_bytes;
  out["read_bytes"] = now.read_bytes;
  out["written_bytes"] = now.written_bytes;
  out["forwarded_bytes"] = now.forwarded_bytes;
  out["prefetched"] = now.prefetched;
  out["prefetches_in_vain"] = now.prefetches_in_vain;
  out["waits"] = now.waits;
  out["buffer_bytes"] = now.buffer_bytes;
  out["buffer_bytes_used"] = now.buffer_bytes_used;
  nb::list drives;
  for (const SwapDrive& drive : now.drives) {
    nb::dict one;
    one["directory"] = path_text(drive.directory);
    one["stored_bytes"] = drive.stored_bytes;
    one["bytes_per_second"] = drive.bytes_per_second;
    one["share"] = drive.share;
    drives.append(one);
  }
  out["drives"] = drives;
  out["snapshots"] = now.snapshots;
  out["snapshot_bytes"] = now.snapshot_bytes;
  return out;
}

void open_space(PySwapSpace* self, nb::handle directories, nb::handle buffer_bytes,
                const std::string& run, unsigned rank, const std::string& engine,
                nb::handle block_bytes, nb::handle queue_depth, nb::handle workers,
                const std::string& submit, bool overlap, bool pin_memory, bool checksums) {
  SwapOptions options;
  options.checksums = checksums ? SwapChecksums::computed : SwapChecksums::none;
  options.memory = pin_memory ? SwapMemory::page_locked : SwapMemory::ordinary;
  options.directories = to_directories(directories);
  options.buffer_bytes = to_bytes(buffer_bytes, "buffer_bytes");
  options.run = run;
  options.rank = rank;
  options.handle = handle_options(engine, block_bytes, queue_depth, workers, submit, overlap);
  new (self) PySwapSpace("use swap space", options);
  for (const auto& note : self->with([](SwapSpace& space) { return space.notes(); })) {
    Closable::log(note);
  }
}

std::string describe(const PySwapSpace& self) {
  if (self.closed()) return "<tensorferry.SwapSpace: closed>";
  try {
    const SwapStats now = self.with([](SwapSpace& space) { return space.stats(); });
    return "<tensorferry.SwapSpace: " + std::to_string(now.tensors) + " tensors, " +
           std::to_string(now.tensor_bytes) + " bytes, " + std::to_string(now.read_bytes) +
           " read, " + std::to_string(now.written_bytes) + " written>";
  } catch (const Error& error) {  // as in a forked child
    return "<tensorferry.SwapSpace: " + error.hint() + ">";
  }
}

nb::list listed(const std::vector<std::string>& texts, nb::str (*show)(const std::string&)) {
  nb::list list;
  for (const std::string& text : texts) list.append(show(text));
  return list;
}

using SpaceClass = nb::class_<PySwapSpace>;

void bind_tensors(SpaceClass& space) {
  space
      .def("put", &put, nb::arg("key"), nb::arg("buffer").none(),
           nb::sig("def put(self, key: str, buffer: object) -> Operation"),
           "Starts to write a tensor under a name and returns at once.\n\nDo not change the "
           "memory before the operation ends: until then readers get the tensor from it. "
           "Another put of the same name replaces the tensor as a whole: readers get the old "
           "bytes or the new ones, and a put that fails changes nothing. A full drive raises "
           "OSError (ENOSPC) with the bytes needed and free.")
      .def("get", &get, nb::arg("key"), nb::arg("buffer").none(), nb::arg("offset") = 0,
           nb::sig("def get(self, key: str, buffer: object, offset: int = 0) -> Operation"),
           "Starts to fill the buffer with a tensor, or with a part of it from `offset` on, and "
           "returns at once.")
      .def(
          "prefetch",
          [](PySwapSpace& self, const std::string& key) {
            return self.with([&](SwapSpace& opened) { return opened.prefetch(key); });
          },
          nb::arg("key"),
          "Begins to read a tensor into the buffers, for the next fetch() or get() of it. It "
          "is a hint: returns False if the buffers have no room now or there is nothing to "
          "read.")
      .def("fetch", &fetch, nb::arg("key"), nb::arg("timeout") = nb::none(),
           nb::sig("def fetch(self, key: str, timeout: float | None = None) -> tuple[SwapBuffer, "
                   "Operation]"),
           "Returns a tensor in one of the buffers and the operation that reads it. Waits for "
           "room, not for the bytes; raises TimeoutError if `timeout` seconds pass first.")
      .def("take", &take, nb::arg("bytes"), nb::arg("timeout") = nb::none(), nb::kw_only(),
           nb::arg("until") = nb::none(),
           nb::sig("def take(self, bytes: int, timeout: float | None = None, *, "
                   "until: Operation | None = None) -> SwapBuffer"),
           "Returns memory of the buffers, with unknown content, to fill and to put. Waits for "
           "room; raises TimeoutError if `timeout` seconds pass or the operation `until` ends "
           "first.")
      .def(
          "drop",
          [](PySwapSpace& self, const std::string& key) {
            return self.with([&](SwapSpace& opened) { return opened.drop(key); });
          },
          nb::arg("key"), "Forgets a tensor. Returns False if no tensor has that name.")
      .def("view", &view, nb::arg("parts"),
           nb::sig("def view(self, parts: Iterable[tuple[str, int, int]]) -> SwapView"),
           "Maps parts (key, offset, bytes) of tensors from the drive as one stretch of "
           "memory. Offsets, and all sizes but the last, must be whole pages (mmap.PAGESIZE).");
}

void bind_facts(SpaceClass& space) {
  space
      .def(
          "size",
          [](PySwapSpace& self, const std::string& key) {
            return self.with([&](SwapSpace& opened) { return opened.size(key); });
          },
          nb::arg("key"),
          "Returns the size of a tensor in bytes; None if no tensor has that "
          "name.")
      .def(
          "__contains__",
          [](PySwapSpace& self, const std::string& key) {
            return self.with([&](SwapSpace& opened) { return opened.size(key).has_value(); });
          },
          nb::arg("key"))
      .def(
          "reserve",
          [](PySwapSpace& self, nb::handle bytes) {
            const std::uint64_t wanted = to_bytes(bytes, "bytes");
            self.with([&](SwapSpace& opened) { opened.reserve(wanted); });
          },
          nb::arg("bytes"), nb::sig("def reserve(self, bytes: int) -> None"),
          "Reserves space on the drives ahead of need. Raises OSError (ENOSPC) if they have "
          "less.")
      .def("stats", &stats, nb::sig("def stats(self) -> dict[str, Any]"),
           "Counts what the space holds and what it has moved.")
      .def_prop_ro(
          "directories",
          [](const PySwapSpace& self) {
            return listed(self.with([](SwapSpace& opened) { return opened.directories(); }),
                          &path_text);
          },
          nb::sig("def directories(self) -> list[str]"),
          "The directories of this space, one "
          "in each of the given ones.")
      .def_prop_ro(
          "notes",
          [](const PySwapSpace& self) {
            return listed(self.with([](SwapSpace& opened) { return opened.notes(); }), &shown);
          },
          nb::sig("def notes(self) -> list[str]"),
          "What the user should know: a directory in memory, another live run, leftovers "
          "removed.")
      .def_prop_ro(
          "engine_reason",
          [](const PySwapSpace& self) {
            return self.with([](SwapSpace& opened) { return opened.engine_reason(); });
          },
          "Which engine moves the bytes, and why.")
      .def("__repr__", &describe);
}

}  // namespace

// Operations in flight are of no use once the files are gone.
template <>
bool ClosableOf<SwapSpace>::finish(Ending ending, Clock::time_point deadline) {
  if (ending == Ending::with_writes) cancel_all();
  return all_done(deadline);
}

template <>
void ClosableOf<SwapSpace>::cancel_all() noexcept {
  cancel_held();
}

void bind_swap(nb::module_& module) {
  nb::class_<SwapBuffer>(module, "SwapBuffer", nb::type_slots(memory_slots<SwapBuffer>),
                         R"(A part of the page-locked buffers of a SwapSpace, in whole pages.

It has the buffer protocol: torch.frombuffer() and NumPy make tensors of it, which keep it alive.
The space uses its memory again when all of them are gone and no operation needs it. As with
PinnedBuffer, a forked child does not inherit the memory, whether it is page-locked or not.
)")
      .def("__len__", [](const SwapBuffer& self) { return self.bytes().size(); });
  nb::class_<SwapView>(module, "SwapView", nb::type_slots(memory_slots<SwapView>),
                       R"(Tensors on the drive, mapped into memory.

It has the buffer protocol. The kernel loads pages when they are touched and drops them when memory
gets short. Writes to it never reach the drive. It shows the bytes from the time it was made.
)")
      .def("__len__", [](const SwapView& self) { return self.bytes().size(); });

  SpaceClass space(module, "SwapSpace",
                   R"(Keeps tensors by name, on one or several drives.

It makes a directory of its own in each of the given ones and removes it at the end. It stripes
tensors over all directories, by the speed of their drives. take(), fetch() and prefetch() share
`buffer_bytes` of memory, which is all that the space uses: a call that finds no room waits. The
memory is page-locked, unless pin_memory=False. `run` and `rank` name the directory. With
checksums=True each put computes a checksum, by which snapshot() finds bytes that have changed.

It belongs to the process that opened it: a forked child that uses it gets a ChildProcessError.

>>> import tensorferry
>>> with tensorferry.SwapSpace(".", buffer_bytes=1 << 20) as space:
...     operation = space.put("layer 0", b"weights")   # returns at once
...     back = bytearray(7)
...     _ = space.get("layer 0", back).wait()
...     back.decode()
'weights'
)");
  space.def("__init__", &open_space, nb::arg("directories"), nb::kw_only(),
            nb::arg("buffer_bytes") = std::size_t{256} << 20, nb::arg("run") = "",
            nb::arg("rank") = 0, nb::arg("engine") = "auto", nb::arg("block_bytes") = nb::none(),
            nb::arg("queue_depth") = nb::none(), nb::arg("workers") = nb::none(),
            nb::arg("submit") = "batch", nb::arg("overlap") = true, nb::arg("pin_memory") = true,
            nb::arg("checksums") = false,
            nb::sig("def __init__(self, directories: _Path | Iterable[_Path], *, buffer_bytes: int "
                    "= 268435456, run: str = '', rank: int = 0, engine: Literal['auto', "
                    "'io_uring', 'libaio', 'threads'] = 'auto', block_bytes: int | None = None, "
                    "queue_depth: int | None = None, workers: int | None = None, submit: "
                    "Literal['batch', 'single'] = 'batch', overlap: bool = True, pin_memory: bool "
                    "= True, checksums: bool = False) -> None"));
  bind_tensors(space);
  bind_facts(space);
  bind_snapshots(module, space);
  bind_closing(
      space, "def __enter__(self) -> SwapSpace",
      "Waits for all operations and closes the space. Raises the first failure that the "
      "program has not seen.",
      "Does the same as close(). After an exception it cancels the operations in flight: their "
      "files go anyway.");
}

}  // namespace tensorferry::python
