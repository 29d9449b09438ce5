// The functions of CUDA's driver, and how the room calls them. Private to the room: those above use
// os/cuda.h and os/gpu_stream.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cuda_failure.h"
#include "os/cuda.h"

namespace tensorferry::os {

// Declared as in NVIDIA's cuda.h.
struct CudaDriver {
  using Code = CudaCode;
  using Context = void*;
  using Address = unsigned long long;

  Code (*init)(unsigned flags);
  Code (*get_error_name)(Code code, const char** text);
  Code (*get_error_string)(Code code, const char** text);
  Code (*device_count)(int* count);
  Code (*primary_state)(int device, unsigned* flags, int* active);
  Code (*primary_retain)(Context* context, int device);
  Code (*context_push)(Context context);
  Code (*context_pop)(Context* context);
  Code (*pointer_attributes)(unsigned count, int* attributes, void** values, Address address);
  Code (*allocate)(Address* address, std::size_t bytes);
  Code (*free)(Address address);
  Code (*host_register)(void* memory, std::size_t bytes, unsigned flags);
  Code (*host_unregister)(void* memory);
  Code (*copy)(Address to, Address from, std::size_t bytes, void* stream);
  Code (*stream_create)(void** stream, unsigned flags);
  Code (*stream_destroy)(void* stream);
  Code (*stream_synchronize)(void* stream);
  Code (*stream_query)(void* stream);
  Code (*stream_wait)(void* stream, void* event, unsigned flags);
  Code (*stream_is_capturing)(void* stream, int* status);
  Code (*stream_context)(void* stream, Context* context);
  Code (*event_create)(void** event, unsigned flags);
  Code (*event_destroy)(void* event);
  Code (*event_record)(void* event, void* stream);
  Code (*event_query)(void* event);
  Code (*exchange_capture_mode)(int* mode);
};

// What the driver reported about a call. `device` is the one that a code of ours is about.
[[nodiscard]] CudaFailure cuda_failure(const CudaDriver& driver, const char* call, CudaCode code,
                                       int device = 0);

// The primary context of a device, which torch and CUDA's runtime use too.
enum class IfMissing : std::uint8_t { refuse, make };
[[nodiscard]] CudaResult<CudaDriver::Context> context_of(const CudaDriver& driver, int device,
                                                         IfMissing missing);

// Makes the device the calling thread's. In between CUDA allows the calls of this thread even while
// other threads capture graphs.
[[nodiscard]] CudaStatus enter(const CudaDriver& driver, int device, IfMissing missing,
                               int& capture_mode);
void leave(const CudaDriver& driver, int& capture_mode) noexcept;

// Calls `use(driver)`, which returns a code, on a device.
template <class Use>
CudaStatus on_gpu(int device, const char* call, Use use, IfMissing missing = IfMissing::refuse) {
  const CudaDriver* driver = cuda();
  if (driver == nullptr) return CudaFailure{.call = call, .code = CudaCode::not_used};
  int capture_mode = 0;
  if (CudaStatus entered = enter(*driver, device, missing, capture_mode); !entered.ok()) {
    return entered;
  }
  const CudaCode code = use(*driver);
  leave(*driver, capture_mode);
  if (code != CudaCode::success) return cuda_failure(*driver, call, code, device);
  return Nothing{};
}

[[nodiscard]] inline CudaDriver::Address address_of(const std::byte* memory) noexcept {
  return static_cast<CudaDriver::Address>(reinterpret_cast<std::uintptr_t>(memory));
}

constexpr int capture_mode_relaxed = 2;

}  // namespace tensorferry::os
