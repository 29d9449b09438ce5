// The interface between the handle and what moves bytes. An engine takes requests, hands them to
// the kernel and reports each completion once, with the kernel's own number. It does not know
// files, tensors, retries or what an errno means: handle/retry judges all of that. README.md in
// this folder tells how to add one.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/result.h"
#include "os/system.h"
#include "tensorferry/options.h"

namespace tensorferry::engines {

class GpuFile;

enum class RequestKind : std::uint8_t { read, write, sync_data, sync_full };

[[nodiscard]] constexpr bool is_sync(RequestKind kind) noexcept {
  return kind == RequestKind::sync_data || kind == RequestKind::sync_full;
}

// "read", "write", "fdatasync", "fsync".
[[nodiscard]] const char* verb(RequestKind kind) noexcept;

// One kernel-sized piece of an operation. `bytes` is at most 1 GiB. sync requests use only `fd`.
struct Request {
  std::uint64_t tag = 0;  // comes back in the Completion; unique among the requests in flight
  RequestKind kind = RequestKind::read;
  int fd = -1;
  int file_index = -1;    // where `fd` is registered, or -1
  int buffer_index = -1;  // where `memory` is registered, or -1
  std::byte* memory = nullptr;
  std::uint32_t bytes = 0;
  std::uint64_t offset = 0;
  int gpu = -1;                       // that has the memory, if the engine moves it
  const GpuFile* gpu_file = nullptr;  // for the memory of that GPU
};

struct Completion {
  std::uint64_t tag = 0;
  std::int32_t result = 0;  // bytes moved, -errno, or -code (see own_code())
};

// The first `taken` requests are in flight. If that is not all of them, the kernel refused the next
// one with `error` (a positive errno); offer it and the rest again.
struct Submitted {
  std::size_t taken = 0;
  int error = 0;
};

// Whom an engine serves. `one_thread`: the owner, which attached it. `any_thread`: a thread may
// submit and another reap at the same time, neither need be the owner, and requests complete
// whatever the thread that submitted them does.
enum class Service : std::uint8_t { one_thread, any_thread };

struct Capabilities {
  unsigned buffers_max = 0;  // how many buffers can be registered; 0: none
  unsigned files_max = 0;
  Service service = Service::one_thread;
};

inline constexpr std::size_t registered_buffer_bytes_max = std::size_t{1} << 30;

// Only one thread, the owner, calls an engine, wake() aside, unless it serves any thread: then one
// thread at a time calls reap(), and one at a time everything else. At most `depth` requests are in
// flight.
class Engine {
 public:
  using Nanoseconds = std::chrono::nanoseconds;
  static constexpr Nanoseconds forever = Nanoseconds::max();

  Engine() = default;
  // Every request that was taken must have been reaped before.
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] virtual EngineKind kind() const noexcept = 0;
  [[nodiscard]] virtual Capabilities capabilities() const noexcept = 0;

  // Makes the calling thread the owner. Call it once, before anything else. Returns 0 or -errno.
  virtual int attach() = 0;

  // Hands `requests` to the kernel with one system call, if the kernel takes them. Does not wait.
  virtual Submitted submit(std::span<const Request> requests) = 0;

  // Waits until something completes, wake() is called or `limit` passes (zero: does not wait).
  // Returns how many completions were written to `out`, possibly 0; or -errno.
  virtual int reap(std::span<Completion> out, Nanoseconds limit) = 0;

  // Ends the current reap(), or the next one. From any thread.
  virtual void wake() noexcept = 0;

  // Asks the kernel to end a request early. The request still completes through reap().
  virtual void cancel(std::uint64_t tag) noexcept = 0;

  // Registers at an index below the number in capabilities(). Returns 0 or -errno. A buffer is at
  // most registered_buffer_bytes_max long. Unregistering never waits and never fails; requests in
  // flight keep what they use.
  virtual int register_buffer(unsigned index, std::span<std::byte> memory);
  // Does the same for memory that other engines of this process may register too, under the same
  // id: if the kernel can share it between them, it pins the memory and charges it to the memlock
  // limit once. An id must not be used again for other memory.
  virtual int share_buffer(unsigned index, std::span<std::byte> memory, std::uint64_t id);
  virtual void unregister_buffer(unsigned index) noexcept;
  virtual int register_file(unsigned index, int fd);
  virtual void unregister_file(unsigned index) noexcept;

  // A descriptor that is readable when a request has ended that was submitted after the first call
  // of ready_fd(), as long as nobody reads it (an eventfd); -1 if the engine has none. Only engines
  // that serve any thread have one.
  [[nodiscard]] virtual int ready_fd() { return -1; }

  // CPU time of threads that the engine runs itself.
  [[nodiscard]] virtual double cpu_seconds() const noexcept { return 0; }

 protected:
  // The longest sleep of reap() while the kernel refuses to watch for wake().
  static constexpr Nanoseconds unwatched_limit{1'000'000};
};

// --- Memory of GPUs ---

// Whether an engine of this kind moves the memory of GPUs itself. All other memory is as well off
// with any other engine.
[[nodiscard]] bool moves_gpu_memory(EngineKind kind) noexcept;

// How the bytes of such an engine reach a GPU here, in words.
[[nodiscard]] std::string gpu_path(EngineKind kind);

// A descriptor in the form that such an engine needs. It must stay open as long as the GpuFile. All
// who use a descriptor at the same time share one. The Error says in words why the engine refuses
// it, as it does -1.
[[nodiscard]] Result<std::shared_ptr<const GpuFile>> open_gpu_file(EngineKind kind, int fd);

// The meaning of a code that a Completion has in place of an errno; nullopt for an errno.
struct OwnCode {
  int error = 0;     // the errno that comes closest
  std::string text;  // the engine's name for it, and what to do
};
[[nodiscard]] std::optional<OwnCode> own_code(int code);

// Opens an engine for up to `depth` requests in flight, after a request has come back through one
// of its kind. The Error says which call the system refused and why. `kind` is not `automatic`: the
// conductor chooses.
[[nodiscard]] Result<std::unique_ptr<Engine>> open_engine(EngineKind kind, unsigned depth,
                                                          os::System& system);

// One per engine file.
[[nodiscard]] Result<std::unique_ptr<Engine>> open_uring_engine(unsigned depth, Polling polling);
[[nodiscard]] Result<std::unique_ptr<Engine>> open_libaio_engine(unsigned depth);
[[nodiscard]] Result<std::unique_ptr<Engine>> open_threads_engine(unsigned depth,
                                                                  os::System& system);
[[nodiscard]] Result<std::unique_ptr<Engine>> open_gds_engine(unsigned depth, os::System& system);

// An engine that asks `polled` for completions again and again while that has requests: reads and
// writes of descriptors with O_DIRECT. `rest` has all others. `polled` is never asked to wait.
[[nodiscard]] std::unique_ptr<Engine> make_polling_engine(std::unique_ptr<Engine> polled,
                                                          std::unique_ptr<Engine> rest,
                                                          unsigned depth);

}  // namespace tensorferry::engines
