// A fake libcuda.so.1: tests use it to see how the library is found, what happens if it is too old,
// and how its errors are reported. It has no GPU, and moves no bytes unless a test gives it memory.
//
// FAKE_CUDA="cuMemAlloc_v2=2 cuMemcpyAsync=700" makes these functions return these codes.
//
// A test in the same process can also call the functions named fake_cuda_*: they give it real
// memory and hold streams back.
#include <sys/mman.h>

#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace {

bool started = false;
constexpr unsigned long long memory_begin = 0x7000'0000'0000;  // nothing is mapped there
constexpr unsigned long long memory_bytes = 1ULL << 40;

struct Stream {
  bool held = false;              // by a test
  bool copied = false;            // has had a copy to make
  const Stream* after = nullptr;  // the stream whose work it waits for
};

struct Event {
  const Stream* of = nullptr;  // whose work it comes after, if that had not ended
};

// Never destroyed: threads may use it to the very end.
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  bool has_memory = false;
  bool copies_held = false;
  unsigned waiting = 0;  // threads that wait for a stream
};

State& state() {
  static State& one = *new State();
  return one;
}

// Call it with the lock held.
bool busy(const Stream* stream) {
  return stream != nullptr &&
         (stream->held || (stream->copied && state().copies_held) || busy(stream->after));
}

// Returns not_ready if the work of the stream has not ended.
int readiness(const Stream* stream) {
  constexpr int not_ready = 600;
  const std::lock_guard lock(state().mutex);
  return busy(stream) ? not_ready : 0;
}

// The code that FAKE_CUDA names for this function; 0 if none.
int asked(const char* function) {
  const char* text = std::getenv("FAKE_CUDA");
  const char* found = text != nullptr ? std::strstr(text, function) : nullptr;
  if (found == nullptr || found[std::strlen(function)] != '=') return 0;
  return static_cast<int>(std::strtol(found + std::strlen(function) + 1, nullptr, 10));
}

int answer(const char* function) {
  constexpr int not_initialized = 3;
  if (const int code = asked(function); code != 0) return code;
  return started ? 0 : not_initialized;
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) int

FAKE cuInit(unsigned) {
  if (const int code = asked("cuInit"); code != 0) return code;
  started = true;
  return 0;
}

FAKE cuGetErrorName(int code, const char** text) {
  *text = code == 2     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                        : nullptr;
  return 0;
}

FAKE cuGetErrorString(int, const char** text) {
  *text = "as the test asked";
  return 0;
}

FAKE cuDeviceGetCount(int* count) {
  *count = 1;
  return answer("cuDeviceGetCount");
}

FAKE cuDevicePrimaryCtxGetState(int, unsigned*, int* active) {
  *active = started ? 1 : 0;
  return answer("cuDevicePrimaryCtxGetState");
}

FAKE cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &started;
  return answer("cuDevicePrimaryCtxRetain");
}

FAKE cuCtxPushCurrent_v2(void*) { return answer("cuCtxPushCurrent_v2"); }
FAKE cuCtxPopCurrent_v2(void**) { return answer("cuCtxPopCurrent_v2"); }

// NOLINTNEXTLINE(readability-non-const-parameter): as the driver has it
FAKE cuPointerGetAttributes(unsigned count, int* attributes, void** values,
                            unsigned long long address) {
  const bool ours = address >= memory_begin && address < memory_begin + memory_bytes;
  for (unsigned i = 0; i < count; ++i) {
    constexpr int memory_type = 2;
    constexpr int device_ordinal = 9;
    if (attributes[i] == memory_type) *static_cast<unsigned*>(values[i]) = ours ? 2 : 0;
    if (attributes[i] == device_ordinal) *static_cast<int*>(values[i]) = ours ? 0 : -2;
  }
  return answer("cuPointerGetAttributes");
}

FAKE cuMemAlloc_v2(unsigned long long* address, std::size_t) {
  *address = memory_begin;
  return answer("cuMemAlloc_v2");
}

