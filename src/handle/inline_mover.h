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
#include "os/system.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

// Thread-safe.
class InlineMover {
 public:
  // `block_bytes` is the user's, or 0. Its slots take at most `slot_bytes_max` together.
  InlineMover(os::System& system, std::shared_ptr<Ledger> ledger, std::size_t block_bytes,
              std::size_t slot_bytes_max) noexcept;

  // Whether so much is small: one block of the user's, else 1 MiB.
  [[nodiscard]] bool fits(std::uint64_t bytes) const noexcept;

  // Moves the part and syncs, and returns when that is done. Nothing where a slot is needed and
  // none is free: then it has done nothing.
  [[nodiscard]] std::optional<Status> try_transfer(Direction direction, const Part& part,
                                                   Durability durability);

 private:
  [[nodiscard]] Status move_block(Direction direction, const Part& part, const Plan& plan,
                                  const Block& block, std::byte* slot, std::uint64_t id);
  [[nodiscard]] Status sync(files::OpenFile& file, Durability durability);
  [[nodiscard]] std::shared_ptr<memory::Region> take_slot();

  os::System& system_;
  const std::shared_ptr<Ledger> ledger_;
  const std::size_t transfer_bytes_max_;
  const std::size_t slot_bytes_max_;

  std::mutex mutex_;                                    // guards the slots
  std::vector<std::shared_ptr<memory::Region>> slots_;  // that are free
  unsigned slot_count_ = 0;                             // in use too
};

}  // namespace tensorferry::handle
