// Where swapped tensors live: extents in preallocated files over one or several drives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensorferry/error.h"
#include "tensorferry/export.h"
#include "tensorferry/operation.h"
#include "tensorferry/options.h"

namespace tensorferry {

namespace swap {
class Lease;
class Space;
class Mapping;
struct Seams;
}  // namespace swap

// What the buffers of a SwapSpace are made of. Page-locked memory is faster; ordinary memory can be
// swapped out by the system and does not count towards the memlock limit.
enum class SwapMemory : std::uint8_t { page_locked, ordinary };

// New fields come last, here and in SwapStats.
struct SwapOptions {
  std::vector<std::string> directories;  // at least one; tensors are striped over all of them
  std::size_t buffer_bytes = std::size_t{256} << 20;  // for take() and fetch()
  SwapMemory memory = SwapMemory::page_locked;
  std::string run;    // what the ranks of one run have in common; empty: this process is the run
  unsigned rank = 0;  // both are part of the name of the directory, no more
  HandleOptions handle;
};

struct SwapStats {
  std::uint64_t tensors = 0;
  std::uint64_t tensor_bytes = 0;        // what the tensors hold
  std::uint64_t file_bytes = 0;          // taken on the drives
  std::uint64_t read_bytes = 0;          // from the drives
  std::uint64_t written_bytes = 0;       // to the drives: what wears them
  std::uint64_t forwarded_bytes = 0;     // read from memory whose write was under way
  std::uint64_t prefetched = 0;          // fetches and gets that a prefetch served
  std::uint64_t prefetches_in_vain = 0;  // given up for the room they took, or out of date
  std::uint64_t waits = 0;               // calls that had to wait for room in the buffers
  std::uint64_t buffer_bytes = 0;        // all of them
  std::uint64_t buffer_bytes_used = 0;
};

// A part of the buffers of a SwapSpace. Copies share it; its room is free again when
// the last one is gone and no operation uses it. May outlive its SwapSpace. After fork() it is the
// parent's alone, as a PinnedBuffer is, also where the buffers are ordinary memory: a child that
// touches it faults.
class TENSORFERRY_EXPORT SwapBuffer {
 public:
  [[nodiscard]] std::span<std::byte> bytes() const noexcept;  // begins a page

  // For the library's own rooms.
  explicit SwapBuffer(std::shared_ptr<swap::Lease> lease) : lease_(std::move(lease)) {}

 private:
  std::shared_ptr<swap::Lease> lease_;
};

// Whether all of `memory` lies in one SwapBuffer of this process: operations of a SwapSpace then
// keep it by themselves.
[[nodiscard]] TENSORFERRY_EXPORT bool in_swap_buffer(std::span<const std::byte> memory);

// Tensors as they are on the drive, mapped into memory: pages come as they are touched and can
// leave again. What is written to it is private and never reaches the drive. Stays as it was also
// when the tensor is put again or dropped, and may outlive its SwapSpace. A child of fork() has it
// too.
class TENSORFERRY_EXPORT SwapView {
 public:
  [[nodiscard]] std::span<std::byte> bytes() const noexcept;

  // For the library's own rooms.
  explicit SwapView(std::shared_ptr<swap::Mapping> mapping) : mapping_(std::move(mapping)) {}

 private:
  std::shared_ptr<swap::Mapping> mapping_;
};

struct SwapPart {
  std::string_view key;
  std::uint64_t offset = 0;  // whole pages of the kernel's: 4096 bytes, on some aarch64 more
  std::uint64_t bytes = 0;   // the same, except for the last part of a view
};

// Keeps tensors by name in files that it makes, mode 0600, in a directory of its own for each run
// and rank below each of the given ones. They are removed when it is destroyed; those of a run that
// was killed, when the next one starts. All members may be called from any number of threads.
//
// After fork() it belongs to the parent. In a child its use is an Error (ECHILD), directories() and
// notes() aside, and its end, and that of its buffers and views, does nothing and is safe.
//
// A tensor that is put again gets new room on the drives; the old room is free when the new bytes
// are on the drive. Readers see the old bytes or the new ones, and a put that fails changes
// nothing.
class TENSORFERRY_EXPORT SwapSpace {
 public:
  using Clock = Operation::Clock;

