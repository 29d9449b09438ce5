#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <map>

#include "bindings.h"
#include "buffer.h"
#include "gil_release.h"

namespace tensorferry::python {

namespace {

struct PyPinnedBuffer;

// All live PinnedBuffers by their first byte. Guarded by the GIL.
std::map<const std::byte*, PyPinnedBuffer*>& live_buffers() {
  static auto& buffers = *new std::map<const std::byte*, PyPinnedBuffer*>();
  return buffers;
}

// Exports views of its memory, which keep it alive. The user has given up `retired` memory, but
// views of it may exist: it counts as ordinary memory, and is freed with the last view.
struct PyPinnedBuffer {
  PyPinnedBuffer(std::size_t bytes, const PinnedBufferOptions& options)
      : memory(make(bytes, options)) {
    live_buffers()[memory.data()] = this;
  }
  ~PyPinnedBuffer() {
    if (memory.data() != nullptr) live_buffers().erase(memory.data());
  }
  PyPinnedBuffer(const PyPinnedBuffer&) = delete;
  PyPinnedBuffer& operator=(const PyPinnedBuffer&) = delete;

  void free() {
    if (exports > 0) {
      throw nb::buffer_error("views of this PinnedBuffer still exist; delete them first");
    }
    const std::byte* const first = memory.data();
    memory.free();
    live_buffers().erase(first);
  }

  // Whether it was made before a fork: a child has nothing at its addresses.
  [[nodiscard]] bool of_parent() const noexcept {
    return memory.size() > 0 && !is_pinned(memory.bytes());
  }

  static PinnedBuffer make(std::size_t bytes, const PinnedBufferOptions& options) {
    const GilRelease released;  // zeroing and locking takes time
    return PinnedBuffer(bytes, options);
  }

  PinnedBuffer memory;
  Py_ssize_t exports = 0;
  bool retired = false;
};

PyPinnedBuffer* find_buffer(std::span<const std::byte> bytes) {
  auto next = live_buffers().upper_bound(bytes.data());
  if (next == live_buffers().begin()) return nullptr;
  PyPinnedBuffer* buffer = std::prev(next)->second;
  const std::span<std::byte> all = buffer->memory.bytes();
  const auto skipped = static_cast<std::size_t>(bytes.data() - all.data());
  return skipped <= all.size() && bytes.size() <= all.size() - skipped ? buffer : nullptr;
}

int get_buffer(PyObject* object, Py_buffer* view, int flags) {
  auto* self = nb::inst_ptr<PyPinnedBuffer>(object);
  if (self->memory.data() == nullptr) {
    PyErr_SetString(PyExc_BufferError, "this PinnedBuffer has been freed");
    return -1;
  }
  if (self->of_parent()) {
    PyErr_SetString(PyExc_BufferError,
                    "this PinnedBuffer was made before fork() and belongs to the parent; make "
                    "another one in the child");
    return -1;
  }
  const int got = PyBuffer_FillInfo(view, object, self->memory.data(),
                                    static_cast<Py_ssize_t>(self->memory.size()), 0, flags);
  if (got == 0) ++self->exports;
  return got;
}

void release_buffer(PyObject* object, Py_buffer* /*view*/) {
  --nb::inst_ptr<PyPinnedBuffer>(object)->exports;
}

PyType_Slot buffer_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void*>(&release_buffer)},
    {0, nullptr},
};

bool is_pinned_buffer(nb::handle object) {
  std::span<const std::byte> bytes;
  if (is_tensor(object)) {
    bytes = tensor_bytes(object);
  } else {
    try {
      bytes = Buffer(object, Use::take).bytes();
    } catch (...) {
      PyErr_Clear();
      return false;
    }
  }
  if (bytes.empty()) return false;
  if (const PyPinnedBuffer* ours = find_buffer(bytes)) return !ours->retired && !ours->of_parent();
  if (!is_tensor(object)) return is_pinned(bytes);
  return nb::cast<bool>(object.attr("is_pinned")());  // by torch itself
}

