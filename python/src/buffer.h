// The memory of a Python object: a torch tensor, anything with the buffer protocol, or DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <span>

#include "tensorferry/options.h"

namespace tensorferry::python {

namespace nb = nanobind;

enum class Use : std::uint8_t { fill, take };  // a read fills memory, a write takes from it

// Whether memory of a GPU is accepted.
enum class Reach : std::uint8_t { cpu, gpu_too };

// Keeps the memory alive and prevents the resize of a bytearray. It cannot prevent the resize of a
// torch storage: resize_() while an operation is in flight is the user's error. Create, move and
// destroy it with the GIL held.
class Buffer {
 public:
  // Throws TypeError or ValueError, with what to do instead.
  Buffer(nb::handle object, Use use, Reach reach = Reach::cpu);

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }
  // For memory of a GPU: the stream whose work a transfer waits for.
  [[nodiscard]] CudaStream stream() const noexcept { return stream_; }

 private:
  struct Release {
    void operator()(Py_buffer* view) const noexcept {
      PyBuffer_Release(view);
      delete view;
    }
  };

  void take_tensor(nb::handle tensor, Use use, Reach reach);
  void take_view(nb::handle object, Use use);
  bool take_array_interface(nb::handle object, Use use);
  void take_dlpack(nb::handle object, Use use, Reach reach);
  template <class Device>
  bool try_dlpack(nb::handle object, Use use);

  nb::object owner_;
  std::shared_ptr<const void> array_;  // from DLPack
  std::unique_ptr<Py_buffer, Release> view_;
  std::span<std::byte> bytes_;
  CudaStream stream_;
};

// Returns whether it is a torch tensor. Never imports torch.
[[nodiscard]] bool is_tensor(nb::handle object) noexcept;

// Refuses from now on to read into tensors of this class, since nobody would see the bytes.
// `refusal(what)` makes the exception, which says what to do instead.
void never_fill(nb::type_object type, nb::callable refusal);

// Returns the memory of a torch tensor on the CPU, or an empty span. Never throws.
[[nodiscard]] std::span<const std::byte> tensor_bytes(nb::handle tensor) noexcept;

}  // namespace tensorferry::python
