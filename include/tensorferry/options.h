// The choices a user makes when opening a Handle or writing a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "tensorferry/error.h"
#include "tensorferry/export.h"

namespace tensorferry {

// How bytes move. `automatic` ("auto" as text) takes io_uring, then libaio, then threads, and keeps
// the reason; any other choice is honoured or is an error.
//
// `gds` moves memory of GPUs with NVIDIA's cuFile, and other memory as `automatic` does.
enum class EngineKind : std::uint8_t { automatic, io_uring, libaio, threads, gds };

// "auto", "io_uring", "libaio", "threads", "gds".
[[nodiscard]] TENSORFERRY_EXPORT std::string_view to_string(EngineKind kind) noexcept;

// The reverse. Throws Error (EINVAL) that names the known engines.
[[nodiscard]] TENSORFERRY_EXPORT EngineKind parse_engine_kind(std::string_view text);

// A stream of CUDA: a cudaStream_t or CUstream. Transfers of GPU memory wait for the work that is
// queued on it when they are started; nullptr is the default stream.
struct CudaStream {
  void* handle = nullptr;
};

// `single` makes one system call per request, `batch` one for many.
enum class Submit : std::uint8_t { batch, single };

// `on` refills the queue as completions arrive; `off` submits a batch and drains it.
enum class Overlap : std::uint8_t { on, off };

// What must have reached the drive before a write counts as done: nothing; the bytes and what is
// needed to read them back; those, all metadata and the file's entry in the directory that holds it
// when it is synced, also if it was renamed since it was opened. Of several hard links that is the
// one by which it was opened.
enum class Durability : std::uint8_t { none, data, full };

// What closing a Handle does with reads under way. Writes are finished either way.
enum class OpenReads : std::uint8_t { cancel, finish };

// What is left at 0 or `automatic` is taken from the profile that `tensorferry tune` has made for
// the drive, else from what sysfs tells of it. A block is at most 1 GiB, the depth at most 4096,
// and there are at most 256 workers. New fields come last.
struct HandleOptions {
  EngineKind engine = EngineKind::automatic;
  std::size_t block_bytes = 0;  // bytes per request; 0: what the file's device likes best
  unsigned queue_depth = 0;     // requests in flight per worker; 0: what suits the device
  unsigned workers = 0;         // threads that move bytes, each with an engine of its own; 0: one
                                // per disk, within half of the processors, at most 4
  Submit submit = Submit::batch;
  Overlap overlap = Overlap::on;
  std::size_t slot_bytes = 0;  // memory for transfers that cannot go in place; 0: 64 MiB, or 1 MiB
                               // per worker, and with overlap no more of it under way than suits
                               // the cache

  // A handle that closes finishes its writes. When no byte has moved for so long it gives up those
  // that are left: their files are full, gone, or wait for a stream of a GPU that does not end.
  double close_limit_seconds = 30;
  // Called by the destructor with what would be lost in silence: the first operation that failed,
  // or was given up, and that nobody has asked about. close() throws it instead. Must not throw.
  std::function<void(const Error&)> on_lost = {};
};

}  // namespace tensorferry
