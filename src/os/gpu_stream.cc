#include "os/gpu_stream.h"

#include <deque>
#include <utility>
#include <vector>

#include "os/cuda_driver.h"

namespace tensorferry::os {

namespace {

constexpr unsigned stream_non_blocking = 1;
constexpr unsigned event_without_timing = 2;

// Whether we can wait for a stream of the user.
CudaCode check_stream(const CudaDriver& driver, int device, void* stream) {
  int capturing = 0;
  CudaCode code = driver.stream_is_capturing(stream, &capturing);
  if (code != CudaCode::success) return code;
  if (capturing != 0) return CudaCode::capture_unsupported;
  if (stream == nullptr) return CudaCode::success;  // each device has this one
  CudaDriver::Context context = nullptr;
  code = driver.stream_context(stream, &context);
  if (code != CudaCode::success) return code;
  const auto own = context_of(driver, device, IfMissing::refuse);
  return own.ok() && own.value() == context ? CudaCode::success : CudaCode::foreign_stream;
}

// Asks whether an event has passed. If CUDA forbids the question because somebody captures a graph,
// the answer is "not ready".
CudaCode query(const CudaDriver& driver, void* event) noexcept {
  int capture_mode = capture_mode_relaxed;
  driver.exchange_capture_mode(&capture_mode);
  const CudaCode code = driver.event_query(event);
  driver.exchange_capture_mode(&capture_mode);
  return is_of_capture(code) ? CudaCode::not_ready : code;
}

}  // namespace

CudaResult<std::shared_ptr<GpuFence>> GpuFence::after(int device, void* stream) {
  void* event = nullptr;
  const CudaStatus done = on_gpu(device, "cuStreamQuery", [&](const CudaDriver& driver) {
    CudaCode code = check_stream(driver, device, stream);
    if (code != CudaCode::success) return code;
    code = driver.stream_query(stream);
    if (code != CudaCode::not_ready) return code;  // nothing is queued
    code = driver.event_create(&event, event_without_timing);
    if (code == CudaCode::success) code = driver.event_record(event, stream);
    if (event != nullptr && code != CudaCode::success) driver.event_destroy(event);
    return code;
  });
  if (!done.ok()) return done.error();
  if (event == nullptr) return std::shared_ptr<GpuFence>();
  return std::shared_ptr<GpuFence>(new GpuFence(device, event));
}

GpuFence::~GpuFence() {
  (void)on_gpu(device_, "cuEventDestroy",
               [this](const CudaDriver& driver) { return driver.event_destroy(event_); });
}

bool GpuFence::passed() const noexcept {
  const CudaDriver* driver = cuda();
  return driver == nullptr || query(*driver, event_) != CudaCode::not_ready;
}

struct GpuStream::Marks {
  std::uint64_t last = 0;
  std::uint64_t reached = 0;
  std::deque<std::pair<std::uint64_t, void*>> events;  // of the marks not yet reached, oldest first
  std::vector<void*> spare;
};

GpuStream::GpuStream(int device, void* stream)
    : device_(device), stream_(stream), marks_(std::make_unique<Marks>()) {}

CudaResult<std::unique_ptr<GpuStream>> GpuStream::open(int device) {
  void* stream = nullptr;
  const CudaStatus done = on_gpu(device, "cuStreamCreate", [&](const CudaDriver& driver) {
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

CudaStatus GpuStream::wait_for(const GpuFence& fence) {
  return on_gpu(device_, "cuStreamWaitEvent", [&](const CudaDriver& driver) {
    return driver.stream_wait(stream_, fence.event_, 0);
  });
}

CudaStatus GpuStream::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  return on_gpu(device_, "cuMemcpyAsync", [&](const CudaDriver& driver) {
    return driver.copy(address_of(to), address_of(from), bytes, stream_);
  });
}

CudaResult<std::uint64_t> GpuStream::mark() {
  Marks& marks = *marks_;
  void* event = nullptr;
  if (!marks.spare.empty()) {
    event = marks.spare.back();
    marks.spare.pop_back();
  }
  const CudaStatus done = on_gpu(device_, "cuEventRecord", [&](const CudaDriver& driver) {
    CudaCode code =
        event != nullptr ? CudaCode::success : driver.event_create(&event, event_without_timing);
    if (code == CudaCode::success) code = driver.event_record(event, stream_);
    return code;
  });
  if (!done.ok()) {
    if (event != nullptr) marks.spare.push_back(event);
    return done.error();
  }
  marks.events.emplace_back(++marks.last, event);
  return marks.last;
}

CudaResult<bool> GpuStream::reached(std::uint64_t mark) {
  Marks& marks = *marks_;
  const CudaDriver* driver = cuda();
  if (driver == nullptr) return CudaFailure{.call = "cuEventQuery", .code = CudaCode::not_used};
  while (marks.reached < mark) {
    const CudaCode code = query(*driver, marks.events.front().second);
    if (code == CudaCode::not_ready) return false;
    if (code != CudaCode::success) return cuda_failure(*driver, "cuEventQuery", code);
    marks.reached = marks.events.front().first;
    marks.spare.push_back(marks.events.front().second);
    marks.events.pop_front();
  }
  return true;
}

CudaStatus GpuStream::finish() {
  return on_gpu(device_, "cuStreamSynchronize",
                [this](const CudaDriver& driver) { return driver.stream_synchronize(stream_); });
}

}  // namespace tensorferry::os
