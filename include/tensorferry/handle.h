// What a user opens: an engine, its workers, its limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tensorferry/error.h"
#include "tensorferry/export.h"
#include "tensorferry/file.h"
#include "tensorferry/operation.h"
#include "tensorferry/options.h"
#include "tensorferry/priority.h"
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
// file offset works and moves exactly these bytes. Aligned memory is used in place; other memory
// (small pages too on a virtual disk) goes through bounded slots. A full queue waits, never fails.
//
// Each drive has workers of its own, with the settings that suit it: a slow drive does not hold up
// a fast one. The thread that waits for a small operation moves it itself, if the engine is `auto`
// or `libaio`: no other thread is needed.
//
// Memory of a GPU, whoever allocated it, goes through the slots too: copies run while the drive
// works. A transfer touches the memory only after the work that was queued on `stream` at the call.
// When the operation is done, every stream sees its bytes.
//
// A Handle that is closed or destroyed finishes the writes it has accepted and cancels its reads.
// To give up writes too, call cancel_all() first.
//
// After fork() a Handle belongs to the parent. In the child stats() and options() return their
// values at the fork, all other members throw Error (ECHILD), and destruction is safe, whatever
// other threads of the parent were doing.
class TENSORFERRY_EXPORT Handle {
 public:
  using Clock = Operation::Clock;

  // Throws Error for settings out of range and for an explicit engine that is not supported here.
  explicit Handle(const HandleOptions& options = {});

  // Calls close(). An Error that close() throws goes to HandleOptions::on_lost.
  ~Handle();
  Handle(Handle&&) noexcept;
  Handle& operator=(Handle&&) noexcept;

  // Start a transfer and return at once. They throw Error for what they can see at once: a missing
  // file, an offset out of range. Every later failure is the operation's error. A read past the end
  // of the file is an error. A write extends the file and never cuts it. A write that fails or is
  // cancelled may have changed some of the bytes it should overwrite; the bytes that it added at
  // the end of the file are cut off again, and no others. Writes that run at the same time must not
  // overlap in the file. If a process is killed during a write, the file may end in zeros, because
  // the end of the file moves before the bytes arrive.
  //
  // `priority`: without one, that of the thread's PriorityScope, else that of the handle.
  Operation read(std::span<std::byte> memory, const File& file, std::uint64_t offset = 0,
                 CudaStream stream = {}, std::optional<Priority> priority = {});
  Operation read(std::span<std::byte> memory, const std::string& path, std::uint64_t offset = 0,
                 CudaStream stream = {}, std::optional<Priority> priority = {});
  Operation write(std::span<const std::byte> memory, const File& file, std::uint64_t offset = 0,
                  Durability durability = Durability::none, CudaStream stream = {},
                  std::optional<Priority> priority = {});
  Operation write(std::span<const std::byte> memory, const std::string& path,
                  std::uint64_t offset = 0, Durability durability = Durability::none,
                  CudaStream stream = {}, std::optional<Priority> priority = {});

  // Start many transfers as one operation. Neighbours in one file share requests, and read_many
  // moves over gaps of a few KiB between them. write_many throws Error (EINVAL) if its transfers
  // overlap; it syncs all files at once, then each directory once.
  Operation read_many(std::span<const ReadTransfer> transfers,
                      std::optional<Priority> priority = {});
  Operation write_many(std::span<const WriteTransfer> transfers,
                       Durability durability = Durability::none,
                       std::optional<Priority> priority = {});

  // Block until the transfer is done, or throw its Error. The calling thread makes a small transfer
  // itself.
  void read_now(std::span<std::byte> memory, const File& file, std::uint64_t offset = 0,
                CudaStream stream = {}, std::optional<Priority> priority = {});
  void read_now(std::span<std::byte> memory, const std::string& path, std::uint64_t offset = 0,
                CudaStream stream = {}, std::optional<Priority> priority = {});
  void write_now(std::span<const std::byte> memory, const File& file, std::uint64_t offset = 0,
                 Durability durability = Durability::none, CudaStream stream = {},
                 std::optional<Priority> priority = {});
  void write_now(std::span<const std::byte> memory, const std::string& path,
                 std::uint64_t offset = 0, Durability durability = Durability::none,
                 CudaStream stream = {}, std::optional<Priority> priority = {});

  // Makes all writes to `file` durable that were done() before this call. A failed sync is never
  // retried.
  Operation sync(const File& file, Durability durability = Durability::data,
                 std::optional<Priority> priority = {});

  // Accepts no new operations, finishes accepted writes and syncs, cancels the reads (or finishes
  // them too), blocks until the kernel has released every buffer, and ends the workers. Gives up
  // operations that have not moved for HandleOptions::close_limit_seconds, except for requests that
  // the kernel still works on. Throws the Error of the first operation that was given up, or that
  // failed unnoticed; the handle is closed all the same. A second call does nothing.
  void close(OpenReads reads = OpenReads::cancel);
  // The same with a deadline. Returns false if that passes first: the handle goes on closing, and
  // you may call again.
  [[nodiscard]] bool close_until(Clock::time_point deadline, OpenReads reads = OpenReads::cancel);

  // Cancels all operations, writes too. Each ends soon, with ECANCELED. The handle stays open; one
  // that is closing closes sooner.
  void cancel_all() noexcept;

  [[nodiscard]] const HandleOptions& options() const noexcept;  // as given
  // The engine in use and the reason for it. Before the first operation no drive is known: then the
  // engine that the handle would use without a profile.
  [[nodiscard]] std::string_view engine() const;
  [[nodiscard]] std::string engine_reason() const;
  [[nodiscard]] Stats stats() const;

  // For the library's own rooms.
  explicit Handle(std::unique_ptr<handle::Conductor> conductor);
  [[nodiscard]] handle::Conductor& conductor() const noexcept { return *conductor_; }

 private:
  // One owner. The deleter does nothing in a child of fork().
  std::shared_ptr<handle::Conductor> conductor_;
};

}  // namespace tensorferry
