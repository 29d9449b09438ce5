#include "os/cuda.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>

#include "os/cuda_driver.h"
#include "os/fork_mutex.h"
#include "os/library.h"
#include "os/system.h"

namespace tensorferry::os {

namespace {

constexpr const char* library_name = "libcuda.so.1";

constexpr int memory_type = 2;  // attributes of pointers
constexpr int is_managed = 8;
constexpr int device_ordinal = 9;
constexpr unsigned type_gpu = 2;

constexpr unsigned register_portable = 1;

constexpr int devices_max = 64;

// How long the answer "nobody has loaded the driver" is reused. Loading it, starting it and
// allocating the first memory of a GPU takes longer.
constexpr std::chrono::milliseconds look_again{10};

// The name of the first function that the library lacks; nullptr if it has all.
const char* find_all(void* library, CudaDriver& driver) noexcept {
  const char* missing = nullptr;
  const auto take = [&](const char* name, auto& function) {
    if (!find_function(library, name, function.address) && missing == nullptr) missing = name;
  };
  take("cuInit", driver.init);
  take("cuGetErrorName", driver.get_error_name);
  take("cuGetErrorString", driver.get_error_string);
  take("cuDeviceGetCount", driver.device_count);
  take("cuDevicePrimaryCtxGetState", driver.primary_state);
  take("cuDevicePrimaryCtxRetain", driver.primary_retain);
  take("cuCtxPushCurrent_v2", driver.context_push);
  take("cuCtxPopCurrent_v2", driver.context_pop);
  take("cuPointerGetAttributes", driver.pointer_attributes);
  take("cuMemAlloc_v2", driver.allocate);
  take("cuMemFree_v2", driver.free);
  take("cuMemHostRegister_v2", driver.host_register);
  take("cuMemHostUnregister", driver.host_unregister);
  take("cuMemcpyAsync", driver.copy);
  take("cuStreamCreate", driver.stream_create);
  take("cuStreamDestroy_v2", driver.stream_destroy);
  take("cuStreamSynchronize", driver.stream_synchronize);
  take("cuStreamQuery", driver.stream_query);
  take("cuStreamWaitEvent", driver.stream_wait);
  take("cuStreamIsCapturing", driver.stream_is_capturing);
  take("cuStreamGetCtx", driver.stream_context);
  take("cuEventCreate", driver.event_create);
  take("cuEventDestroy_v2", driver.event_destroy);
  take("cuEventRecord", driver.event_record);
  take("cuEventQuery", driver.event_query);
  take("cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
  return missing;
}

struct Loaded {
  std::atomic<const CudaDriver*> driver{nullptr};
  std::atomic<std::int64_t> looked{0};       // time of the last look for the library
  std::atomic<std::uint64_t> generation{0};  // fork generation of the first use of a context
  std::atomic<bool> used{false};             // whether a context has been used
  std::mutex mutex;
  CudaDriver functions{};
  CudaFailure problem;  // why the library cannot be used
  std::array<std::atomic<CudaDriver::Context>, devices_max> contexts{};
};

// Never destroyed: threads may release GPU memory after main() has returned.
Loaded& loaded() {
  static Loaded& instance = *new Loaded();
  return instance;
}

std::mutex& loading() { return loaded().mutex; }
[[maybe_unused]] const int cuda_fork_watch = hold_during_forks<loading>();

// Whether somebody has loaded the library. Does not touch the file system.
bool is_loaded() noexcept {
  const auto is_cuda = [](dl_phdr_info* info, std::size_t, void*) -> int {
    return info->dlpi_name != nullptr && std::strstr(info->dlpi_name, "/libcuda.so") != nullptr;
  };
  return dl_iterate_phdr(is_cuda, nullptr) != 0;
}

// Call with the lock held. `flags` is RTLD_NOLOAD to take the library only if somebody has loaded
// it.
void take_library(int flags) {
  Loaded& all = loaded();
  if (all.driver.load() != nullptr) return;
  void* library = dlopen(library_name, RTLD_NOW | flags);
  if (library == nullptr) {
    if (flags == 0) {
      const char* why = dlerror();  // NOLINT(concurrency-mt-unsafe): safe in glibc
      all.problem = {.call = "load CUDA",
                     .code = CudaCode::not_loaded,
                     .text = why != nullptr ? why : library_name};
    }
    return;
  }
  if (const char* missing = find_all(library, all.functions)) {
    all.problem = {.call = "load CUDA",
                   .code = CudaCode::too_old,
                   .text = std::string(library_name) + " has no " + missing};
    return;
  }
  all.driver.store(&all.functions, std::memory_order_release);
}

std::string name_of(int device) { return "cuda:" + std::to_string(device); }

}  // namespace

CudaFailure cuda_failure(const CudaDriver& driver, const char* call, CudaCode code, int device) {
  if (code == CudaCode::foreign_stream) call = "use stream";  // no call of CUDA failed
  if (code < CudaCode::success) return {.call = call, .code = code, .text = name_of(device)};
  const char* name = nullptr;
  const char* text = nullptr;
  driver.get_error_name(static_cast<int>(code), &name);
  driver.get_error_string(static_cast<int>(code), &text);
  return {.call = call,
          .code = code,
          .name = name != nullptr ? name : "",
          .text = text != nullptr ? text : ""};
}

CudaResult<CudaDriver::Context> context_of(const CudaDriver& driver, int device,
                                           IfMissing missing) {
  if (device < 0 || device >= devices_max) {
    return cuda_failure(driver, "use GPU", CudaCode::no_such_gpu, device);
  }
  auto& known = loaded().contexts.at(static_cast<std::size_t>(device));
  if (CudaDriver::Context context = known.load(std::memory_order_acquire)) return context;
  if (missing == IfMissing::refuse) {
    unsigned flags = 0;
    int active = 0;
    const CudaCode code = driver.primary_state(device, &flags, &active);
    if (code != CudaCode::success) return cuda_failure(driver, "cuDevicePrimaryCtxGetState", code);
    if (active == 0) return cuda_failure(driver, "use GPU", CudaCode::no_context, device);
  }
  CudaDriver::Context context = nullptr;
  const CudaCode code = driver.primary_retain(&context, device);
  if (code != CudaCode::success) return cuda_failure(driver, "cuDevicePrimaryCtxRetain", code);
  known.store(context, std::memory_order_release);
  loaded().generation.store(fork_generation(), std::memory_order_relaxed);
  loaded().used.store(true, std::memory_order_release);
  return context;
}

CudaStatus enter(const CudaDriver& driver, int device, IfMissing missing, int& capture_mode) {
  auto context = context_of(driver, device, missing);
  if (!context.ok()) return context.error();
  const CudaCode code = driver.context_push(context.value());
  if (code != CudaCode::success) return cuda_failure(driver, "cuCtxPushCurrent", code);
  capture_mode = capture_mode_relaxed;
  driver.exchange_capture_mode(&capture_mode);
  return Nothing{};
}

void leave(const CudaDriver& driver, int& capture_mode) noexcept {
  driver.exchange_capture_mode(&capture_mode);
  CudaDriver::Context popped = nullptr;
  driver.context_pop(&popped);
}

const CudaDriver* cuda() noexcept {
  Loaded& all = loaded();
  if (const CudaDriver* driver = all.driver.load(std::memory_order_acquire)) {
    // CUDA does not work in a forked child if the parent has used it, only if the parent has just
    // loaded it.
    const bool inherited = all.used.load(std::memory_order_acquire) &&
                           all.generation.load(std::memory_order_relaxed) != fork_generation();
    return inherited ? nullptr : driver;
  }
  using Clock = std::chrono::steady_clock;
  const std::int64_t now = Clock::now().time_since_epoch().count();
  const std::int64_t last = all.looked.load(std::memory_order_relaxed);
  if (last != 0 && now - last < Clock::duration(look_again).count()) return nullptr;
  const std::lock_guard lock(all.mutex);
  if (is_loaded()) take_library(RTLD_NOLOAD);
  all.looked.store(now, std::memory_order_relaxed);
  return all.driver.load();
}

std::optional<int> gpu_of(const std::byte* memory) noexcept {
  const CudaDriver* driver = cuda();
  if (driver == nullptr || memory == nullptr) return std::nullopt;
  unsigned type = 0;
  unsigned managed = 0;
  int device = -1;
  std::array<int, 3> attributes{memory_type, is_managed, device_ordinal};
  std::array<void*, 3> values{&type, &managed, &device};
  const CudaCode code =
      driver->pointer_attributes(3, attributes.data(), values.data(), address_of(memory));
  if (code != CudaCode::success || (type != type_gpu && managed == 0) || device < 0)
    return std::nullopt;
  return device;
}

CudaStatus start_cuda() {
  Loaded& all = loaded();
  {
    const std::lock_guard lock(all.mutex);
    take_library(0);
    if (all.driver.load() == nullptr) return all.problem;
  }
  const CudaDriver* driver = cuda();
  if (driver == nullptr) return CudaFailure{.call = "start CUDA", .code = CudaCode::parents};
  const CudaCode code = driver->init(0);
  if (code != CudaCode::success) return cuda_failure(*driver, "cuInit", code);
  return Nothing{};
}

CudaResult<int> gpu_count() {
  const CudaDriver* driver = cuda();
  if (driver == nullptr) return CudaFailure{.call = "count GPUs", .code = CudaCode::not_used};
  int count = 0;
  const CudaCode code = driver->device_count(&count);
  if (code != CudaCode::success) return cuda_failure(*driver, "cuDeviceGetCount", code);
  return count;
}

CudaResult<std::byte*> allocate_on_gpu(int device, std::size_t bytes) {
  CudaDriver::Address address = 0;
  const auto allocate = [&](const CudaDriver& driver) { return driver.allocate(&address, bytes); };
  const CudaStatus done = on_gpu(device, "cuMemAlloc", allocate, IfMissing::make);
  if (!done.ok()) return done.error();
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

void free_on_gpu(int device, std::byte* memory) noexcept {
  (void)on_gpu(device, "cuMemFree",
               [&](const CudaDriver& driver) { return driver.free(address_of(memory)); });
}

GpuVisit::GpuVisit(int device) {
  const CudaDriver* driver = cuda();
  status_ = driver == nullptr ? CudaFailure{.call = "use GPU", .code = CudaCode::not_used}
                              : enter(*driver, device, IfMissing::refuse, capture_mode_);
}

GpuVisit::~GpuVisit() {
  const CudaDriver* driver = cuda();
  if (driver != nullptr && status_.ok()) leave(*driver, capture_mode_);
}

namespace {

// The first device that has a context in this process; nullopt if none has.
std::optional<int> used_gpu() noexcept {
  const CudaDriver* driver = cuda();
  int count = 0;
  if (driver == nullptr || driver->device_count(&count) != CudaCode::success) return std::nullopt;
  for (int device = 0; device < std::min(count, devices_max); ++device) {
    unsigned flags = 0;
    int active = 0;
    if (driver->primary_state(device, &flags, &active) == CudaCode::success && active != 0)
      return device;
  }
  return std::nullopt;
}

}  // namespace

CudaResult<std::optional<int>> register_with_cuda(std::byte* memory, std::size_t bytes) {
  const std::optional<int> device = used_gpu();
  if (!device) return device;
  const CudaStatus done = on_gpu(*device, "cuMemHostRegister", [&](const CudaDriver& driver) {
    return driver.host_register(memory, bytes, register_portable);
  });
  if (!done.ok()) return done.error();
  return device;
}

void unregister_with_cuda(int device, std::byte* memory) noexcept {
  (void)on_gpu(device, "cuMemHostUnregister",
               [&](const CudaDriver& driver) { return driver.host_unregister(memory); });
}

}  // namespace tensorferry::os
