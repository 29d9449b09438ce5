// The plan: a pure function from what the user asked for to the requests that do it. No I/O, no
// threads, no state; blocks are computed when they are claimed, so an operation of any size costs
// the same memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorferry::handle {

enum class Direction : std::uint8_t { read, write };

// What the file and the memory require. Alignments are powers of two.
struct Rules {
  bool direct = true;                  // false: everything goes through the buffered descriptor
  std::size_t memory_alignment = 512;  // of direct requests
  std::size_t offset_alignment = 512;  // of direct requests, offset and length
  bool in_place = true;                // false: the engine cannot reach the memory; use slots
  bool buffered_in_place = true;       // false: only the buffered descriptor needs slots
};

struct Limits {
  std::size_t block_bytes = 0;       // longest request in place; a multiple of the page and of
                                     // both alignments
  std::size_t slot_block_bytes = 0;  // longest request through a slot; likewise
};

// Memory for the bytes from `start` on, counted from the beginning of its run. Without memory it is
// a gap: a read drops these bytes. Gaps stand between other pieces.
struct Piece {
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t start = 0;
};

enum class Descriptor : std::uint8_t { direct, buffered };

// One request. It covers [offset, offset + bytes) of the file. The operation wants
// [wanted_offset, wanted_offset + wanted_bytes) of that: a read may cover more, down and up to the
// alignment; a write never does.
struct Block {
  std::uint64_t offset = 0;
  std::uint64_t wanted_offset = 0;
  std::uint32_t bytes = 0;
  std::uint32_t wanted_bytes = 0;
  Descriptor descriptor = Descriptor::direct;
  std::byte* memory = nullptr;  // in place; nullptr: through a slot
};

// A gapless range of one file and the memory it belongs to, in file order: one piece, or several
// neighbours that share requests.
class Plan {
 public:
  // `pieces` must outlive the plan and have starts 0, bytes[0], bytes[0] + bytes[1], ... An empty
  // range has no blocks. `offset` plus the length fits in 63 bits.
  Plan(Direction direction, std::uint64_t offset, std::span<const Piece> pieces, const Rules& rules,
       const Limits& limits);

  [[nodiscard]] std::uint64_t block_count() const noexcept { return block_count_; }
  [[nodiscard]] Block block(std::uint64_t index) const;  // index < block_count()
  [[nodiscard]] bool needs_buffered_descriptor() const noexcept { return needs_buffered_; }
  [[nodiscard]] bool needs_slots() const noexcept { return slot_bytes_ > 0; }
  // How many of the wanted bytes go through slots.
  [[nodiscard]] std::uint64_t slot_bytes() const noexcept { return slot_bytes_; }

  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  // How many bytes have memory: of all, and of those that a block wants.
  [[nodiscard]] std::uint64_t kept_bytes() const noexcept {
    return has_gaps_ ? count_kept(offset_, bytes_) : bytes_;
  }
  [[nodiscard]] std::uint64_t kept_bytes(const Block& block) const noexcept {
    return has_gaps_ ? count_kept(block.wanted_offset, block.wanted_bytes) : block.wanted_bytes;
  }

  // All of the memory if it is one piece, else nothing.
  [[nodiscard]] std::span<std::byte> single_piece() const noexcept {
    if (pieces_.size() != 1) return {};
    return {pieces_[0].memory, static_cast<std::size_t>(pieces_[0].bytes)};
  }

  // Calls visit(memory, bytes) for each contiguous piece of the memory of
  // [file_offset, file_offset + bytes), which must lie in the range, in order. The memory of a gap
  // is nullptr.
  template <class Visit>
  void for_each_memory(std::uint64_t file_offset, std::uint64_t bytes, Visit visit) const;

 private:
  // Consecutive blocks of one shape.
  struct Section {
    std::uint64_t begin = 0, end = 0;                // covered
    std::uint64_t wanted_begin = 0, wanted_end = 0;  // wanted
    std::size_t block_bytes = 1;
    Descriptor descriptor = Descriptor::direct;
    bool in_place = false;
    // The first block is so much shorter, so that all others begin on pages of the file: drives
    // read those faster.
    std::uint64_t shortened = 0;
    [[nodiscard]] std::uint64_t count() const noexcept {
      return (end - begin + shortened + block_bytes - 1) / block_bytes;
    }
  };

  void add(const Section& section);
  void plan_buffered(std::uint64_t begin, std::uint64_t end);
  void plan_direct_read(const Rules& rules);
  void plan_direct_write(const Rules& rules);
  [[nodiscard]] bool memory_fits(std::uint64_t at, std::size_t alignment) const noexcept;
  [[nodiscard]] std::uint64_t count_kept(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  [[nodiscard]] std::size_t piece_at(std::uint64_t start) const noexcept;

  std::uint64_t offset_;
  std::uint64_t bytes_ = 0;
  std::span<const Piece> pieces_;
  Limits limits_;
  bool one_in_place_;  // the memory is one piece, and the engine can reach it
  bool buffered_in_place_;
  Section sections_[3];  // head, middle, tail; section_count_ of them
  unsigned section_count_ = 0;
  std::uint64_t block_count_ = 0;
  bool needs_buffered_ = false;
  bool has_gaps_ = false;
  std::uint64_t slot_bytes_ = 0;
};

template <class Visit>
void Plan::for_each_memory(std::uint64_t file_offset, std::uint64_t bytes, Visit visit) const {
  std::uint64_t at = file_offset - offset_;
  for (std::size_t i = piece_at(at); bytes > 0; ++i) {
    const std::uint64_t skip = at - pieces_[i].start;
    const std::uint64_t here = pieces_[i].bytes - skip < bytes ? pieces_[i].bytes - skip : bytes;
    std::byte* const memory = pieces_[i].memory;
    if (here > 0)
      visit(memory == nullptr ? nullptr : memory + skip, static_cast<std::size_t>(here));
    at += here;
    bytes -= here;
  }
}

}  // namespace tensorferry::handle
