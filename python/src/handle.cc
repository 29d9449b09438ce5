#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <set>
#include <unordered_map>

#include "bindings.h"
#include "flight.h"
#include "unlocked.h"

namespace tensorferry::python {

namespace {

// Up to here a synchronous transfer is one request, made by the calling thread.
constexpr std::size_t inline_bytes_max = std::size_t{1} << 20;

class PyHandle;

// For the end of the interpreter. Guarded by the GIL.
std::set<PyHandle*>& live_handles() {
  static auto& handles = *new std::set<PyHandle*>();
  return handles;
}

class PyHandle {
 public:
  explicit PyHandle(const HandleOptions& options) : handle_(make(options)) {
    live_handles().insert(this);
  }

  ~PyHandle() {
    live_handles().erase(this);
    end();
  }
  PyHandle(const PyHandle&) = delete;
  PyHandle& operator=(const PyHandle&) = delete;

  // Calls `use` with the handle and without the GIL. Another thread may close it meanwhile: the
  // last user ends it.
  template <typename Use>
  auto with_handle(const Use& use) const {
    std::shared_ptr<Handle> held = handle_;
    if (held == nullptr || closing_) throw invalid("use handle", "this Handle is closed");
    const Unlocked unlocked;
    const std::shared_ptr<Handle> handle = std::move(held);
    return use(*handle);
  }

  [[nodiscard]] bool closed() const noexcept { return handle_ == nullptr; }

  // Keeps the flight until it is done. Every so often lets go of those that are.
  PyOperation launch(std::shared_ptr<Flight> flight) {
    if (closed()) {  // while the operation was started
      flight->cancel_and_reap();
      return {std::move(flight)};
    }
    flights_.push_back(flight);
    for (const Buffer& buffer : flight->buffers) launched_bytes_ += buffer.bytes().size();
    if (flights_.size() >= sweep_at_ || launched_bytes_ > sweep_bytes) sweep();
    return {std::move(flight)};
  }

  // Waits for everything in flight, ends, and throws the first failure that nobody has seen.
  void close() {
    if (closed()) return;
    closing_ = true;  // no new work: the wait shall have an end
    while (!flights_.empty()) {
      std::vector<std::shared_ptr<Flight>> flights = std::exchange(flights_, {});
      for (std::size_t i = 0; i < flights.size(); ++i) {
        const bool seen = flights[i]->seen;
        try {
          (void)flights[i]->wait(-1);
        } catch (const Error& error) {
          if (!seen) keep_unseen(error);
        } catch (...) {  // Ctrl-C: it is open again, with what was not waited for
          flights_.insert(flights_.end(), flights.begin() + static_cast<std::ptrdiff_t>(i),
                          flights.end());
          closing_ = false;
          throw;
        }
      }
    }
    end();
    if (const auto error = std::exchange(unseen_, std::nullopt)) throw Error(*error);
  }

  // Cancels what is in flight and ends. When it returns, no memory is in use, also if other threads
  // are still in a call of the handle. What failed unseen, or was cut short, goes to the log.
  void end() {
    std::shared_ptr<Handle> ending = std::exchange(handle_, nullptr);
    if (ending == nullptr) return;
    const std::vector<std::shared_ptr<Flight>> flights = std::exchange(flights_, {});
    std::size_t cut_short = 0;
    for (const auto& flight : flights) cut_short += !flight->operation.done() && !flight->seen;
    {
      const Unlocked unlocked;
      for (const auto& flight : flights) flight->operation.cancel();
      for (const auto& flight : flights) flight->reap();
      ending.reset();
    }
    if (cut_short > 0) {
      log(std::to_string(cut_short) + " operations were cancelled because their handle was ended");
    }
    for (const auto& flight : flights) {
      const auto error = flight->seen ? std::nullopt : flight->operation.error();
      if (error && error->code() != ECANCELED) keep_unseen(*error);
      flight->let_go();
    }
  }

 private:
  // So much memory may wait to be let go of.
  static constexpr std::size_t sweep_bytes = std::size_t{256} << 20;

  static std::shared_ptr<Handle> make(const HandleOptions& options) {
    const Unlocked unlocked;
    return std::make_shared<Handle>(options);
  }

  static void log(const std::string& text) noexcept {
    try {
      nb::module_::import_("logging")
          .attr("getLogger")("tensorferry")
          .attr("warning")("%s", shown(text));
    } catch (...) {  // a handler of the log that raises must not lose an operation
      PyErr_Clear();
    }
  }

  // The first is raised by close(); all are logged.
  void keep_unseen(const Error& error) noexcept {
    if (!unseen_) unseen_ = error;
    log(std::string("an operation failed that nobody waited for: ") + error.what());
  }

