// The functions of CUDA's driver, and how the room calls them. Private to the room: those above use
// os/cuda.h and os/gpu_stream.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cuda_failure.h"
#include "os/cuda.h"

namespace tensorferry::os {

// A function of the driver. CUDA's codes come as ints.
template <class... Arguments>
struct CudaFunction {
  int (*address)(Arguments...) = nullptr;
  CudaCode operator()(Arguments... arguments) const {
    return static_cast<CudaCode>(address(arguments...));
  }
};

// The arguments are those of NVIDIA's cuda.h.
struct CudaDriver {
  using Context = void*;
  using Address = unsigned long long;

  CudaFunction<unsigned> init;
  CudaFunction<int, const char**> get_error_name;
  CudaFunction<int, const char**> get_error_string;
  CudaFunction<int*> device_count;
  CudaFunction<int, unsigned*, int*> primary_state;
  CudaFunction<Context*, int> primary_retain;
  CudaFunction<Context> context_push;
  CudaFunction<Context*> context_pop;
  CudaFunction<unsigned, int*, void**, Address> pointer_attributes;
  CudaFunction<Address*, std::size_t> allocate;
  CudaFunction<Address> free;
  CudaFunction<void*, std::size_t, unsigned> host_register;
  CudaFunction<void*> host_unregister;
  CudaFunction<Address, Address, std::size_t, void*> copy;
  CudaFunction<void**, unsigned> stream_create;
  CudaFunction<void*> stream_destroy;
  CudaFunction<void*> stream_synchronize;
  CudaFunction<void*> stream_query;
  CudaFunction<void*, void*, unsigned> stream_wait;
  CudaFunction<void*, int*> stream_is_capturing;
  CudaFunction<void*, Context*> stream_context;
  CudaFunction<void**, unsigned> event_create;
  CudaFunction<void*> event_destroy;
  CudaFunction<void*, void*> event_record;
  CudaFunction<void*> event_query;
  CudaFunction<int*> exchange_capture_mode;
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
