// What sees the bytes of an operation as they pass. Checksums come from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "files/open_file.h"
#include "tensorferry/error.h"

namespace tensorferry::handle {

class Witness {
 public:
  virtual ~Witness() = default;

  // The bytes of `file` from `offset` on have arrived, or are written now; they are in memory of
  // the CPU, wherever they come from or go to. Sees each byte of an operation that succeeds once,
  // and may see bytes of gaps that the operation reads over. Any thread calls it, several at once,
  // in any order. Must not wait.
  virtual void see(const files::OpenFile& file, std::uint64_t offset,
                   std::span<const std::byte> bytes) noexcept = 0;

  // Called once, after the last byte and before anybody sees the end. An error fails the operation.
  [[nodiscard]] virtual std::optional<Error> verdict() noexcept = 0;
};

// For operations that nobody watches.
inline const std::shared_ptr<Witness> no_witness;

}  // namespace tensorferry::handle
