// tensorferry for torch::Tensor, in programs that use libtorch. Header-only: the library itself
// knows nothing of torch. A tensor counts as its bytes. It must be contiguous, and on the CPU or on
// a CUDA device; transfers of a CUDA tensor wait for the work on torch's current stream.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tensorferry/tensorferry.h"

namespace tensorferry {

// The bytes of a tensor. They are valid as long as the tensor lives. Throws Error (EINVAL) with
// advice for a tensor that is sparse, lazy, not contiguous or on another device.
inline std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  const auto refuse = [](const char* hint) {
    return Error({.operation = "use tensor", .code = EINVAL, .hint = hint});
  };
  if (!tensor.defined()) throw refuse("the tensor is undefined");
  if (tensor.layout() != at::kStrided) throw refuse("the tensor is sparse; use to_dense()");
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    throw refuse("the tensor is on a device that is not supported; use cpu()");
  }
  if (!tensor.is_contiguous()) throw refuse("the tensor is not contiguous; use contiguous()");
  if (tensor.is_conj() || tensor.is_neg()) {
    throw refuse("the tensor is a lazy view; use resolve_conj() and resolve_neg()");
  }
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

// The stream that torch uses now on the tensor's GPU; the default one for a tensor of the CPU.
inline CudaStream stream_of(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return {};
  const c10::impl::VirtualGuardImpl gpu(tensor.device().type());
  return {gpu.getStream(tensor.device()).native_handle()};
}

// As the members of Handle. The tensor's memory must stay valid until the operation is done.
inline Operation read(Handle& handle, const at::Tensor& tensor, const File& file,
                      std::uint64_t offset = 0) {
  return handle.read(bytes_of(tensor), file, offset, stream_of(tensor));
}

inline Operation read(Handle& handle, const at::Tensor& tensor, const std::string& path,
                      std::uint64_t offset = 0) {
  return handle.read(bytes_of(tensor), path, offset, stream_of(tensor));
}

inline Operation write(Handle& handle, const at::Tensor& tensor, const File& file,
                       std::uint64_t offset = 0, Durability durability = Durability::none) {
  return handle.write(bytes_of(tensor), file, offset, durability, stream_of(tensor));
}

inline Operation write(Handle& handle, const at::Tensor& tensor, const std::string& path,
                       std::uint64_t offset = 0, Durability durability = Durability::none) {
  return handle.write(bytes_of(tensor), path, offset, durability, stream_of(tensor));
}

// Waits for the work on torch's current stream if the tensor is on a GPU.
inline void finish_work_on(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).synchronize();
}

// The one-off functions of tensorferry/aio.h.
inline int aio_read(const at::Tensor& buffer, const std::string& filename,
                    std::size_t block_size = std::size_t{1} << 20, unsigned queue_depth = 128,
                    bool single_submit = false, bool overlap_events = true, bool validate = false,
                    AioElapsed* elapsed = nullptr) {
  finish_work_on(buffer);
  return aio_read(bytes_of(buffer), filename, block_size, queue_depth, single_submit,
                  overlap_events, validate, elapsed);
}

inline int aio_write(const at::Tensor& buffer, const std::string& filename,
                     std::size_t block_size = std::size_t{1} << 20, unsigned queue_depth = 128,
                     bool single_submit = false, bool overlap_events = true, bool validate = false,
                     AioElapsed* elapsed = nullptr) {
  finish_work_on(buffer);
  return aio_write(bytes_of(buffer), filename, block_size, queue_depth, single_submit,
                   overlap_events, validate, elapsed);
}

}  // namespace tensorferry
