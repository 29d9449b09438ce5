#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <unordered_map>

#include "bindings.h"
#include "closable.h"

namespace tensorferry::python {

namespace {

// Up to this size the calling thread makes a synchronous transfer itself, as one request.
constexpr std::size_t inline_bytes_max = std::size_t{1} << 20;

using PyHandle = ClosableOf<Handle>;

Durability parse_durability(const std::string& text) {
  if (text == "none") return Durability::none;
  if (text == "data") return Durability::data;
  if (text == "full") return Durability::full;
  throw invalid("write", "durability is '" + text + "'; it must be 'none', 'data' or 'full'");
}

void make_handle(PyHandle* self, const std::string& engine, nb::handle block_bytes,
                 nb::handle queue_depth, nb::handle workers, const std::string& submit,
                 bool overlap, nb::handle slot_bytes, double close_limit_seconds,
                 const std::string& polling, const std::string& priority, nb::handle rate) {
  HandleOptions options =
      handle_options(engine, block_bytes, queue_depth, workers, submit, overlap);
  if (!slot_bytes.is_none()) options.slot_bytes = to_bytes(slot_bytes, "slot_bytes", "open handle");
  options.close_limit_seconds = close_limit_seconds;
  options.polling = parse_polling(polling);
  options.priority = parse_priority(priority);
  if (!rate.is_none()) options.rate = to_rate(rate, "open handle");
  new (self) PyHandle("use handle", options);
}

std::vector<Buffer> alone(Buffer buffer) {
  std::vector<Buffer> buffers;
  buffers.push_back(std::move(buffer));
  return buffers;
}

PyOperation read(PyHandle& self, nb::handle buffer, nb::handle file, nb::handle offset,
                 nb::handle priority) {
  const std::optional<Priority> chosen = to_priority(priority);
  Buffer memory(buffer, Use::fill, Reach::gpu_too);
  const File target = to_file(file, Access::read);
  const std::uint64_t at = to_bytes(offset, "offset");
  Operation operation = self.with([&](Handle& handle) {
    return handle.read(memory.bytes(), target, at, memory.stream(), chosen);
  });
  return self.hold(std::move(operation), Moves::in, alone(std::move(memory)));
}

PyOperation write(PyHandle& self, nb::handle buffer, nb::handle file, nb::handle offset,
                  const std::string& durability, nb::handle priority) {
  const std::optional<Priority> chosen = to_priority(priority);
  Buffer memory(buffer, Use::take, Reach::gpu_too);
  const Durability lasting = parse_durability(durability);
  const std::uint64_t at = to_bytes(offset, "offset");
  const File target = to_file(file, Access::write);
  Operation operation = self.with([&](Handle& handle) {
    return handle.write(memory.bytes(), target, at, lasting, memory.stream(), chosen);
  });
  return self.hold(std::move(operation), Moves::out, alone(std::move(memory)));
}

// Runs a transfer to its end. A small one is a single call. Ctrl-C interrupts a large one; the
// buffer is then free. Waiting does not raise a priority that the caller chose.
template <typename Now, typename Start>
void run(PyHandle& self, std::span<const std::byte> bytes, std::optional<Priority> chosen,
         const Now& now, const Start& start) {
  if (bytes.size() <= inline_bytes_max) return self.with(now);
  std::optional<PriorityScope> scope;
  if (chosen) scope.emplace(*chosen);
  HeldOperation held{self.with(start), {}, false};
  try {
    (void)held.wait();
  } catch (nb::python_error&) {
    held.cancel_and_reap();
    throw;
  }
}

void read_now(PyHandle& self, nb::handle buffer, nb::handle file, nb::handle offset,
              nb::handle priority) {
  const std::optional<Priority> chosen = to_priority(priority);
  const Buffer memory(buffer, Use::fill, Reach::gpu_too);
  const std::uint64_t at = to_bytes(offset, "offset");
  const File target = to_file(file, Access::read);
  run(
      self, memory.bytes(), chosen,
      [&](Handle& handle) { handle.read_now(memory.bytes(), target, at, memory.stream(), chosen); },
      [&](Handle& handle) {
        return handle.read(memory.bytes(), target, at, memory.stream(), chosen);
      });
}

void write_now(PyHandle& self, nb::handle buffer, nb::handle file, nb::handle offset,
               const std::string& durability, nb::handle priority) {
  const std::optional<Priority> chosen = to_priority(priority);
  const Buffer memory(buffer, Use::take, Reach::gpu_too);
  const Durability lasting = parse_durability(durability);
  const std::uint64_t at = to_bytes(offset, "offset");
  const File target = to_file(file, Access::write);
  run(
      self, memory.bytes(), chosen,
      [&](Handle& handle) {
        handle.write_now(memory.bytes(), target, at, lasting, memory.stream(), chosen);
      },
      [&](Handle& handle) {
        return handle.write(memory.bytes(), target, at, lasting, memory.stream(), chosen);
      });
}

// A key for a file that must be opened: its path, or a NUL and the number of a descriptor. Empty
// for a File.
std::string name_of(nb::handle file) {
  if (PyUnicode_Check(file.ptr()) != 0 || PyBytes_Check(file.ptr()) != 0 ||
      nb::hasattr(file, "__fspath__")) {
    return to_path(file);
  }
  return PyLong_Check(file.ptr()) != 0 ? std::string(1, '\0') + nb::str(file).c_str() : "";
}

// The transfers of one *_many call. Opens each file once.
template <typename Transfer>
struct Many {
  std::vector<Transfer> transfers;
  std::vector<Buffer> buffers;

