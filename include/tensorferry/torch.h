// tensorferry for torch::Tensor, in programs that use libtorch. Header-only: the library itself
// knows nothing of torch. A tensor counts as its bytes. It must be contiguous, and on the CPU or on
// a CUDA device; transfers of a CUDA tensor wait for the work on torch's current stream.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tensorferry/checkpoint.h"
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

// The types that torch and safetensors share. Types of fewer than 8 bits are not among them.
inline constexpr std::pair<at::ScalarType, DType> shared_dtypes[] = {
    {at::kBool, DType::boolean},
    {at::kByte, DType::u8},
    {at::kChar, DType::i8},
    {at::kFloat8_e5m2, DType::f8_e5m2},
    {at::kFloat8_e4m3fn, DType::f8_e4m3},
    {at::kFloat8_e8m0fnu, DType::f8_e8m0},
    {at::kFloat8_e4m3fnuz, DType::f8_e4m3fnuz},
    {at::kFloat8_e5m2fnuz, DType::f8_e5m2fnuz},
    {at::kShort, DType::i16},
    {at::kUInt16, DType::u16},
    {at::kHalf, DType::f16},
    {at::kBFloat16, DType::bf16},
    {at::kInt, DType::i32},
    {at::kUInt32, DType::u32},
    {at::kFloat, DType::f32},
    {at::kComplexFloat, DType::c64},
    {at::kDouble, DType::f64},
    {at::kLong, DType::i64},
    {at::kUInt64, DType::u64},
};

// Saves tensors to a safetensors file, which replaces `path` when it is whole. See
// save_safetensors(). Throws Error (EINVAL) also for a dtype that safetensors does not have.
inline void save_tensors(Handle& handle, const std::string& path,
                         const std::map<std::string, at::Tensor>& tensors,
                         const SafetensorsOptions& options = {}) {
  std::vector<TensorWrite> writes;
  for (const auto& [name, tensor] : tensors) {
    std::optional<DType> dtype;
    for (const auto& [of_torch, ours] : shared_dtypes) {
      if (tensor.defined() && tensor.scalar_type() == of_torch) dtype = ours;
    }
    const std::span<std::byte> bytes = bytes_of(tensor);
    if (!dtype) {
      throw Error({.operation = "save",
                   .path = path,
                   .code = EINVAL,
                   .hint = "tensor '" + name + "' has a dtype that safetensors does not have"});
    }
    writes.push_back(
        {name, *dtype, {tensor.sizes().begin(), tensor.sizes().end()}, bytes, stream_of(tensor)});
  }
  save_safetensors(handle, path, writes, options);
}

// Loads all tensors of a safetensors file, or of a set by its index, to the CPU or a GPU. Throws
// Error.
inline std::map<std::string, at::Tensor> load_tensors(Handle& handle, const std::string& path,
                                                      at::Device device = at::kCPU,
                                                      Verify verify = Verify::if_present) {
  const Safetensors file = Safetensors::open(path);
  std::map<std::string, at::Tensor> tensors;
  std::vector<TensorRead> reads;
  for (const TensorInfo& info : file.tensors()) {
    std::optional<at::ScalarType> dtype;
    for (const auto& [of_torch, ours] : shared_dtypes) {
      if (info.dtype == ours) dtype = of_torch;
    }
    if (!dtype) {
      throw Error({.operation = "load",
                   .path = path,
                   .code = EINVAL,
                   .hint = "tensor '" + info.name + "' has the dtype " +
                           std::string(to_string(info.dtype)) + ", which torch does not have"});
    }
    const std::vector<std::int64_t> shape(info.shape.begin(), info.shape.end());
    at::Tensor tensor = at::empty(shape, at::TensorOptions(*dtype).device(device));
    reads.push_back({info.name, bytes_of(tensor), {}, stream_of(tensor)});
    tensors.emplace(info.name, std::move(tensor));
  }
  file.read(handle, reads, verify).wait();
  return tensors;
}

}  // namespace tensorferry