FAKE cuMemFree_v2(unsigned long long) { return answer("cuMemFree_v2"); }
FAKE cuMemHostRegister_v2(void*, std::size_t, unsigned) { return answer("cuMemHostRegister_v2"); }
FAKE cuMemHostUnregister(void*) { return answer("cuMemHostUnregister"); }

FAKE cuMemcpyAsync(unsigned long long to, unsigned long long from, std::size_t bytes,
                   void* stream) {
  constexpr int illegal_address = 700;  // no memory to copy
  const int code = answer("cuMemcpyAsync");
  const std::lock_guard lock(state().mutex);
  if (code != 0 || !state().has_memory) return code != 0 ? code : illegal_address;
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  if (stream != nullptr) static_cast<Stream*>(stream)->copied = true;
  return 0;
}

FAKE cuStreamCreate(void** stream, unsigned) {
  *stream = new Stream();
  return answer("cuStreamCreate");
}

FAKE cuStreamDestroy_v2(void* stream) {
  delete static_cast<Stream*>(stream);
  return answer("cuStreamDestroy_v2");
}

FAKE cuStreamSynchronize(void* stream) {
  std::unique_lock lock(state().mutex);
  ++state().waiting;
  state().changed.notify_all();
  state().changed.wait(lock, [&] { return !busy(static_cast<Stream*>(stream)); });
  --state().waiting;
  return answer("cuStreamSynchronize");
}

FAKE cuStreamQuery(void* stream) {
  const int code = answer("cuStreamQuery");
  return code != 0 ? code : readiness(static_cast<Stream*>(stream));
}

FAKE cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const std::lock_guard lock(state().mutex);
  static_cast<Stream*>(stream)->after = static_cast<Event*>(event)->of;
  return answer("cuStreamWaitEvent");
}

FAKE cuStreamIsCapturing(void*, int* status) {
  *status = asked("capturing");
  return answer("cuStreamIsCapturing");
}

FAKE cuStreamGetCtx(void*, void** context) {
  *context = &started;
  return answer("cuStreamGetCtx");
}

FAKE cuEventCreate(void** event, unsigned) {
  *event = new Event();
  return answer("cuEventCreate");
}

FAKE cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return answer("cuEventDestroy_v2");
}

FAKE cuEventRecord(void* event, void* stream) {
  const std::lock_guard lock(state().mutex);
  const auto* const of = static_cast<Stream*>(stream);
  static_cast<Event*>(event)->of = busy(of) ? of : nullptr;
  return answer("cuEventRecord");
}

#ifndef WITHOUT_EVENT_QUERY  // an old driver
FAKE cuEventQuery(void* event) {
  const int code = answer("cuEventQuery");
  return code != 0 ? code : readiness(static_cast<Event*>(event)->of);
}
#endif
FAKE cuThreadExchangeStreamCaptureMode(int*) { return answer("cuThreadExchangeStreamCaptureMode"); }

// --- For tests ---------------------------------------------------------------------------------

// Makes memory of the GPU real, once. Returns 0 or an error. Copies move bytes from then on.
FAKE fake_cuda_memory(void** memory, std::size_t bytes) {
  void* const mapped = mmap(reinterpret_cast<void*>(memory_begin), bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (mapped == MAP_FAILED) return 1;
  *memory = mapped;
  const std::lock_guard lock(state().mutex);
  state().has_memory = true;
  return 0;
}

// Holds back the work on a stream, or every copy, or lets it go.
FAKE fake_cuda_hold(void* stream, int held) {
  const std::lock_guard lock(state().mutex);
  static_cast<Stream*>(stream)->held = held != 0;
  state().changed.notify_all();
  return 0;
}

FAKE fake_cuda_hold_copies(int held) {
  const std::lock_guard lock(state().mutex);
  state().copies_held = held != 0;
  state().changed.notify_all();
  return 0;
}

// Returns once `threads` threads wait for a stream.
FAKE fake_cuda_await_waiting(unsigned threads) {
  std::unique_lock lock(state().mutex);
  state().changed.wait(lock, [&] { return state().waiting >= threads; });
  return 0;
}