  Many(nb::handle list, Use use, Access access) {
    std::unordered_map<std::string, File> opened;
    const auto open = [&opened, access](const nb::object& file) {
      const std::string name = name_of(file);
      if (name.empty()) return to_file(file, access);
      const auto known = opened.find(name);
      if (known != opened.end()) return known->second;
      return opened.emplace(name, to_file(file, access)).first->second;
    };
    for (const nb::handle item : nb::iter(list)) {
      const nb::object row = nb::steal(PySequence_Tuple(item.ptr()));
      if (!row.is_valid()) throw nb::python_error();
      const std::size_t fields = nb::len(row);
      if (fields != 2 && fields != 3) {
        throw invalid("transfer", "each item must be (buffer, file) or (buffer, file, offset)");
      }
      Buffer buffer(row[0], use, Reach::gpu_too);
      const std::uint64_t at = fields == 3 ? to_bytes(nb::object(row[2]), "offset") : 0;
      transfers.push_back({buffer.bytes(), open(row[1]), at, buffer.stream()});
      buffers.push_back(std::move(buffer));
    }
  }

  PyOperation hold(PyHandle& handle, Operation operation, Moves moves) {
    return handle.hold(std::move(operation), moves, std::move(buffers));
  }
};

PyOperation read_many(PyHandle& self, nb::handle transfers, nb::handle priority) {
  const std::optional<Priority> chosen = to_priority(priority);
  Many<ReadTransfer> many(transfers, Use::fill, Access::read);
  Operation operation =
      self.with([&](Handle& handle) { return handle.read_many(many.transfers, chosen); });
  return many.hold(self, std::move(operation), Moves::in);
}

PyOperation write_many(PyHandle& self, nb::handle transfers, const std::string& durability,
                       nb::handle priority) {
  const std::optional<Priority> chosen = to_priority(priority);
  const Durability lasting = parse_durability(durability);
  Many<WriteTransfer> many(transfers, Use::take, Access::write);
  Operation operation =
      self.with([&](Handle& handle) { return handle.write_many(many.transfers, lasting, chosen); });
  return many.hold(self, std::move(operation), Moves::out);
}

nb::dict stats(const PyHandle& self) {
  const Stats now = self.with([](Handle& handle) { return handle.stats(); });
  nb::dict out;
  const auto put = [&out](const char* name, auto value) { out[name] = nb::cast(value); };
  for (const StatsCounter& counter : stats_counters) put(counter.name, now.*counter.value);
  nb::list reasons;
  for (const std::string& reason : now.fallback_reasons) reasons.append(reason);
  out["fallback_reasons"] = reasons;
  put("latency_ns_p50", now.latency_ns_p50);
  put("latency_ns_p90", now.latency_ns_p90);
  put("latency_ns_p99", now.latency_ns_p99);
  put("latency_ns_max", now.latency_ns_max);
  put("cpu_seconds", now.cpu_seconds);
  return out;
}

std::string describe(const PyHandle& self) {
  if (self.closed()) return "<tensorferry.Handle: closed>";
  try {
    const auto [now, engine] = self.with(
        [](Handle& handle) { return std::pair(handle.stats(), std::string(handle.engine())); });
    return "<tensorferry.Handle: " + engine + ", " + std::to_string(now.operations) +
           " operations, " + std::to_string(now.read_bytes) + " bytes read, " +
           std::to_string(now.written_bytes) + " written>";
  } catch (const Error& error) {  // as in a forked child
    return "<tensorferry.Handle: " + error.hint() + ">";
  }
}

using HandleClass = nb::class_<PyHandle>;

void bind_transfers(HandleClass& handle) {
  handle
      .def("read", &read, nb::arg("buffer").none(), nb::arg("file").none(), nb::arg("offset") = 0,
           nb::kw_only(), nb::arg("priority") = nb::none(),
           nb::sig("def read(self, buffer: object, file: _File, offset: int = 0, "
                   "*, priority: _Priority | None = None) -> Operation"),
           "Starts to fill the buffer from the file and returns at once.\n\nA read past the "
           "end of the file fails.")
      .def("write", &write, nb::arg("buffer").none(), nb::arg("file").none(), nb::arg("offset") = 0,
           nb::arg("durability") = "none", nb::kw_only(), nb::arg("priority") = nb::none(),
           nb::sig("def write(self, buffer: object, file: _File, offset: int = 0, durability: "
                   "Literal['none', 'data', 'full'] = 'none', *, priority: _Priority | None = "
                   "None) -> Operation"),
           "Starts to write the buffer and returns at once.\n\nMakes or extends the file as "
           "needed and never cuts it. `durability` says what must be on the drive before the "
           "operation ends: nothing, the data, or the data with all metadata and the directory "
           "entry.")
      .def("read_now", &read_now, nb::arg("buffer").none(), nb::arg("file").none(),
           nb::arg("offset") = 0, nb::kw_only(), nb::arg("priority") = nb::none(),
           nb::sig("def read_now(self, buffer: object, file: _File, offset: int = 0, "
                   "*, priority: _Priority | None = None) -> None"),
           "Fills the buffer from the file and returns when it is full. The calling thread "
           "itself makes a small read.")
      .def("write_now", &write_now, nb::arg("buffer").none(), nb::arg("file").none(),
           nb::arg("offset") = 0, nb::arg("durability") = "none", nb::kw_only(),
           nb::arg("priority") = nb::none(),
           nb::sig("def write_now(self, buffer: object, file: _File, offset: int = 0, durability: "
                   "Literal['none', 'data', 'full'] = 'none', *, priority: _Priority | None = "
                   "None) -> None"),
           "Writes the buffer and returns when the write is done.")
      .def("read_many", &read_many, nb::arg("transfers"), nb::kw_only(),
           nb::arg("priority") = nb::none(),
           nb::sig("def read_many(self, transfers: Iterable[tuple[object, _File] | tuple[object, "
                   "_File, int]], *, priority: _Priority | None = None) -> Operation"),
           "Reads many (buffer, file, offset) as one operation. Neighbours in one file become "
           "one request.")
      .def("write_many", &write_many, nb::arg("transfers"), nb::arg("durability") = "none",
           nb::kw_only(), nb::arg("priority") = nb::none(),
           nb::sig("def write_many(self, transfers: Iterable[tuple[object, _File] | tuple[object, "
                   "_File, int]], durability: Literal['none', 'data', 'full'] = 'none', *, "
                   "priority: _Priority | None = None) -> "
                   "Operation"),
           "Writes many (buffer, file, offset) as one operation. The ranges must not overlap.");
}

void bind_life(HandleClass& handle) {
  handle
      .def(
          "sync",
          [](PyHandle& self, nb::handle file, const std::string& durability, nb::handle priority) {
            const std::optional<Priority> chosen = to_priority(priority);
            const File target =
                to_file(file, Access::read);  // Access::write would create a missing file
            const Durability lasting = parse_durability(durability);
            Operation operation =
                self.with([&](Handle& handle) { return handle.sync(target, lasting, chosen); });
            return self.hold(std::move(operation), Moves::out);
          },
          nb::arg("file").none(), nb::arg("durability") = "data", nb::kw_only(),
          nb::arg("priority") = nb::none(),
          nb::sig("def sync(self, file: _File, durability: Literal['data', 'full'] = 'data', "
                  "*, priority: _Priority | None = None) -> Operation"),
          "Makes durable all that finished writes have written to the file.")
      .def_prop_ro(
          "engine",
          [](const PyHandle& self) {
            return self.with([](Handle& handle) { return std::string(handle.engine()); });
          },
          "The engine in use. Before the first transfer the handle knows no drive: this is "
          "then the choice without a profile.")
      .def_prop_ro(
          "engine_reason",
          [](const PyHandle& self) {
            return self.with([](Handle& handle) { return handle.engine_reason(); });
          },
          "Why the handle uses that engine.")
      .def(
          "cancel_all",
          [](const PyHandle& self) { self.with([](Handle& handle) { handle.cancel_all(); }); },
          "Cancels all operations in flight, writes too. The handle stays open.")
      .def("stats", &stats, nb::sig("def stats(self) -> dict[str, Any]"),
           "Counts what the handle has done so far, with every retry and "
           "every fallback.")
      .def("__repr__", &describe);
}

}  // namespace

// The held operations tell what failed unseen or was given up.
template <>
bool ClosableOf<Handle>::finish(Ending ending, Clock::time_point deadline) {
  std::shared_ptr<Handle> held = opened_;
  const GilRelease released;
  const std::shared_ptr<Handle> handle = std::move(held);
  try {
    return handle->close_until(deadline,
                               ending == Ending::with_all ? OpenReads::finish : OpenReads::cancel);
  } catch (const Error&) {
    return true;
  }
}

template <>
void ClosableOf<Handle>::cancel_all() noexcept {
  std::shared_ptr<Handle> held = opened_;
  if (held == nullptr) return;
  const GilRelease released;
  const std::shared_ptr<Handle> handle = std::move(held);
  handle->cancel_all();
}

namespace {

// A count; None means "choose". Zero would mean the same in C++; here it is an error. Handle
// refuses counts over its own limits.
template <typename Count>
Count chosen(nb::handle number, const char* name) {
  if (number.is_none()) return 0;
  const std::uint64_t value = to_bytes(number, name, "open handle");
  if (value == 0 || value > std::numeric_limits<Count>::max()) {
    const char* wanted =
        value == 0 ? "; it must be at least 1, or None to suit the device" : "; that is too large";
    throw invalid("open handle", name + (" is " + std::to_string(value)) + wanted);
  }
  return static_cast<Count>(value);
}

}  // namespace

HandleOptions handle_options(const std::string& engine, nb::handle block_bytes,
                             nb::handle queue_depth, nb::handle workers, const std::string& submit,
                             bool overlap) {
  HandleOptions options;
  options.engine = parse_engine_kind(engine);
  options.block_bytes = chosen<std::size_t>(block_bytes, "block_bytes");
  options.queue_depth = chosen<unsigned>(queue_depth, "queue_depth");
  options.workers = chosen<unsigned>(workers, "workers");
  if (submit != "batch" && submit != "single") {
    throw invalid("open handle", "submit is '" + submit + "'; it must be 'batch' or 'single'");
  }
  options.submit = submit == "single" ? Submit::single : Submit::batch;
  options.overlap = overlap ? Overlap::on : Overlap::off;
  return options;
}

void bind_handle(nb::module_& module) {
  HandleClass handle(module, "Handle", R"(Moves tensors with an engine, its workers and its limits.

Any number of threads may call its methods at once. Buffers are torch tensors of the CPU or of a
GPU, NumPy arrays, bytearrays, memoryviews and all objects with DLPack, of any type, size and
alignment; files are paths, File objects or descriptors. Settings that are None follow from the
device.

A handle finishes the writes that it has accepted: in close(), when an exception leaves `with`, when
the last reference to it goes, and at the end of the interpreter. cancel_all() gives them up.

`priority` is that of operations whose call names none, on threads without a PriorityScope. `rate`
is how many bytes all of its operations together may move in a second, until the handle closes.

>>> import tensorferry
>>> with tensorferry.Handle() as handle:
...     handle.write_now(b"0123456789", "data.bin")
...     part = bytearray(4)
...     operation = handle.read(part, "data.bin", offset=3)   # returns at once
...     operation.wait()
4
>>> bytes(part)
b'3456'
)");
  handle.def(
      "__init__", &make_handle, nb::arg("engine") = "auto", nb::kw_only(),
      nb::arg("block_bytes") = nb::none(), nb::arg("queue_depth") = nb::none(),
      nb::arg("workers") = nb::none(), nb::arg("submit") = "batch", nb::arg("overlap") = true,
      nb::arg("slot_bytes") = nb::none(), nb::arg("close_limit_seconds") = 30.0,
      nb::arg("polling") = "off", nb::arg("priority") = "normal", nb::arg("rate") = nb::none(),
      nb::sig(
          "def __init__(self, engine: Literal['auto', 'io_uring', 'libaio', 'threads', 'gds'] = "
          "'auto', *, block_bytes: int | None = None, queue_depth: int | None = None, "
          "workers: int | None = None, submit: Literal['batch', 'single'] = 'batch', "
          "overlap: bool = True, slot_bytes: int | None = None, close_limit_seconds: float = 30.0, "
          "polling: Literal['off', 'submission', 'completion'] = 'off', "
          "priority: _Priority = 'normal', rate: int | None = None) -> None"));
  bind_transfers(handle);
  bind_life(handle);
  bind_closing(
      handle, "def __enter__(self) -> Handle",
      "Waits for all operations and closes the handle. Raises the first failure that the "
      "program has not seen.\n\nIf nothing moves for `close_limit_seconds`, it gives up the "
      "operations that are left, and raises if one of them is a write. Ctrl-C raises "
      "KeyboardInterrupt and the handle goes on closing: call close() again to wait further.",
      "Does the same as close(). After an exception it finishes writes too and cancels reads; "
      "Ctrl-C gives up the writes that are left.");
  module.def("close_all", &Closable::end_all, "Closes all handles at the end of the interpreter.");
}

}  // namespace tensorferry::python
