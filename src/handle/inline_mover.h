// Small transfers, made by the calling thread itself: no queue, no engine, nobody is woken.
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
#include "memory/region.h"
#include "os/gpu_stream.h"
#include "os/system.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

// Thread-safe.
class InlineMover {
 public:
  // `block_bytes` is the user's, or 0. Of one transfer at most `slot_transfer_bytes_max` go through
  // a slot; the slots take at most `slot_bytes_max` together.
  InlineMover(os::System& system, std::shared_ptr<Ledger> ledger, std::size_t block_bytes,
              std::uint64_t slot_transfer_bytes_max, std::size_t slot_bytes_max) noexcept;

  // Whether it is small: one block of the user's, else 1 MiB. What goes on to a GPU is better
  // copied while the drive goes on, from 256 KiB.
  [[nodiscard]] bool fits(const Part& part) const noexcept;

  // Moves the part and syncs, and returns when that is done. A GPU's memory is touched after the
  // fence, if there is one. Nothing where more is needed of slots than there is: then it has done
  // nothing.
  [[nodiscard]] std::optional<Status> try_transfer(Direction direction, const Part& part,
                                                   const os::GpuFence* fence,
                                                   Durability durability);

 private:
  struct Slot {
    std::shared_ptr<memory::Region> memory;
    std::vector<std::unique_ptr<os::GpuStream>> streams;  // one for each GPU, or none
  };

  [[nodiscard]] Status move_block(Direction direction, const Part& part, const Plan& plan,
                                  const Block& block, Slot* slot, std::uint64_t id);
  // Between the slot and the user's memory.
  [[nodiscard]] Status copy_slot(Direction direction, const Part& part, Slot& slot,
                                 std::byte* in_slot, std::byte* users, std::size_t bytes);
  [[nodiscard]] Status sync(files::OpenFile& file, Durability durability);
  [[nodiscard]] std::unique_ptr<Slot> take_slot();
  // Makes the slot fit for a GPU, and lets it wait for the fence.
  [[nodiscard]] Status prepare(Slot& slot, const Part& part, const os::GpuFence* fence);

  os::System& system_;
  const std::shared_ptr<Ledger> ledger_;
  const std::size_t transfer_bytes_max_;
  const std::uint64_t slot_transfer_bytes_max_;
  const std::size_t slot_bytes_max_;

  std::mutex mutex_;                          // guards the slots
  std::vector<std::unique_ptr<Slot>> slots_;  // that are free
  unsigned slot_count_ = 0;                   // in use too
};

}  // namespace tensorferry::handle
