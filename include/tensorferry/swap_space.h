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

// The memory of a SwapSpace's buffers. Page-locked memory is faster. The system can swap out
// ordinary memory, which does not count towards the memlock limit.
enum class SwapMemory : std::uint8_t { page_locked, ordinary };

// Whether a SwapSpace computes a checksum of each tensor while it is written, for snapshots.
enum class SwapChecksums : std::uint8_t { none, computed };

// New fields come last, here and in SwapStats.
struct SwapOptions {
  // At least one. Tensors are striped over all of them, by the speed of their drives.
  std::vector<std::string> directories;
  std::size_t buffer_bytes = std::size_t{256} << 20;  // for take() and fetch()
  SwapMemory memory = SwapMemory::page_locked;
  std::string run;    // a name that all ranks of a run share; empty: this process is the run
  unsigned rank = 0;  // run and rank only become part of the directory's name
  HandleOptions handle;
  SwapChecksums checksums = SwapChecksums::none;
};

// One of the directories of a SwapSpace and the drive below it.
struct SwapDrive {
  std::string directory;
  std::uint64_t stored_bytes = 0;      // of tensors, in whole pages
  std::uint64_t bytes_per_second = 0;  // measured, else from the profile; 0: unknown
  double share = 1;                    // the part of new bytes that it gets; all parts make 1
};

struct SwapStats {
  std::uint64_t tensors = 0;
  std::uint64_t tensor_bytes = 0;        // the sizes of all tensors
  std::uint64_t file_bytes = 0;          // the sizes of the files on the drives
  std::uint64_t read_bytes = 0;          // from the drives
  std::uint64_t written_bytes = 0;       // to the drives, which wears them
  std::uint64_t forwarded_bytes = 0;     // read from the memory of an unfinished put
  std::uint64_t prefetched = 0;          // fetch() and get() calls that a prefetch served
  std::uint64_t prefetches_in_vain = 0;  // dropped for their buffer, or out of date
  std::uint64_t waits = 0;               // calls that had to wait for free buffers
  std::uint64_t buffer_bytes = 0;        // the size of the buffers
  std::uint64_t buffer_bytes_used = 0;
  std::vector<SwapDrive> drives;     // in the order of the directories
  std::uint64_t snapshots = 0;       // that keep tensors of this space
  std::uint64_t snapshot_bytes = 0;  // of tensors that only snapshots keep, in whole pages
};

// Where a snapshot has the tensors of a SwapSpace. The members are what it takes to find them
// again: keep them in a file of your own.
struct SwapSnapshot {
  struct Extent {
    std::uint64_t file = 0;  // its index in `files`
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  struct Tensor {
    std::string key;
    std::uint64_t bytes = 0;
    std::vector<Extent> extents;            // whole pages, in the order of the tensor's bytes
    std::optional<std::uint64_t> checksum;  // if it was computed when the tensor was put
  };
  std::string name;
  std::vector<std::string> files;  // absolute paths
  std::vector<Tensor> tensors;
};

// A part of the buffers of a SwapSpace. Copies share it. It becomes free when the last copy
// is destroyed and no operation uses it. May outlive its SwapSpace. After fork() only the parent
// has it, even if the buffers are ordinary memory: a child that touches it faults.
class TENSORFERRY_EXPORT SwapBuffer {
 public:
  [[nodiscard]] std::span<std::byte> bytes() const noexcept;  // begins a page

  // For the library's own rooms.
  explicit SwapBuffer(std::shared_ptr<swap::Lease> lease) : lease_(std::move(lease)) {}

 private:
  std::shared_ptr<swap::Lease> lease_;
};

// Whether all of `memory` lies in one SwapBuffer of this process. Operations of a SwapSpace keep
// such memory alive.
[[nodiscard]] TENSORFERRY_EXPORT bool in_swap_buffer(std::span<const std::byte> memory);

// Tensors on the drive, mapped into memory: the system reads pages when they are touched and may
// drop them again. Writes to the memory are private and never reach the drive. The view does not
// change when a tensor is put again or dropped. It may outlive its SwapSpace, and a child of fork()
// has it too.
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
  std::uint64_t offset = 0;  // a multiple of the page size: 4096 bytes, on some aarch64 more
  std::uint64_t bytes = 0;   // a multiple too, except for the last part of a view
};

// Frees the space of a file of snapshots that none of `kept` covers; the numbers of files in these
// do not count. Does nothing and returns false if a living SwapSpace may write to the file, if the
// file has other names than the `names` that the caller knows, or if the file system cannot do it.
// Throws Error if the file cannot be opened.
TENSORFERRY_EXPORT bool trim_snapshot_file(const std::string& path,
                                           std::span<const SwapSnapshot::Extent> kept,
                                           std::uint64_t names);

// Keeps tensors by name in files of mode 0600. It makes them in a new directory for its run and
// rank below each given directory. The destructor removes them; if a run was killed, the next run
// removes its files. All members may be called from any number of threads at once.
//
// After fork() a SwapSpace belongs to the parent. In a child all members but directories() and
// notes() throw Error (ECHILD); destroying it, its buffers and its views there is safe and does
// nothing.
//
// Each drive gets as much of the tensors as its speed suggests: as its profile says
// (`tensorferry tune`), and then as the space measures it. Drives of unknown speed count as
// average. A tensor of less than 1 MiB for each drive lies on fewer of them or on one.
//
// A tensor that is put again gets new space on the drives; the old space is free when the new bytes
// are on the drive. Readers see the old bytes or the new ones, and a put that fails changes
// nothing.
class TENSORFERRY_EXPORT SwapSpace {
 public:
  using Clock = Operation::Clock;

