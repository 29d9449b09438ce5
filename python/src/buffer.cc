#include "buffer.h"

#include <nanobind/ndarray.h>

#include <cstring>
#include <string>
#include <type_traits>

#include "tensorferry/gpu.h"

namespace tensorferry::python {

namespace {

// Attribute names, made once: a lookup must stay cheap beside a transfer of 4 KiB.
struct Names {
  static PyObject* intern(const char* text) { return PyUnicode_InternFromString(text); }
  PyObject* torch = intern("torch");
  PyObject* tensor = intern("Tensor");
  PyObject* strided = intern("strided");
  PyObject* layout = intern("layout");
  PyObject* is_cpu = intern("is_cpu");
  PyObject* is_cuda = intern("is_cuda");
  PyObject* get_device = intern("get_device");
  PyObject* device = intern("device");
  PyObject* is_contiguous = intern("is_contiguous");
  PyObject* is_complex = intern("is_complex");
  PyObject* is_conj = intern("is_conj");
  PyObject* is_neg = intern("is_neg");
  PyObject* nbytes = intern("nbytes");
  PyObject* data_ptr = intern("data_ptr");
  PyObject* untyped_storage = intern("untyped_storage");
};

const Names& names() {
  static const Names& made = *new Names();
  return made;
}

// The objects of torch that this file needs, once the program has imported it.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyObject* strided = nullptr;
};

const Torch* torch_if_imported() {
  static Torch found;
  if (found.tensor != nullptr) return &found;
  const nb::object module = nb::steal(PyImport_GetModule(names().torch));
  if (!module.is_valid()) {
    PyErr_Clear();
    return nullptr;
  }
  PyObject* strided = PyObject_GetAttr(module.ptr(), names().strided);
  PyObject* tensor = PyObject_GetAttr(module.ptr(), names().tensor);
  if (tensor == nullptr || strided == nullptr || !PyType_Check(tensor)) {  // half imported
    PyErr_Clear();
    Py_XDECREF(tensor);
    Py_XDECREF(strided);
    return nullptr;
  }
  found = {reinterpret_cast<PyTypeObject*>(tensor), strided};
  return &found;
}

// Set by never_fill().
struct NeverFilled {
  PyTypeObject* type = nullptr;
  PyObject* refusal = nullptr;
};

NeverFilled& never_filled() {
  static NeverFilled known;
  return known;
}

nb::object get(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

nb::object call(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_CallMethodObjArgs(object.ptr(), name, nullptr);
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

bool is_true(const nb::object& value) { return value.ptr() == Py_True; }

std::string kind_of(nb::handle object) {
  const nb::object type = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
  const std::string module = nb::str(type.attr("__module__")).c_str();
  const std::string name = nb::str(type.attr("__qualname__")).c_str();
  return module == "builtins" ? name : module + "." + name;
}

[[noreturn]] void refuse_type(const std::string& text) { throw nb::type_error(text.c_str()); }
[[noreturn]] void refuse_value(const std::string& text) { throw nb::value_error(text.c_str()); }

std::byte* pointer(const nb::object& number) {
  void* address = PyLong_AsVoidPtr(number.ptr());
  if (address == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return static_cast<std::byte*>(address);
}

std::size_t count(const nb::object& number) {
  const std::size_t value = PyLong_AsSize_t(number.ptr());
  if (value == static_cast<std::size_t>(-1) && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  return value;
}

const char* contiguous_advice(Use use) {
  return use == Use::fill ? "read into a contiguous one and copy it there with copy_()"
                          : "write x.contiguous()";
}

// The stream that torch uses now on the tensor's device. The private function, which compiled
// models use too, costs a twentieth of the public one.
CudaStream current_stream(nb::handle tensor) {
  static const nb::object& quick = *new nb::object(
      nb::getattr(nb::module_::import_("torch._C"), "_cuda_getCurrentRawStream", nb::none()));
  if (!quick.is_none()) return {pointer(quick(call(tensor, names().get_device)))};
  const nb::object cuda = nb::module_::import_("torch.cuda");
  const nb::object stream = cuda.attr("current_stream")(get(tensor, names().device));
  return {pointer(nb::object(stream.attr("cuda_stream")))};
}

void check_filling(nb::handle tensor) {
  const NeverFilled& known = never_filled();
  if (known.type == nullptr || PyType_IsSubtype(Py_TYPE(tensor.ptr()), known.type) == 0) return;
  const nb::object error = nb::handle(known.refusal)("a read into this tensor");
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

// Throws the reason why a tensor on another device, or one that is not dense, cannot be
// transferred.
[[noreturn]] void refuse_tensor(nb::handle tensor, const Torch& torch, Reach reach) {
  const std::string device = nb::str(get(tensor, names().device)).c_str();
  if (get(tensor, names().layout).ptr() != torch.strided) {
    refuse_type("a tensor of layout " + std::string(nb::str(get(tensor, names().layout)).c_str()) +
                " is not one block of memory: transfer x.to_dense(), or its parts one by one");
  }
  if (device == "meta") {
    refuse_type(
        "a tensor on the meta device has no memory: make one with torch.empty_like(x, "
        "device='cpu')");
  }
  const char* why = reach == Reach::cpu ? "and this call takes memory of the CPU only"
                                        : "which tensorferry cannot reach";
  refuse_value("the tensor is on " + device + ", " + why +
               ": write x.cpu(), or read into a tensor on the CPU and copy it there");
}

}  // namespace

bool is_tensor(nb::handle object) noexcept {
  const Torch* torch = torch_if_imported();
  return torch != nullptr && PyType_IsSubtype(Py_TYPE(object.ptr()), torch->tensor) != 0;
}

void never_fill(nb::type_object type, nb::callable refusal) {
  never_filled() = {reinterpret_cast<PyTypeObject*>(type.release().ptr()), refusal.release().ptr()};
}

std::span<const std::byte> tensor_bytes(nb::handle tensor) noexcept {
  try {
    if (!is_tensor(tensor) || !is_true(get(tensor, names().is_cpu))) return {};
    return {pointer(call(tensor, names().data_ptr)), count(get(tensor, names().nbytes))};
  } catch (...) {  // a fake tensor and the like
    PyErr_Clear();
    return {};
  }
}

Buffer::Buffer(nb::handle object, Use use, Reach reach) {
  if (is_tensor(object)) {
    take_tensor(object, use, reach);
  } else if (PyObject_CheckBuffer(object.ptr()) != 0) {
    take_view(object, use);
  } else {
    take_dlpack(object, use, reach);
  }
}

void Buffer::take_tensor(nb::handle tensor, Use use, Reach reach) {
  const Torch& torch = *torch_if_imported();
  if (use == Use::fill) check_filling(tensor);
  const bool on_cpu = is_true(get(tensor, names().is_cpu));
  const bool on_gpu = !on_cpu && reach == Reach::gpu_too && is_true(get(tensor, names().is_cuda));
  if (get(tensor, names().layout).ptr() != torch.strided || (!on_cpu && !on_gpu)) {
    refuse_tensor(tensor, torch, reach);
  }
  if (!is_true(call(tensor, names().is_contiguous))) {
    refuse_value(std::string("the tensor is not contiguous: ") + contiguous_advice(use));
  }
  if (is_true(call(tensor, names().is_complex)) && is_true(call(tensor, names().is_conj))) {
    refuse_value(
        "the tensor is a conjugate view, whose memory holds other numbers: use "
        "x.resolve_conj()");
  }
  if (is_true(call(tensor, names().is_neg))) {
    refuse_value(
        "the tensor is a negative view, whose memory holds other numbers: use "
        "x.resolve_neg()");
  }
  bytes_ = {pointer(call(tensor, names().data_ptr)), count(get(tensor, names().nbytes))};
  if (bytes_.data() == nullptr && !bytes_.empty()) {
    refuse_type("a " + kind_of(tensor) + " has no memory of its own to transfer");
  }
  if (on_gpu && !bytes_.empty()) {
    if (!is_on_gpu(bytes_)) refuse_tensor(tensor, torch, reach);  // not one of CUDA
    stream_ = current_stream(tensor);
  }
  // Not the tensor: the user may give it other memory meanwhile (x.data = ..., x.set_()).
  owner_ = call(tensor, names().untyped_storage);
  const std::byte* const first = pointer(call(owner_, names().data_ptr));
  const std::size_t size = count(call(owner_, names().nbytes));
  if (!bytes_.empty() && (bytes_.data() < first || bytes_.data() + bytes_.size() > first + size)) {
    refuse_value("the tensor's storage has been resized and holds only " + std::to_string(size) +
                 " bytes: give a tensor that has its memory");
  }
}

namespace {

// Whether a format of the buffer protocol has addresses of this process: Python objects and
// pointers. Names of fields stand between colons; Zf, Zd and Zg are complex numbers.
bool holds_addresses(const char* format) {
  bool in_name = false;
  for (const char* c = format == nullptr ? "" : format; *c != '\0'; ++c) {
    if (*c == ':') in_name = !in_name;
    if (!in_name && *c == 'Z' && c[1] != '\0' && std::strchr("fdg", c[1]) != nullptr) continue;
    if (!in_name && std::strchr("OPXzZ&", *c) != nullptr) return true;
  }
  return false;
}

[[noreturn]] void refuse_addresses(nb::handle object) {
  refuse_type("a " + kind_of(object) +
              " holds addresses of this process, which mean nothing in a file: transfer what they "
              "point to");
}

}  // namespace

void Buffer::take_view(nb::handle object, Use use) {
  std::unique_ptr<Py_buffer> view(new Py_buffer{});
  const int writable = use == Use::fill ? PyBUF_WRITABLE : 0;
  if (PyObject_GetBuffer(object.ptr(), view.get(), PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | writable) ==
      0) {
    view_.reset(view.release());
    if (holds_addresses(view_->format)) refuse_addresses(object);
    bytes_ = {static_cast<std::byte*>(view_->buf), static_cast<std::size_t>(view_->len)};
    return;
  }
  nb::python_error first;
  if (PyObject_GetBuffer(object.ptr(), view.get(), PyBUF_FULL_RO) != 0) {
    PyErr_Clear();
    if (take_array_interface(object, use)) return;
    throw std::move(first);
  }
  const bool readonly = view->readonly != 0;
  PyBuffer_Release(view.get());
  if (use == Use::fill && readonly) {
    refuse_value("the " + kind_of(object) +
                 " is read-only: read into a bytearray, a tensor or an array that may be changed");
  }
  refuse_value("the " + kind_of(object) + " is not contiguous: " +
               (use == Use::fill ? "read into a contiguous one and copy it there"
                                 : "write numpy.ascontiguousarray(x)"));
}

// Takes NumPy arrays of types that the buffer protocol does not know: datetime64, bfloat16.
bool Buffer::take_array_interface(nb::handle object, Use use) {
  const nb::object interface = nb::getattr(object, "__array_interface__", nb::none());
  if (interface.is_none()) return false;
  const nb::object dtype = nb::getattr(object, "dtype", nb::none());
  if (!dtype.is_none() && (is_true(nb::getattr(dtype, "hasobject", nb::none())) ||
                           nb::str(nb::getattr(dtype, "kind", nb::none())).c_str()[0] == 'T')) {
    refuse_addresses(object);
  }
  const nb::object data = interface["data"];
  if (is_true(data[1]) && use == Use::fill) {
    refuse_value("the array is read-only: read into one that may be changed");
  }
  if (!interface["strides"].is_none()) {
    refuse_value("the array is not contiguous: use numpy.ascontiguousarray(x)");
  }
  bytes_ = {pointer(data[0]), count(get(object, names().nbytes))};
  owner_ = nb::borrow(object);
  return true;
}

// Returns whether it took the array. Throws if the array is on this device but read-only or not
// contiguous.
template <class Device>
bool Buffer::try_dlpack(nb::handle object, Use use) {
  const auto take = [&](const auto& array) {
    array_ = std::make_shared<std::decay_t<decltype(array)>>(array);
    bytes_ = {static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(array.data()))),
              array.nbytes()};
    return true;
  };
  nb::ndarray<Device, nb::c_contig> array;
  nb::ndarray<nb::ro, Device, nb::c_contig> fixed;
  nb::ndarray<nb::ro, Device> any;
  if (use == Use::fill && nb::try_cast(object, array, false)) return take(array);
  if (nb::try_cast(object, fixed, false)) {
    if (use == Use::take) return take(fixed);
    refuse_value("the " + kind_of(object) + " is read-only: read into another buffer");
  }
  if (nb::try_cast(object, any, false)) {
    refuse_value("the " + kind_of(object) + " is not contiguous: make a contiguous copy");
  }
  return false;
}

// The owner of an array on a GPU has made it safe for the default stream.
void Buffer::take_dlpack(nb::handle object, Use use, Reach reach) {
  if (nb::hasattr(object, "__dlpack__")) {
    using nb::device::cpu;
    using nb::device::cuda;
    using nb::device::cuda_managed;
    const int device = nb::cast<int>(nb::object(object.attr("__dlpack_device__")())[0]);
    if (device == cpu::value) {
      if (try_dlpack<cpu>(object, use)) return;
    } else {
      const bool taken = reach == Reach::gpu_too &&
                         ((device == cuda::value && try_dlpack<cuda>(object, use)) ||
                          (device == cuda_managed::value && try_dlpack<cuda_managed>(object, use)));
      if (taken && (bytes_.empty() || is_on_gpu(bytes_))) return;
      refuse_value("the " + kind_of(object) +
                   " is on a device that tensorferry cannot reach: copy it to the CPU first");
    }
  }
  refuse_type("an object of type " + kind_of(object) +
              " has no memory to transfer: give a torch tensor, a NumPy array, a bytearray, a "
              "memoryview or anything with DLPack (the buffer comes first, then the file)");
}

}  // namespace tensorferry::python
