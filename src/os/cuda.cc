#include "os/cuda.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "os/library.h"
#include "os/system.h"

namespace tensorferry::os {

// As in NVIDIA's cuda.h, of which nothing more is needed.
struct CudaDriver {
  using Code = int;
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

namespace {

using Code = CudaDriver::Code;
using Address = CudaDriver::Address;

constexpr const char* library_name = "libcuda.so.1";

constexpr Code success = 0;
constexpr Code invalid_value = 1;
constexpr Code out_of_memory = 2;
constexpr Code not_initialized = 3;
constexpr Code deinitialized = 4;
constexpr Code no_device = 100;
constexpr Code invalid_device = 101;
constexpr Code invalid_context = 201;
constexpr Code operation_not_supported = 801;
constexpr Code invalid_handle = 400;
constexpr Code not_ready = 600;
constexpr Code capture_first = 900;  // of the errors of stream capture
constexpr Code capture_last = 908;

constexpr int memory_type = 2;  // attributes of pointers
constexpr int is_managed = 8;
constexpr int device_ordinal = 9;
constexpr unsigned type_gpu = 2;

constexpr unsigned stream_non_blocking = 1;
constexpr unsigned event_without_timing = 2;
constexpr unsigned register_portable = 1;
constexpr int capture_mode_relaxed = 2;

constexpr int devices_max = 64;

// How old the answer "nobody has loaded the driver" may be. Between its loading and the first
// memory of a GPU the driver starts, which takes longer.
constexpr std::chrono::milliseconds look_again{10};

// The name of the first function that the library does not have; nullptr when it has all.
const char* find_all(void* library, CudaDriver& driver) noexcept {
  const char* missing = nullptr;
  const auto take = [&](const char* name, auto& function) {
    if (!find_function(library, name, function) && missing == nullptr) missing = name;
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
  std::atomic<std::int64_t> looked{0};       // when last, since the clock's epoch
  std::atomic<std::uint64_t> generation{0};  // of forks, when a context was first used
  std::atomic<bool> used{false};             // has one been?
  std::mutex mutex;
  CudaDriver functions{};
  std::string problem;  // why it cannot be used although it is there
  std::array<std::atomic<CudaDriver::Context>, devices_max> contexts{};
};

// Never destroyed: threads may let go of GPU memory after main() has returned.
Loaded& loaded() {
  static Loaded& instance = *new Loaded();
  return instance;
}

// A fork must not find another thread in the middle of looking.
[[maybe_unused]] const int fork_watch =
    pthread_atfork([] { loaded().mutex.lock(); }, [] { loaded().mutex.unlock(); },
                   [] { loaded().mutex.unlock(); });

// Whether somebody has loaded the library; without a look at the file system.
bool is_there() noexcept {
  const auto is_cuda = [](dl_phdr_info* info, std::size_t, void*) -> int {
    return info->dlpi_name != nullptr && std::strstr(info->dlpi_name, "/libcuda.so") != nullptr;
  };
  return dl_iterate_phdr(is_cuda, nullptr) != 0;
}

// With the lock held. `flags` is RTLD_NOLOAD to take it only if it is there already.
void take_library(int flags) {
  Loaded& all = loaded();
  if (all.driver.load() != nullptr) return;
  void* library = dlopen(library_name, RTLD_NOW | flags);
  if (library == nullptr) {
    if (flags == 0) {
      const char* why = dlerror();  // NOLINT(concurrency-mt-unsafe): safe in glibc
      all.problem = why != nullptr ? why : "it cannot be loaded";
    }
    return;
  }
  if (const char* missing = find_all(library, all.functions)) {
    all.problem = std::string("the driver is too old: ") + library_name + " has no " + missing;
    return;
  }
  all.problem.clear();
  all.driver.store(&all.functions, std::memory_order_release);
}

int errno_of(Code code) noexcept {
  if (code >= capture_first && code <= capture_last) return EBUSY;
  switch (code) {
    case out_of_memory:
      return ENOMEM;
    case invalid_value:
      return EFAULT;
    case invalid_handle:
    case invalid_context:
    case invalid_device:
      return EINVAL;
    case not_initialized:
    case deinitialized:
    case no_device:
      return ENODEV;
    case operation_not_supported:
      return EOPNOTSUPP;
    default:
      return EIO;
  }
}

const char* advice(Code code) noexcept {
  switch (errno_of(code)) {
    case EBUSY:
      return "; transfers cannot be part of a CUDA graph: make them outside of the capture";
    case EFAULT:
      return "; has the memory been freed?";
    case EIO:
      return "; an earlier kernel or copy of this process may have failed, and CUDA is of no use "
             "until it is started anew";
    default:
      return "";
  }
}

Error cuda_error(const CudaDriver& driver, const char* call, Code code) {
  const char* name = nullptr;
  const char* words = nullptr;
  driver.get_error_name(code, &name);
  driver.get_error_string(code, &words);
  std::string hint = name != nullptr ? name : "CUDA error " + std::to_string(code);
  if (words != nullptr) hint += std::string(" (") + words + ")";
  return Error({.operation = call, .code = errno_of(code), .hint = hint + advice(code)});
}

Error no_cuda(const char* operation, std::string why) {
  return Error({.operation = operation, .code = ENODEV, .hint = std::move(why)});
}

Status status_of(const CudaDriver& driver, const char* call, Code code) {
  if (code == success) return Nothing{};
  return cuda_error(driver, call, code);
}

// The device's own context, which torch and the runtime use: if somebody has made it, or by us.
enum class IfMissing : std::uint8_t { refuse, make };

Result<CudaDriver::Context> context_of(const CudaDriver& driver, int device, IfMissing missing) {
  if (device < 0 || device >= devices_max) {
    return no_cuda("use GPU", "there is no cuda:" + std::to_string(device));
  }
  auto& known = loaded().contexts.at(static_cast<std::size_t>(device));
  if (CudaDriver::Context context = known.load(std::memory_order_acquire)) return context;
  if (missing == IfMissing::refuse) {
    unsigned flags = 0;
    int active = 0;
    const Code code = driver.primary_state(device, &flags, &active);
    if (code != success) return cuda_error(driver, "cuDevicePrimaryCtxGetState", code);
    if (active == 0) {
      return no_cuda("use GPU", "cuda:" + std::to_string(device) + " has no context yet");
    }
  }
  CudaDriver::Context context = nullptr;
  const Code code = driver.primary_retain(&context, device);
  if (code != success) return cuda_error(driver, "cuDevicePrimaryCtxRetain", code);
  known.store(context, std::memory_order_release);
  loaded().generation.store(fork_generation(), std::memory_order_relaxed);
  loaded().used.store(true, std::memory_order_release);
  return context;
}

// Pushes the device's context. Whatever graphs others capture, the thread's own calls are allowed.
Status enter(const CudaDriver& driver, int device, IfMissing missing, int& capture_mode) {
  auto context = context_of(driver, device, missing);
  if (!context.ok()) return context.error();
  const Code code = driver.context_push(context.value());
  if (code != success) return cuda_error(driver, "cuCtxPushCurrent", code);
  capture_mode = capture_mode_relaxed;
  driver.exchange_capture_mode(&capture_mode);
  return Nothing{};
}

void leave(const CudaDriver& driver, int& capture_mode) noexcept {
  driver.exchange_capture_mode(&capture_mode);
  CudaDriver::Context popped = nullptr;
  driver.context_pop(&popped);
}

// Calls `use(driver)`, which returns a Code, on a device.
template <class Use>
Status on_gpu(int device, const char* call, Use use, IfMissing missing = IfMissing::refuse) {
  const CudaDriver* driver = cuda();
  if (driver == nullptr) return no_cuda(call, "this process does not use CUDA");
  int capture_mode = 0;
  if (Status entered = enter(*driver, device, missing, capture_mode); !entered.ok()) return entered;
  const Code code = use(*driver);
  leave(*driver, capture_mode);
  return status_of(*driver, call, code);
}

Address address_of(const std::byte* memory) noexcept {
  return static_cast<Address>(reinterpret_cast<std::uintptr_t>(memory));
}

}  // namespace

const CudaDriver* cuda() noexcept {
  Loaded& all = loaded();
  if (const CudaDriver* driver = all.driver.load(std::memory_order_acquire)) {
    // In a forked child nothing of the parent's CUDA works; what the parent has only loaded does.
    const bool inherited = all.used.load(std::memory_order_acquire) &&
                           all.generation.load(std::memory_order_relaxed) != fork_generation();
    return inherited ? nullptr : driver;
  }
  using Clock = std::chrono::steady_clock;
  const std::int64_t now = Clock::now().time_since_epoch().count();
  const std::int64_t last = all.looked.load(std::memory_order_relaxed);
  if (last != 0 && now - last < Clock::duration(look_again).count()) return nullptr;
  const std::lock_guard lock(all.mutex);
  if (is_there()) take_library(RTLD_NOLOAD);
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
  const Code code =
      driver->pointer_attributes(3, attributes.data(), values.data(), address_of(memory));
  if (code != success || (type != type_gpu && managed == 0) || device < 0) return std::nullopt;
  return device;
}

Status start_cuda() {
  Loaded& all = loaded();
  {
    const std::lock_guard lock(all.mutex);
    take_library(0);
    if (all.driver.load() == nullptr) {
      return no_cuda("load CUDA", all.problem +
                                      "; install the NVIDIA driver, or start the container with "
                                      "--gpus all");
    }
  }
  const CudaDriver* driver = cuda();
  if (driver == nullptr) return no_cuda("start CUDA", "the parent of this process has used it");
  return status_of(*driver, "cuInit", driver->init(0));
}

Result<int> gpu_count() {
  const CudaDriver* driver = cuda();
  if (driver == nullptr) return no_cuda("count GPUs", "this process does not use CUDA");
  int count = 0;
  const Code code = driver->device_count(&count);
  if (code != success) return cuda_error(*driver, "cuDeviceGetCount", code);
  return count;
}

Result<std::byte*> allocate_on_gpu(int device, std::size_t bytes) {
  Address address = 0;
  const auto allocate = [&](const CudaDriver& driver) { return driver.allocate(&address, bytes); };
  const Status done = on_gpu(device, "cuMemAlloc", allocate, IfMissing::make);
  if (!done.ok()) return done.error();
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

void free_on_gpu(int device, std::byte* memory) noexcept {
  (void)on_gpu(device, "cuMemFree",
               [&](const CudaDriver& driver) { return driver.free(address_of(memory)); });
}

GpuVisit::GpuVisit(int device) {
  const CudaDriver* driver = cuda();
  status_ = driver == nullptr ? Status(no_cuda("use GPU", "this process does not use CUDA"))
                              : enter(*driver, device, IfMissing::refuse, capture_mode_);
}

GpuVisit::~GpuVisit() {
  const CudaDriver* driver = cuda();
  if (driver != nullptr && status_.ok()) leave(*driver, capture_mode_);
}

namespace {

// A device whose context is there; nullopt if there is none in this process.
std::optional<int> used_gpu() noexcept {
  const CudaDriver* driver = cuda();
  int count = 0;
  if (driver == nullptr || driver->device_count(&count) != success) return std::nullopt;
  for (int device = 0; device < std::min(count, devices_max); ++device) {
    unsigned flags = 0;
    int active = 0;
    if (driver->primary_state(device, &flags, &active) == success && active != 0) return device;
  }
  return std::nullopt;
}

}  // namespace

Result<std::optional<int>> register_with_cuda(std::byte* memory, std::size_t bytes) {
  const std::optional<int> device = used_gpu();
  if (!device) return device;
  const Status done = on_gpu(*device, "cuMemHostRegister", [&](const CudaDriver& driver) {
    return driver.host_register(memory, bytes, register_portable);
  });
  if (!done.ok()) return done.error();
  return device;
}

void unregister_with_cuda(int device, std::byte* memory) noexcept {
  (void)on_gpu(device, "cuMemHostUnregister",
               [&](const CudaDriver& driver) { return driver.host_unregister(memory); });
}

// --- Fences and streams ------------------------------------------------------------------------

namespace {

Error refused_stream(int code, std::string why) {
  return Error({.operation = "transfer GPU memory", .code = code, .hint = std::move(why)});
}

}  // namespace

Result<std::shared_ptr<GpuFence>> GpuFence::after(int device, void* stream) {
  void* event = nullptr;
  int capturing = 0;
  CudaDriver::Context of_stream = nullptr;
  CudaDriver::Context own = nullptr;
  const Status done = on_gpu(device, "cuStreamQuery", [&](const CudaDriver& driver) {
    own = loaded().contexts.at(static_cast<std::size_t>(device)).load();
    if (const Code code = driver.stream_is_capturing(stream, &capturing); code != success) {
      return code;
    }
    if (capturing != 0) return success;
    if (stream != nullptr) {
      const Code code = driver.stream_context(stream, &of_stream);
      if (code != success || of_stream != own) return code;
    }
    Code code = driver.stream_query(stream);
    if (code != not_ready) return code;  // nothing is queued
    code = driver.event_create(&event, event_without_timing);
    if (code == success) code = driver.event_record(event, stream);
    if (event != nullptr && code != success) driver.event_destroy(event);
    return code;
  });
  if (!done.ok()) return done.error();
  if (capturing != 0) {
    return refused_stream(EBUSY,
                          "the stream is being captured into a CUDA graph, of which "
                          "transfers cannot be part: make them outside of the capture");
  }
  if (stream != nullptr && of_stream != own) {
    return refused_stream(EINVAL, "the stream is not one of cuda:" + std::to_string(device) +
                                      ", where the memory is");
  }
  if (event == nullptr) return std::shared_ptr<GpuFence>();
  return std::shared_ptr<GpuFence>(new GpuFence(device, event));
}

namespace {

bool is_of_capture(Code code) noexcept { return code >= capture_first && code <= capture_last; }

// Asks an event, also while somebody captures a graph: not to be allowed to ask is "not ready".
Code query(const CudaDriver& driver, void* event) noexcept {
  int capture_mode = capture_mode_relaxed;
  driver.exchange_capture_mode(&capture_mode);
  const Code code = driver.event_query(event);
  driver.exchange_capture_mode(&capture_mode);
  return is_of_capture(code) ? not_ready : code;
}

}  // namespace

GpuFence::~GpuFence() {
  (void)on_gpu(device_, "cuEventDestroy",
               [this](const CudaDriver& driver) { return driver.event_destroy(event_); });
}

bool GpuFence::passed() const noexcept {
  const CudaDriver* driver = cuda();
  return driver == nullptr || query(*driver, event_) != not_ready;
}

struct GpuStream::Marks {
  std::uint64_t last = 0;                              // given out
  std::uint64_t reached = 0;                           // of them
  std::deque<std::pair<std::uint64_t, void*>> events;  // of those not yet reached, oldest first
  std::vector<void*> spare;
};

GpuStream::GpuStream(int device, void* stream)
    : device_(device), stream_(stream), marks_(std::make_unique<Marks>()) {}

Result<std::unique_ptr<GpuStream>> GpuStream::open(int device) {
  void* stream = nullptr;
  const Status done = on_gpu(device, "cuStreamCreate", [&](const CudaDriver& driver) {
    return driver.stream_create(&stream, stream_non_blocking);
  });
  if (!done.ok()) return done.error();
  return std::unique_ptr<GpuStream>(new GpuStream(device, stream));
}

GpuStream::~GpuStream() {
  (void)on_gpu(device_, "cuStreamDestroy", [this](const CudaDriver& driver) {
    for (void* event : marks_->spare) driver.event_destroy(event);
    for (const auto& [mark, event] : marks_->events) driver.event_destroy(event);
    return driver.stream_destroy(stream_);
  });
}

Status GpuStream::wait_for(const GpuFence& fence) {
  return on_gpu(device_, "cuStreamWaitEvent", [&](const CudaDriver& driver) {
    return driver.stream_wait(stream_, fence.event_, 0);
  });
}

Status GpuStream::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  return on_gpu(device_, "cuMemcpyAsync", [&](const CudaDriver& driver) {
    return driver.copy(address_of(to), address_of(from), bytes, stream_);
  });
}

Result<std::uint64_t> GpuStream::mark() {
  Marks& marks = *marks_;
  void* event = nullptr;
  if (!marks.spare.empty()) {
    event = marks.spare.back();
    marks.spare.pop_back();
  }
  const Status done = on_gpu(device_, "cuEventRecord", [&](const CudaDriver& driver) {
    Code code = event != nullptr ? success : driver.event_create(&event, event_without_timing);
    if (code == success) code = driver.event_record(event, stream_);
    return code;
  });
  if (!done.ok()) {
    if (event != nullptr) marks.spare.push_back(event);
    return done.error();
  }
  marks.events.emplace_back(++marks.last, event);
  return marks.last;
}

Result<bool> GpuStream::reached(std::uint64_t mark) {
  Marks& marks = *marks_;
  const CudaDriver* driver = cuda();
  if (driver == nullptr) return no_cuda("cuEventQuery", "this process does not use CUDA");
  while (marks.reached < mark) {
    const Code code = query(*driver, marks.events.front().second);
    if (code == not_ready) return false;
    if (code != success) return cuda_error(*driver, "cuEventQuery", code);
    marks.reached = marks.events.front().first;
    marks.spare.push_back(marks.events.front().second);
    marks.events.pop_front();
  }
  return true;
}

Status GpuStream::finish() {
  return on_gpu(device_, "cuStreamSynchronize",
                [this](const CudaDriver& driver) { return driver.stream_synchronize(stream_); });
}

}  // namespace tensorferry::os
