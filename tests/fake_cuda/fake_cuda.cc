// A libcuda.so.1 that is no CUDA: it lets tests see how the library is found, what happens where it
// is too old, and how its errors are told. It moves no bytes and has no GPU.
//
// FAKE_CUDA="cuMemAlloc_v2=2 cuMemcpyAsync=700" makes these functions return these codes.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

bool started = false;
constexpr unsigned long long memory_begin = 0x7000'0000'0000;  // nothing is mapped there
constexpr unsigned long long memory_bytes = 1ULL << 40;

// What FAKE_CUDA asks this function to return; 0 if nothing.
int asked(const char* function) {
  const char* text = std::getenv("FAKE_CUDA");
  const char* found = text != nullptr ? std::strstr(text, function) : nullptr;
  if (found == nullptr || found[std::strlen(function)] != '=') return 0;
  return std::atoi(found + std::strlen(function) + 1);
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

FAKE cuMemcpyAsync(unsigned long long, unsigned long long, std::size_t, void*) {
  constexpr int illegal_address = 700;  // there is nothing to be copied
  const int code = answer("cuMemcpyAsync");
  return code != 0 ? code : illegal_address;
}

FAKE cuStreamCreate(void** stream, unsigned) {
  *stream = &started;
  return answer("cuStreamCreate");
}

FAKE cuStreamDestroy_v2(void*) { return answer("cuStreamDestroy_v2"); }
FAKE cuStreamSynchronize(void*) { return answer("cuStreamSynchronize"); }
FAKE cuStreamQuery(void*) { return answer("cuStreamQuery"); }
FAKE cuStreamWaitEvent(void*, void*, unsigned) { return answer("cuStreamWaitEvent"); }

FAKE cuStreamIsCapturing(void*, int* status) {
  *status = asked("capturing");
  return answer("cuStreamIsCapturing");
}

FAKE cuStreamGetCtx(void*, void** context) {
  *context = &started;
  return answer("cuStreamGetCtx");
}

FAKE cuEventCreate(void** event, unsigned) {
  *event = &started;
  return answer("cuEventCreate");
}

FAKE cuEventDestroy_v2(void*) { return answer("cuEventDestroy_v2"); }
FAKE cuEventRecord(void*, void*) { return answer("cuEventRecord"); }
#ifndef WITHOUT_EVENT_QUERY  // an old driver
FAKE cuEventQuery(void*) { return answer("cuEventQuery"); }
#endif
FAKE cuThreadExchangeStreamCaptureMode(int*) { return answer("cuThreadExchangeStreamCaptureMode"); }
