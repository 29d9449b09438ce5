// Moves small transfers on the calling thread: no queue, no engine, no other thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/result.h"
#include "handle/ledger.h"
#include "handle/part.h"
#include "handle/process_share.h"
#include "memory/region.h"
#include "os/gpu_stream.h"
#include "os/system.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

// Thread-safe.
class InlineMover {
 public:
  // `block_bytes` is the user's choice, or 0. At most `uncut_bytes_max` of a transfer go through a
  // slot or are read with O_DIRECT; all slots together take at most `slot_bytes_max`, and no more
  // than `limits` have left.
  InlineMover(os::System& system, std::shared_ptr<Ledger> ledger, std::size_t block_bytes,
              std::uint64_t uncut_bytes_max, std::size_t slot_bytes_max,
              ProcessLimits& limits) noexcept;

  // Whether the part is small enough: at most one block of the user's size, or 1 MiB; less if it is
  // better cut. Memory of a GPU at most 256 KiB: from there on copies should overlap with the
  // drive.
  [[nodiscard]] bool fits(Direction direction, const Part& part) const noexcept;

  // Moves the part and syncs, and returns when that is done. Touches memory of a GPU only after the
  // fence, if one is given. Does nothing and returns nullopt if no slot is free or large enough.
  [[nodiscard]] std::optional<Status> try_transfer(Direction direction, const Part& part,
                                                   const os::GpuFence* fence,
                                                   Durability durability);

 private:
  struct Slot {
    ProcessShare share;
    std::shared_ptr<memory::Region> memory;
    std::vector<std::unique_ptr<os::GpuStream>> streams;  // one for each GPU, or none
  };

  [[nodiscard]] Status move_block(Direction direction, const Part& part, const Plan& plan,
                                  const Block& block, Slot* slot, std::uint64_t id);
  // Copies between the slot and the user's memory.
  [[nodiscard]] Status copy_slot(Direction direction, const Part& part, Slot& slot,
                                 std::byte* in_slot, std::byte* users, std::size_t bytes);
  [[nodiscard]] Status sync(files::OpenFile& file, Durability durability);
  [[nodiscard]] std::unique_ptr<Slot> take_slot();
  // Gives the slot a stream on the part's GPU that waits for the fence.
  [[nodiscard]] Status prepare(Slot& slot, const Part& part, const os::GpuFence* fence);

  os::System& system_;
  const std::shared_ptr<Ledger> ledger_;
  const std::size_t transfer_bytes_max_;
  const std::uint64_t uncut_bytes_max_;
  const std::size_t slot_bytes_;  // of one
  const std::size_t slot_bytes_max_;
  ProcessLimits& limits_;

  std::mutex mutex_;                          // guards the slots
  std::vector<std::unique_ptr<Slot>> slots_;  // free ones
  unsigned slot_count_ = 0;                   // of all, free and in use
};

}  // namespace tensorferry::handle
