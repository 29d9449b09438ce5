// Checksums of tensors, computed from their bytes as they pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/alignment.h"
#include "checkpoint/checksums.h"
#include "handle/witness.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry::checkpoint {

// The digest of a chunk of a tensor is XXH3 (64 bits) of the XXH3s, little-endian, of the pieces of
// checksum_piece_bytes that the chunk consists of: so bytes may arrive in any order.

// The digests of a tensor that consists of pieces with these XXH3s.
[[nodiscard]] Digests digests_of_pieces(std::span<const std::uint64_t> pieces);

// Where a tensor lies, and which digests it should have; none if that is not known.
struct WatchedTensor {
  std::string name;
  std::shared_ptr<files::OpenFile> file;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  Digests expected = {};
};

// The digests of tensors that do not overlap. Memory: 8 bytes for 64 KiB, and the pieces that two
// requests share.
class Digester final : public handle::Witness {
 public:
  explicit Digester(std::vector<WatchedTensor> tensors);

  void see(const files::OpenFile& file, std::uint64_t offset,
           std::span<const std::byte> bytes) noexcept override;
  // An Error (EBADMSG) for the first digest that is not as expected.
  [[nodiscard]] std::optional<Error> verdict() noexcept override;

  // Of the tensor at this index of the constructor's list, after all bytes have passed.
  [[nodiscard]] Digests of(std::size_t tensor) const;

 private:
  struct Place {
    const files::OpenFile* file;
    std::uint64_t offset;
    std::uint64_t end;
    std::size_t tensor;
    std::size_t first_piece;
  };
  // A piece of which some bytes are missing.
  struct Partial {
    std::unique_ptr<std::byte[]> bytes;
    std::uint64_t filled = 0;
  };
  void see_tensor(const Place& place, std::uint64_t offset, std::span<const std::byte> bytes);
  void add_fragment(std::size_t piece, std::uint64_t piece_bytes, std::uint64_t at,
                    std::span<const std::byte> bytes);

  const std::vector<WatchedTensor> tensors_;
  std::vector<Place> places_;        // by file and offset; tensors without bytes have none
  std::vector<std::size_t> firsts_;  // index of each tensor's first piece
  std::vector<std::uint64_t> pieces_;
  std::mutex mutex_;
  std::map<std::size_t, Partial> partials_;
  bool out_of_memory_ = false;
};

}  // namespace tensorferry::checkpoint
