// The choices a user makes when opening a Handle or writing a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "tensorferry/error.h"
#include "tensorferry/export.h"

namespace tensorferry {

// How bytes move. `automatic` ("auto" as text) takes the first that works of io_uring, libaio and
// threads, and keeps the reason. Any other choice is used or is an error.
//
// `gds` moves memory of GPUs with NVIDIA's cuFile, and other memory as `automatic` does.
enum class EngineKind : std::uint8_t { automatic, io_uring, libaio, threads, gds };

// "auto", "io_uring", "libaio", "threads", "gds".
[[nodiscard]] TENSORFERRY_EXPORT std::string_view to_string(EngineKind kind) noexcept;

// The reverse of to_string(). Throws Error (EINVAL) that names the engines.
[[nodiscard]] TENSORFERRY_EXPORT EngineKind parse_engine_kind(std::string_view text);

// A stream of CUDA: a cudaStream_t or CUstream. A transfer of GPU memory waits for the work that is
// queued on the stream when the transfer starts. nullptr is the default stream.
struct CudaStream {
  void* handle = nullptr;
};

// `single` makes one system call per request, `batch` one for many.
enum class Submit : std::uint8_t { batch, single };

// `on` refills the queue as completions arrive; `off` submits a batch and drains it.
enum class Overlap : std::uint8_t { on, off };

// What polls, instead of sleeping, while requests are under way; only with io_uring. It burns a
// core for each worker.
//
// `submission`: a thread of the kernel for each worker takes requests from the ring, so that
// submitting costs no system call (SQPOLL). It sleeps when nothing has come for 10 ms.
//
// `completion`: workers ask the device for completions (IOPOLL). The device must have polled
// queues; for NVMe, set nvme.poll_queues on the kernel's command line. On any other device an
// operation fails with EOPNOTSUPP.
enum class Polling : std::uint8_t { off, submission, completion };

// "off", "submission", "completion".
[[nodiscard]] TENSORFERRY_EXPORT std::string_view to_string(Polling polling) noexcept;

// The reverse of to_string(). Throws Error (EINVAL) that names the choices.
[[nodiscard]] TENSORFERRY_EXPORT Polling parse_polling(std::string_view text);

// What must be on the drive before a write is done. `none`: nothing. `data`: the bytes and the
// metadata that reading them back needs. `full`: all metadata too, and the file's entry in the
// directory that holds it at the time of the sync, even if the file was renamed after it was
// opened. Of several hard links `full` makes the one durable by which the file was opened.
enum class Durability : std::uint8_t { none, data, full };

// The class of an operation. Workers take urgent operations before normal ones, and these before
// those in the background. While urgent or normal operations use a drive, the bytes that all
// handles of the process have under way in the background on it are limited: to between 1 and
// 32 MiB, so that few urgent requests take much longer than on an idle drive.
//
// Nothing starves. After 16 blocks of higher classes the workers of a handle take one of a class
// that waits; and a handle that has nothing else to do always has one request in the background
// under way on each drive.
//
// A thread that waits for an operation raises it to its own priority (see PriorityScope); without a
// scope, to that of the operation's handle.
enum class Priority : std::uint8_t { urgent, normal, background };

// What closing a Handle does with its reads. It finishes writes either way.
enum class OpenReads : std::uint8_t { cancel, finish };

// A setting that is 0 or `automatic` comes from the profile that `tensorferry tune` saved for the
// drive, else from sysfs. A block is at most 1 GiB, the depth at most 4096, and there are at most
// 256 workers. New fields come last.
struct HandleOptions {
  EngineKind engine = EngineKind::automatic;
  std::size_t block_bytes = 0;  // bytes per request; 0: the size that suits the file's device
  unsigned queue_depth = 0;  // requests in flight per worker; 0: the number that suits the device
  unsigned workers = 0;      // threads for each drive, each with its own engine; 0: one per disk,
                             // at most half of the processors, at most 4, and fewer if the
                             // process has many already
  Submit submit = Submit::batch;
  Overlap overlap = Overlap::on;
  std::size_t slot_bytes = 0;  // of each drive, for what cannot go in place; 0: 64 MiB, or 1 MiB
                               // per worker, and with overlap no more of it in use at a time than
                               // suits the cache

  // A handle that closes finishes its writes. If no byte moves for this time, it gives up the rest,
  // for example because they wait for a stream of a GPU that never ends.
  double close_limit_seconds = 30;
  // The destructor calls it with the Error that nobody would see otherwise: that of the first
  // operation that was given up, or that failed unnoticed. close() throws it instead. Must not
  // throw.
  std::function<void(const Error&)> on_lost = {};

  // Not `off`: `automatic` is io_uring or an error.
  Polling polling = Polling::off;

  // Of operations whose call names no other, on threads without a PriorityScope.
  Priority priority = Priority::normal;
  // How many bytes all operations of the handle together may move in a second; 0: no limit. Once
  // the handle closes, neither this nor the rate of a class holds: it finishes its writes at the
  // speed of the drive.
  std::uint64_t rate = 0;
};

}  // namespace tensorferry