  // Throws Error if a directory does not exist or cannot be written, or if a symbolic link or
  // another user's directory has the name of ours.
  explicit SwapSpace(const SwapOptions& options);
  // Cancels all operations, waits until the kernel has released every buffer, removes the files.
  ~SwapSpace();
  SwapSpace(SwapSpace&&) noexcept;
  SwapSpace& operator=(SwapSpace&&) noexcept;

  // Starts to write a tensor and returns at once. The memory must stay unchanged until the
  // operation is done; until then get() and fetch() read from it. Memory of a GPU is read after the
  // work that is queued on `stream`. Throws Error (ENOSPC), with the bytes needed and free, if the
  // drives are full; the tensor then stays as it was.
  Operation put(std::string_view key, std::span<const std::byte> memory, CudaStream stream = {});

  // Starts to fill memory with a tensor, or with a part of it from `offset` on, and returns at
  // once, with two exceptions. If a prefetch of the tensor is running, the call waits for it. If
  // the bytes are in memory already, the call copies them, and the operation is done with 0 bytes;
  // for memory of a GPU it first waits for the work that is queued on `stream`, which may itself
  // wait for the put() of that tensor. Throws Error: ENOENT if no tensor has that key, EINVAL for
  // bytes beyond its end.
  Operation get(std::string_view key, std::span<std::byte> memory, std::uint64_t offset = 0,
                CudaStream stream = {});

  // Starts to read a tensor into the buffers, for the next fetch() or get() of it. Only a hint:
  // returns false if the buffers are full now, or if the tensor is in memory. take() may drop
  // prefetched tensors. Throws Error (ENOENT) if no tensor has that key.
  bool prefetch(std::string_view key);

  struct Fetched {
    SwapBuffer buffer;
    Operation operation;  // when it is done, the buffer holds the bytes
  };
  // Reads a tensor into a buffer: the one that prefetch() fills, or a new one. Waits for a free
  // buffer, but not for the bytes. Returns nullopt if the deadline passes first. Throws Error
  // as get() and take() do.
  std::optional<Fetched> fetch(std::string_view key,
                               Clock::time_point deadline = Clock::time_point::max());

  // Takes a part of the buffers, with any content, to fill and put(). Waits until one is free.
  // Returns nullopt if the deadline passes first. Throws Error (EINVAL) for more than the size of
  // the buffers.
  std::optional<SwapBuffer> take(std::size_t bytes,
                                 Clock::time_point deadline = Clock::time_point::max());

  // The same for a caller that also waits for an operation: returns nullopt too if `until` is done
  // first.
  std::optional<SwapBuffer> take(std::size_t bytes, const Operation& until,
                                 Clock::time_point deadline = Clock::time_point::max());

  // Forgets a tensor. Its running operations go on. Returns false if no tensor has that key.
  bool drop(std::string_view key);

  // Maps parts of tensors one after the other into memory. Waits for the writes of these tensors.
  // Throws Error as get() does, EINVAL for parts that are not whole pages, and ENOMEM if the
  // process has too few addresses left. Checks all parts before it maps any.
  [[nodiscard]] SwapView view(std::span<const SwapPart> parts);

  // The size of a tensor; nullopt if no tensor has that key.
  [[nodiscard]] std::optional<std::uint64_t> size(std::string_view key) const;

  // Allocates space for `bytes` on the drives ahead of need. Throws Error (ENOSPC).
  void reserve(std::uint64_t bytes);

  // Keeps the tensors of these keys as they are now, without a copy: also when they are put again
  // or dropped, and when the space and its process have ended. Waits for their writes, and then for
  // one fdatasync of each drive. When the call returns, all bytes are durable.
  //
  // Gives the files of the space a second name, `name` and a number, in the directory
  // tensorferry-snapshots-UID beside that of the run. Nothing removes these names.
  // To get the space back, remove the files, and call drop_snapshot() if this space has taken the
  // snapshot, so that it can use the space itself.
  //
  // Makes room first for as many bytes as the snapshot keeps, so that the tensors can be put again;
  // what the snapshots `replaced` keep counts as free, because the caller drops them next. Throws
  // Error (ENOSPC) if the drives have less; then, and after any other Error, nothing has changed.
  // Throws EINVAL for a name that is not made of letters, digits, '-', '_' and '.', EEXIST if a
  // snapshot of that name exists, ENOENT for an unknown key, EIO if the last write of one has
  // failed.
  [[nodiscard]] SwapSnapshot snapshot(const std::string& name, std::span<const std::string> keys,
                                      std::span<const std::string> replaced = {});

  // The space may use again what only this snapshot keeps. Removes no file. Returns false if the
  // space has taken no snapshot of that name.
  bool drop_snapshot(const std::string& name);

  // The names of the snapshots that keep tensors of this space.
  [[nodiscard]] std::vector<std::string> snapshots() const;

  // Takes over the tensors of a snapshot, of this space or of any other, under their keys, without
  // reading them. The files of the snapshot are never written to: a tensor that is put again goes
  // to files of this space. The first get(), fetch() or prefetch() of a whole tensor compares its
  // checksum, and the operation fails with EBADMSG if that is wrong. Throws Error: ENOENT if a file
  // is missing, EPERM if it belongs to somebody else, EINVAL if it is too short or the tensors do
  // not fit their extents; then nothing has changed.
  void attach(const SwapSnapshot& snapshot);

  [[nodiscard]] SwapStats stats() const;
  [[nodiscard]] const std::vector<std::string>& directories() const noexcept;  // those it made
  // What a user should know: a directory is in memory, another run uses it, old files were removed.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept;
  [[nodiscard]] std::string engine_reason() const;

  // For the library's own rooms.
  SwapSpace(const SwapOptions& options, const swap::Seams& seams);

 private:
  // The deleter does nothing in a child of fork().
  std::shared_ptr<swap::Space> space_;
};

}  // namespace tensorferry