  // Python may run only at the end, when everything is in its place: finalizers may call back.
  void sweep() {
    std::vector<std::shared_ptr<Flight>> done;
    std::erase_if(flights_, [&done](const std::shared_ptr<Flight>& flight) {
      if (!flight->operation.done()) return false;
      done.push_back(flight);
      // One that failed is kept while the user may still ask.
      return flight->seen || flight.use_count() == 2 || !flight->operation.error();
    });
    sweep_at_ = std::max<std::size_t>(64, 2 * flights_.size());
    launched_bytes_ = 0;
    for (const auto& flight : done) {
      const bool forgotten = !flight->seen && flight.use_count() == 1;
      const auto error = forgotten ? flight->operation.error() : std::nullopt;
      if (error) keep_unseen(*error);
      flight->let_go();
    }
  }

  std::shared_ptr<Handle> handle_;
  std::vector<std::shared_ptr<Flight>> flights_;
  std::size_t sweep_at_ = 64;
  std::size_t launched_bytes_ = 0;
  bool closing_ = false;
  std::optional<Error> unseen_;
};

Durability parse_durability(const std::string& text) {
  if (text == "none") return Durability::none;
  if (text == "data") return Durability::data;
  if (text == "full") return Durability::full;
  throw invalid("write", "durability is '" + text + "'; it must be 'none', 'data' or 'full'");
}

// A count of which None means "choose". Zero would mean the same in C++; here it is an error.
std::uint64_t chosen(nb::handle number, const char* name, std::uint64_t most) {
  if (number.is_none()) return 0;
  const std::uint64_t value = to_bytes(number, name);
  if (value == 0 || value > most) {
    throw invalid("open handle", std::string(name) + " is " + std::to_string(value) +
                                     "; it must be from 1 to " + std::to_string(most) +
                                     ", or None for what suits the device");
  }
  return value;
}

void make_handle(PyHandle* self, const std::string& engine, nb::handle block_bytes,
                 nb::handle queue_depth, nb::handle workers, const std::string& submit,
                 bool overlap, nb::handle slot_bytes) {
  HandleOptions options;
  options.engine = parse_engine_kind(engine);
  options.block_bytes = chosen(block_bytes, "block_bytes", std::uint64_t{1} << 62);
  options.queue_depth = static_cast<unsigned>(chosen(queue_depth, "queue_depth", UINT32_MAX));
  options.workers = static_cast<unsigned>(chosen(workers, "workers", UINT32_MAX));
  if (submit != "batch" && submit != "single") {
    throw invalid("open handle", "submit is '" + submit + "'; it must be 'batch' or 'single'");
  }
  options.submit = submit == "single" ? Submit::single : Submit::batch;
  options.overlap = overlap ? Overlap::on : Overlap::off;
  if (!slot_bytes.is_none()) options.slot_bytes = to_bytes(slot_bytes, "slot_bytes");
  new (self) PyHandle(options);
}

std::shared_ptr<Flight> fly(Operation operation, Buffer buffer) {
  auto flight = std::make_shared<Flight>(Flight{std::move(operation), {}, false});
  flight->buffers.push_back(std::move(buffer));
  return flight;
}

PyOperation read(PyHandle& self, nb::handle buffer, nb::handle file, nb::handle offset) {
  Buffer memory(buffer, Use::fill);
  const File target = to_file(file, Access::read);
  const std::uint64_t at = to_bytes(offset, "offset");
  Operation operation =
      self.with_handle([&](Handle& handle) { return handle.read(memory.bytes(), target, at); });
  return self.launch(fly(std::move(operation), std::move(memory)));
}

PyOperation write(PyHandle& self, nb::handle buffer, nb::handle file, nb::handle offset,
                  const std::string& durability) {
  Buffer memory(buffer, Use::take);
  const Durability lasting = parse_durability(durability);
  const std::uint64_t at = to_bytes(offset, "offset");
  const File target = to_file(file, Access::write);
  Operation operation = self.with_handle(
      [&](Handle& handle) { return handle.write(memory.bytes(), target, at, lasting); });
  return self.launch(fly(std::move(operation), std::move(memory)));
}

// Runs a transfer to its end. A small one is a single call; a large one can be interrupted, and
// has then let go of the buffer.
template <typename Now, typename Start>
void run(PyHandle& self, std::span<const std::byte> bytes, const Now& now, const Start& start) {
  if (bytes.size() <= inline_bytes_max) return self.with_handle(now);
  Flight flight{self.with_handle(start), {}, false};
  try {
    (void)flight.wait(-1);
  } catch (nb::python_error&) {
    flight.cancel_and_reap();
    throw;
  }
}

void read_now(PyHandle& self, nb::handle buffer, nb::handle file, nb::handle offset) {
  const Buffer memory(buffer, Use::fill);
  const std::uint64_t at = to_bytes(offset, "offset");
  const File target = to_file(file, Access::read);
  run(
      self, memory.bytes(), [&](Handle& handle) { handle.read_now(memory.bytes(), target, at); },
      [&](Handle& handle) { return handle.read(memory.bytes(), target, at); });
}

void write_now(PyHandle& self, nb::handle buffer, nb::handle file, nb::handle offset,
               const std::string& durability) {
  const Buffer memory(buffer, Use::take);
  const Durability lasting = parse_durability(durability);
  const std::uint64_t at = to_bytes(offset, "offset");
  const File target = to_file(file, Access::write);
  run(
      self, memory.bytes(),
      [&](Handle& handle) { handle.write_now(memory.bytes(), target, at, lasting); },
      [&](Handle& handle) { return handle.write(memory.bytes(), target, at, lasting); });
}

// The transfers of one *_many call. A path that comes often is opened once.
template <typename Transfer>
struct Many {
  std::vector<Transfer> transfers;
  std::vector<Buffer> buffers;