  // Throws Error for a directory that is not there or cannot be written, and for anything in it
  // that is not ours where ours should be: a symbolic link, another user's directory.
  explicit SwapSpace(const SwapOptions& options);
  // Cancels what is in flight, waits until the kernel has let go of every buffer, removes the
  // files.
  ~SwapSpace();
  SwapSpace(SwapSpace&&) noexcept;
  SwapSpace& operator=(SwapSpace&&) noexcept;

  // Starts to write a tensor and returns at once. The memory must stay as it is until the operation
  // is done; until then the tensor is read from it. Throws Error (ENOSPC) with the bytes needed and
  // free when the drives are full: the tensor is then what it was before.
  // Memory of a GPU is taken after the work that is queued on `stream`.
  Operation put(std::string_view key, std::span<const std::byte> memory, CudaStream stream = {});

  // Starts to fill memory with a tensor, or with a part of it, and returns at once; only a prefetch
  // under way is waited for. What need not come from the drive is there when it returns, and counts
  // 0 bytes; for memory of a GPU the call then waits for the work that is queued on `stream`, which
  // may itself wait for the put() of that tensor.
  // Throws Error: ENOENT for a key that is not there, EINVAL for more bytes than it holds.
  Operation get(std::string_view key, std::span<std::byte> memory, std::uint64_t offset = 0,
                CudaStream stream = {});

  // Begins to read a tensor into the buffers, for the next fetch() or get() of it. A hint: false
  // where there is no room now, or nothing to be read. Prefetched tensors give way to take().
  bool prefetch(std::string_view key);

  struct Fetched {
    SwapBuffer buffer;
    Operation operation;  // when it is done, the bytes are there
  };
  // A tensor in a buffer: the one that prefetch() has begun to fill, or a new one. Waits for room
  // in the buffers, not for the bytes. nullopt when the deadline passes first.
  std::optional<Fetched> fetch(std::string_view key,
                               Clock::time_point deadline = Clock::time_point::max());

  // Room in the buffers, of unknown content, to be filled and put. Waits until there is some;
  // nullopt when the deadline passes first. Throws Error (EINVAL) for more than there is in all.
  std::optional<SwapBuffer> take(std::size_t bytes,
                                 Clock::time_point deadline = Clock::time_point::max());

  // The same for whoever waits for an operation as well: nullopt also when that is done first.
  std::optional<SwapBuffer> take(std::size_t bytes, const Operation& until,
                                 Clock::time_point deadline = Clock::time_point::max());

  // Forgets a tensor. Operations under way on it go on. False if there is none of that name.
  bool drop(std::string_view key);

  // Parts of tensors as one stretch of memory. Waits for their writes; throws as get() does, and
  // ENOMEM for more than there are addresses. All parts are checked before anything is mapped.
  [[nodiscard]] SwapView view(std::span<const SwapPart> parts);

  // The size of a tensor; nullopt if there is none of that name.
  [[nodiscard]] std::optional<std::uint64_t> size(std::string_view key) const;

  // Takes so much room on the drives ahead of need. Throws Error (ENOSPC).
  void reserve(std::uint64_t bytes);

  [[nodiscard]] SwapStats stats() const;
  [[nodiscard]] const std::vector<std::string>& directories() const noexcept;  // our own
  // What a user should know: a directory in memory, another live run, leftovers removed.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept;
  [[nodiscard]] std::string engine_reason() const;

  // For the library's own rooms.
  SwapSpace(const SwapOptions& options, const swap::Seams& seams);

 private:
  // Its deleter knows of fork().
  std::shared_ptr<swap::Space> space_;
};

}  // namespace tensorferry