// Gives up the memory that begins at `address`. Returns false if it is not, or no longer, ours.
bool retire(std::uintptr_t address) {
  const auto found = live_buffers().find(reinterpret_cast<const std::byte*>(address));
  if (found == live_buffers().end() || found->second->retired) return false;
  found->second->retired = true;
  return true;
}

nb::dict pinned_stats() {
  std::size_t bytes = 0;
  std::size_t locked = 0;
  std::string reason;
  for (const auto& [first, buffer] : live_buffers()) {
    if (buffer->of_parent()) continue;
    bytes += buffer->memory.size();
    if (buffer->memory.locked()) locked += buffer->memory.size();
    if (reason.empty()) reason = buffer->memory.lock_reason();
  }
  nb::dict stats;
  stats["pinned_bytes"] = bytes;
  stats["locked_bytes"] = locked;
  stats["lock_reason"] = reason;
  return stats;
}

std::string describe(const PyPinnedBuffer& self) {
  if (self.memory.data() == nullptr) return "<tensorferry.PinnedBuffer: freed>";
  if (self.of_parent())
    return "<tensorferry.PinnedBuffer: made before fork(), belongs to the parent>";
  std::string text = "<tensorferry.PinnedBuffer: " + std::to_string(self.memory.size()) + " bytes";
  text += self.memory.locked() ? ", locked" : ", not locked: " + self.memory.lock_reason();
  return text + ">";
}

void make_buffer(PyPinnedBuffer* self, nb::handle bytes, bool known_to_cuda, nb::handle numa_node) {
  PinnedBufferOptions options;
  options.cuda = known_to_cuda ? KnownToCuda::yes : KnownToCuda::no;
  if (!numa_node.is_none()) {
    constexpr std::uint64_t most = std::numeric_limits<int>::max();
    const std::uint64_t node = to_bytes(numa_node, "numa_node", "allocate page-locked memory");
    options.numa_node = static_cast<int>(std::min(node, most));
  }
  new (self) PyPinnedBuffer(to_bytes(bytes, "bytes"), options);
}

void bind_buffers(nb::module_& module) {
  nb::class_<PyPinnedBuffer>(module, "PinnedBuffer", nb::type_slots(buffer_slots),
                             R"(Page-locked memory of the requested size, in whole pages.

It has the buffer protocol: NumPy and torch can make views of it, and a view keeps it alive. In a
process that uses CUDA it is registered with CUDA, so that copies to and from GPUs do not block;
known_to_cuda=False leaves that to the caller. On a machine with several NUMA nodes, numa_node says
which one the memory comes from, as long as that has any; None leaves it to the system.

After a fork only the parent has the memory, so that no fork copies it. In the child, making a view
raises BufferError and a transfer raises OSError; a child that touches a view or tensor from before
the fork ends with SIGSEGV. Allocate in the child what the child uses.

>>> import tensorferry
>>> buffer = tensorferry.PinnedBuffer(1 << 20)
>>> memoryview(buffer)[:4].tolist()
[0, 0, 0, 0]
)")
      .def("__init__", &make_buffer, nb::arg("bytes"), nb::kw_only(),
           nb::arg("known_to_cuda") = true, nb::arg("numa_node") = nb::none(),
           nb::sig("def __init__(self, bytes: int, *, known_to_cuda: bool = True, "
                   "numa_node: int | None = None) -> None"))
      .def("free", &PyPinnedBuffer::free,
           "Frees the memory now. Raises BufferError while views of it exist. Operations in "
           "flight keep it until they end.")
      .def("__len__", [](const PyPinnedBuffer& self) { return self.memory.size(); })
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> PinnedBuffer"))
      .def(
          "__exit__",
          [](PyPinnedBuffer& self, const nb::args&) {
            if (self.memory.data() != nullptr) self.free();
          },
          nb::sig("def __exit__(self, *args: object) -> None"))
      .def_prop_ro("address",
                   [](const PyPinnedBuffer& self) {
                     return reinterpret_cast<std::uintptr_t>(self.memory.data());
                   })
      .def_prop_ro("locked", [](const PyPinnedBuffer& self) { return self.memory.locked(); })
      .def_prop_ro(
          "lock_reason", [](const PyPinnedBuffer& self) { return self.memory.lock_reason(); },
          "Why the memory is not locked, with the limit and how to raise it; empty if it is "
          "locked.")
      .def_prop_ro("huge_page_reason",
                   [](const PyPinnedBuffer& self) { return self.memory.huge_page_reason(); })
      .def_prop_ro(
          "numa_reason", [](const PyPinnedBuffer& self) { return self.memory.numa_reason(); },
          "Why the system refused to take the memory from numa_node; else empty.")
      .def("__repr__", &describe);
}