  Many(nb::handle list, Use use, Access access) {
    std::unordered_map<std::string, File> opened;
    for (const nb::handle item : nb::iter(list)) {
      const nb::object row = nb::steal(PySequence_Tuple(item.ptr()));
      if (!row.is_valid()) throw nb::python_error();
      const std::size_t fields = nb::len(row);
      if (fields != 2 && fields != 3) {
        throw invalid("transfer", "each item must be (buffer, file) or (buffer, file, offset)");
      }
      Buffer buffer(row[0], use);
      const std::uint64_t at = fields == 3 ? to_bytes(nb::object(row[2]), "offset") : 0;
      const nb::object file = row[1];
      if (PyUnicode_Check(file.ptr()) != 0) {
        const std::string path = to_path(file);
        auto known = opened.find(path);
        if (known == opened.end()) known = opened.emplace(path, to_file(file, access)).first;
        transfers.push_back({buffer.bytes(), known->second, at});
      } else {
        transfers.push_back({buffer.bytes(), to_file(file, access), at});
      }
      buffers.push_back(std::move(buffer));
    }
  }

  PyOperation launch(PyHandle& handle, Operation operation) {
    return handle.launch(
        std::make_shared<Flight>(Flight{std::move(operation), std::move(buffers), false}));
  }
};

PyOperation read_many(PyHandle& self, nb::handle transfers) {
  Many<ReadTransfer> many(transfers, Use::fill, Access::read);
  return many.launch(
      self, self.with_handle([&](Handle& handle) { return handle.read_many(many.transfers); }));
}

PyOperation write_many(PyHandle& self, nb::handle transfers, const std::string& durability) {
  const Durability lasting = parse_durability(durability);
  Many<WriteTransfer> many(transfers, Use::take, Access::write);
  return many.launch(self, self.with_handle([&](Handle& handle) {
    return handle.write_many(many.transfers, lasting);
  }));
}

nb::dict stats(const PyHandle& self) {
  const Stats now = self.with_handle([](Handle& handle) { return handle.stats(); });
  nb::dict out;
  const auto put = [&out](const char* name, auto value) { out[name] = nb::cast(value); };
  put("operations", now.operations);
  put("failed_operations", now.failed_operations);
  put("cancelled_operations", now.cancelled_operations);
  put("inline_operations", now.inline_operations);
  put("requests", now.requests);
  put("read_bytes", now.read_bytes);
  put("written_bytes", now.written_bytes);
  put("bounced_bytes", now.bounced_bytes);
  put("fixed_requests", now.fixed_requests);
  put("retries", now.retries);
  put("short_transfers", now.short_transfers);
  put("refused_submissions", now.refused_submissions);
  put("fallbacks", now.fallbacks);
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
  const auto [now, engine] = self.with_handle(
      [](Handle& handle) { return std::pair(handle.stats(), std::string(handle.engine())); });
  return "<tensorferry.Handle: " + engine + ", " + std::to_string(now.operations) +
         " operations, " + std::to_string(now.read_bytes) + " bytes read, " +
         std::to_string(now.written_bytes) + " written>";
}

// At the end of the interpreter, while Python still works. Those who wait are woken by the end of
// their handle and shall have the GIL before it is gone.
void close_all() {
  for (PyHandle* handle : std::vector<PyHandle*>(live_handles().begin(), live_handles().end())) {
    if (live_handles().contains(handle)) handle->end();
  }
  Unlocked::let_others_return();
}

using HandleClass = nb::class_<PyHandle>;

void bind_transfers(HandleClass& handle) {
  handle
      .def("read", &read, nb::arg("buffer").none(), nb::arg("file").none(), nb::arg("offset") = 0,
           nb::sig("def read(self, buffer: object, file: _File, offset: int = 0) -> Operation"),
           "Starts to fill the buffer from the file and returns at once.\n\nReading past the end "
           "of the file is an error.")
      .def("write", &write, nb::arg("buffer").none(), nb::arg("file").none(), nb::arg("offset") = 0,
           nb::arg("durability") = "none",
           nb::sig("def write(self, buffer: object, file: _File, offset: int = 0, durability: "
                   "Literal['none', 'data', 'full'] = 'none') -> Operation"),
           "Starts to write the buffer and returns at once.\n\nThe file is made or extended as "
           "needed, never cut. `durability` says what must have reached the drive before it is "
           "done: nothing, the data, or the data with all metadata and the directory entry.")
      .def("read_now", &read_now, nb::arg("buffer").none(), nb::arg("file").none(),
           nb::arg("offset") = 0,
           nb::sig("def read_now(self, buffer: object, file: _File, offset: int = 0) -> None"),
           "Fills the buffer and returns when that is done. A small read is made by the calling "
           "thread itself.")
      .def("write_now", &write_now, nb::arg("buffer").none(), nb::arg("file").none(),
           nb::arg("offset") = 0, nb::arg("durability") = "none",
           nb::sig("def write_now(self, buffer: object, file: _File, offset: int = 0, durability: "
                   "Literal['none', 'data', 'full'] = 'none') -> None"),
           "Writes the buffer and returns when that is done.")
      .def("read_many", &read_many, nb::arg("transfers"),
           nb::sig("def read_many(self, transfers: Iterable[tuple[object, _File] | tuple[object, "
                   "_File, int]]) -> Operation"),
           "Reads many (buffer, file, offset) as one operation; neighbours in one file become one "
           "request.")
      .def("write_many", &write_many, nb::arg("transfers"), nb::arg("durability") = "none",
           nb::sig("def write_many(self, transfers: Iterable[tuple[object, _File] | tuple[object, "
                   "_File, int]], durability: Literal['none', 'data', 'full'] = 'none') -> "
                   "Operation"),
           "Writes many (buffer, file, offset) as one operation. They must not overlap.");
}

void bind_life(HandleClass& handle) {
  handle
      .def(
          "sync",
          [](PyHandle& self, nb::handle file, const std::string& durability) {
            const File target = to_file(file, Access::write);
            const Durability lasting = parse_durability(durability);
            Operation operation =
                self.with_handle([&](Handle& handle) { return handle.sync(target, lasting); });
            return self.launch(std::make_shared<Flight>(Flight{std::move(operation), {}, false}));
          },
          nb::arg("file").none(), nb::arg("durability") = "data",
          nb::sig("def sync(self, file: _File, durability: Literal['data', 'full'] = 'data') -> "
                  "Operation"),
          "Makes durable what writes that are done have written to the file.")
      .def("close", &PyHandle::close,
           "Waits for all operations and ends. Raises the first failure that nobody has seen.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> Handle"))
      .def(
          "__exit__",
          [](PyHandle& self, nb::handle type, nb::handle, nb::handle) {
            type.is_none() ? self.close() : self.end();
          },
          nb::arg().none(), nb::arg().none(), nb::arg().none(),
          nb::sig("def __exit__(self, type: object, value: object, traceback: object, /) -> None"),
          "As close(); after an exception what is in flight is cancelled instead.")
      .def_prop_ro("closed", &PyHandle::closed)
      .def_prop_ro(
          "engine",
          [](const PyHandle& self) {
            return self.with_handle([](Handle& handle) { return std::string(handle.engine()); });
          },
          "The engine in use, or that will be once something is queued.")
      .def_prop_ro(
          "engine_reason",
          [](const PyHandle& self) {
            return self.with_handle([](Handle& handle) { return handle.engine_reason(); });
          },
          "Why that one.")
      .def("stats", &stats, "What it has done so far: every retry and every fallback is counted.")
      .def("__repr__", &describe);
}

}  // namespace

void bind_handle(nb::module_& module) {
  HandleClass handle(module, "Handle", R"(What moves tensors: an engine, its workers, its limits.

All methods may be called from any number of threads at once. Buffers are torch tensors, NumPy
arrays, bytearrays, memoryviews and whatever has DLPack, of any type, size and alignment; files are
paths, File objects or descriptors. Settings that are None follow from the device.

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
      nb::arg("slot_bytes") = nb::none(),
      nb::sig("def __init__(self, engine: Literal['auto', 'io_uring', 'libaio', 'threads'] = "
              "'auto', *, block_bytes: int | None = None, queue_depth: int | None = None, "
              "workers: int | None = None, submit: Literal['batch', 'single'] = 'batch', "
              "overlap: bool = True, slot_bytes: int | None = None) -> None"));
  bind_transfers(handle);
  bind_life(handle);
  module.def("close_all", &close_all, "For the end of the interpreter.");
}

}  // namespace tensorferry::python
