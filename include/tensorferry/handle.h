// What a user opens: an engine, its workers, its limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "tensorferry/error.h"
#include "tensorferry/export.h"
#include "tensorferry/file.h"
#include "tensorferry/operation.h"
#include "tensorferry/options.h"
#include "tensorferry/stats.h"

namespace tensorferry {

namespace handle {
class Conductor;
}

struct ReadTransfer {
  std::span<std::byte> memory;
  File file;
  std::uint64_t offset = 0;
  CudaStream stream = {};  // for memory of a GPU
};

struct WriteTransfer {
  std::span<const std::byte> memory;
  File file;
  std::uint64_t offset = 0;
  CudaStream stream = {};
};

// All members may be called from any number of threads at once. Any memory address, length and
// file offset is exact; aligned memory is used in place, the rest goes through bounded slots. More
// operations than the queue holds wait, they do not fail.
//
// Memory of a GPU (allocated by CUDA, by whomever) goes through the slots too, copied while the
// drive goes on. A transfer of it touches it only after the work that was queued on `stream` at the
// call; when it is done, every stream sees its bytes.
//
// A Handle that is closed or destroyed finishes the writes it has accepted and cancels its reads;
// to give writes up, call cancel_all() first.
//
// After fork() a Handle belongs to the parent. In the child its use is an Error (ECHILD), stats()
// and options() aside, which tell what was at the fork, and its destruction is safe. That holds
// whatever other threads of the parent were doing.
class TENSORFERRY_EXPORT Handle {
 public:
  using Clock = Operation::Clock;

  // Throws Error for settings out of range and for an explicit engine that cannot be had.
  explicit Handle(const HandleOptions& options = {});

  // Closes it, as close() does; what that would throw goes to HandleOptions::on_lost.
  ~Handle();
  Handle(Handle&&) noexcept;
  Handle& operator=(Handle&&) noexcept;

  // Return at once. What can be known at once (a missing file, an offset out of range) throws
  // here; everything later is the operation's error. A read past the end of the file is an error;
  // a write extends the file but never cuts off what was there. A write that fails or is cancelled
  // may have changed some of the bytes it was to overwrite; what it added to the end of the file is
  // cut off again, and nothing else. Writes that overlap in time must not overlap in the file. A
  // process that is killed in a write may leave zeros up to the end that the file was to have: the
  // end moves first.
  Operation read(std::span<std::byte> memory, const File& file, std::uint64_t offset = 0,
                 CudaStream stream = {});
  Operation read(std::span<std::byte> memory, const std::string& path, std::uint64_t offset = 0,
                 CudaStream stream = {});
  Operation write(std::span<const std::byte> memory, const File& file, std::uint64_t offset = 0,
                  Durability durability = Durability::none, CudaStream stream = {});
  Operation write(std::span<const std::byte> memory, const std::string& path,
                  std::uint64_t offset = 0, Durability durability = Durability::none,
                  CudaStream stream = {});

  // Many transfers as one operation. Neighbours in one file become one request. Transfers of one
  // write_many must not overlap (EINVAL). Its files are synced all at once, then each directory
  // once.
  Operation read_many(std::span<const ReadTransfer> transfers);
  Operation write_many(std::span<const WriteTransfer> transfers,
                       Durability durability = Durability::none);

  // Return when done, or throw. A small transfer is made by the calling thread itself.
  void read_now(std::span<std::byte> memory, const File& file, std::uint64_t offset = 0,
                CudaStream stream = {});
  void read_now(std::span<std::byte> memory, const std::string& path, std::uint64_t offset = 0,
                CudaStream stream = {});
  void write_now(std::span<const std::byte> memory, const File& file, std::uint64_t offset = 0,
                 Durability durability = Durability::none, CudaStream stream = {});
  void write_now(std::span<const std::byte> memory, const std::string& path,
                 std::uint64_t offset = 0, Durability durability = Durability::none,
                 CudaStream stream = {});

  // Makes durable what writes to `file` that were done() before this call have written. A failed
  // sync is never retried.
  Operation sync(const File& file, Durability durability = Durability::data);

  // Takes nothing new, finishes the writes and syncs that were accepted, cancels the reads (or
  // finishes them too), waits until the kernel has let go of every buffer, and ends the workers.
  // Gives up what has not moved for HandleOptions::close_limit_seconds, except what the kernel has
  // in hand. Throws the Error of the first operation that was given up, or that failed and nobody
  // has asked about: what close() throws is closed all the same. A second call does nothing.
  void close(OpenReads reads = OpenReads::cancel);
  // The same with a limit: false if it passed first. The handle goes on to close; call it again.
  [[nodiscard]] bool close_until(Clock::time_point deadline, OpenReads reads = OpenReads::cancel);

  // Gives up all that is under way, writes too. Each ends with ECANCELED, soon. The handle stays
  // open; one that is closing closes the sooner.
  void cancel_all() noexcept;

  [[nodiscard]] const HandleOptions& options() const noexcept;  // as given
  // The engine in use and why that one. Before anything is queued: what it would be without a
  // profile, as no drive is known yet.
  [[nodiscard]] std::string_view engine() const;
  [[nodiscard]] std::string engine_reason() const;
  [[nodiscard]] Stats stats() const;

  // For the library's own rooms.
  explicit Handle(std::unique_ptr<handle::Conductor> conductor);

 private:
  // One owner; its deleter knows of fork().
  std::shared_ptr<handle::Conductor> conductor_;
};

}  // namespace tensorferry