void bind_gds(nb::module_& module) {
  module.def(
      "gds_support",
      [] {
        const GdsSupport support = gds_support();
        const char* const modes[] = {"none", "compat", "direct"};
        return nb::make_tuple(modes[static_cast<std::size_t>(support.mode)], support.reason);
      },
      nb::sig("def gds_support() -> tuple[str, str]"),
      "Returns how far GPUDirect Storage works here ('none', 'compat' or 'direct') and the "
      "reason.");
  module.def(
      "gds_counts",
      [] {
        const GdsCounts counts = gds_counts();
        nb::dict told;
        told["requests"] = counts.requests;
        told["registered_requests"] = counts.registered_requests;
        told["in_flight_max"] = counts.in_flight_max;
        return told;
      },
      nb::sig("def gds_counts() -> dict[str, int]"),
      "Counts the requests of this process to cuFile so far.");
  module.def(
      "register_gpu_memory",
      [](nb::handle tensor) {
        register_gpu_memory(Buffer(tensor, Use::fill, Reach::gpu_too).bytes());
      },
      nb::arg("tensor").none(), "Registers a tensor of a GPU with cuFile.");
  module.def(
      "unregister_gpu_memory",
      [](nb::handle tensor) {
        return unregister_gpu_memory(Buffer(tensor, Use::fill, Reach::gpu_too).bytes().data());
      },
      nb::arg("tensor").none(),
      "Undoes register_gpu_memory(). Returns False if the tensor was "
      "not registered.");
}

}  // namespace

void bind_memory(nb::module_& module) {
  bind_buffers(module);
  bind_gds(module);
  module.def("is_pinned", &is_pinned_buffer, nb::arg("buffer").none(),
             "Returns whether tensorferry or torch has page-locked the whole buffer. Returns "
             "False, never an error, for an object without memory.");
  module.def("retire", &retire, nb::arg("address"),
             "Gives up the PinnedBuffer that begins at `address`. Its views stay valid.");
  module.def("pinned_stats", &pinned_stats, nb::sig("def pinned_stats() -> dict[str, Any]"));
  module.def(
      "byte_count",
      [](nb::handle buffer) { return Buffer(buffer, Use::take, Reach::gpu_too).bytes().size(); },
      nb::arg("buffer").none());
  module.def("never_fill", &never_fill, nb::arg("type"), nb::arg("refusal"),
             nb::sig("def never_fill(type: type, refusal: Callable[[str], Exception]) -> None"),
             "Refuses to read into tensors of this class, and raises refusal(what).");
  module.def(
      "copy",
      [](nb::handle to, nb::handle from) {
        const Buffer target(to, Use::fill);
        const Buffer source(from, Use::take);
        if (target.bytes().size() != source.bytes().size()) {
          throw invalid("copy", "the destination holds " + std::to_string(target.bytes().size()) +
                                    " bytes and the source " +
                                    std::to_string(source.bytes().size()));
        }
        in_pieces(target.bytes().size(), [&](std::size_t begin, std::size_t bytes) {
          copy(target.bytes().subspan(begin, bytes), source.bytes().subspan(begin, bytes));
        });
      },
      nb::arg("to").none(), nb::arg("source").none(),
      nb::sig("def copy(to: object, source: object) -> None"),
      "Copies memory with the widest instructions of the processor. The buffers must not "
      "overlap.");
}

}  // namespace tensorferry::python
