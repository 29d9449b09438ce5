#include "checkpoint/digester.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <functional>
#include <new>
#include <tuple>
#include <utility>

#include "base/xxh3.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry::checkpoint {

namespace {

static_assert(std::endian::native == std::endian::little, "digests are of little-endian numbers");

constexpr std::uint64_t pieces_per_chunk = checksum_chunk_bytes / checksum_piece_bytes;

std::uint64_t piece_count(std::uint64_t bytes) {
  return (bytes + checksum_piece_bytes - 1) / checksum_piece_bytes;
}

}  // namespace

Digester::Digester(std::vector<WatchedTensor> tensors) : tensors_(std::move(tensors)) {
  std::size_t pieces = 0;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const WatchedTensor& tensor = tensors_[i];
    firsts_.push_back(pieces);
    if (tensor.bytes == 0) continue;
    places_.push_back({tensor.file.get(), tensor.offset, tensor.offset + tensor.bytes, i, pieces});
    pieces += piece_count(tensor.bytes);
  }
  pieces_.resize(pieces);
  std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  });
}

void Digester::see(const files::OpenFile& file, std::uint64_t offset,
                   std::span<const std::byte> bytes) noexcept {
  const std::uint64_t end = offset + bytes.size();
  // The first that ends behind `offset`.
  auto place = std::upper_bound(places_.begin(), places_.end(), std::pair(&file, offset),
                                [](const auto& wanted, const Place& one) {
                                  if (wanted.first != one.file) {
                                    return std::less<>()(wanted.first, one.file);
                                  }
                                  return wanted.second < one.end;
                                });
  for (; place != places_.end() && place->file == &file && place->offset < end; ++place) {
    const std::uint64_t from = std::max(offset, place->offset);
    const std::uint64_t to = std::min(end, place->end);
    try {
      see_tensor(*place, from - place->offset, bytes.subspan(from - offset, to - from));
    } catch (const std::bad_alloc&) {
      const std::lock_guard lock(mutex_);
      out_of_memory_ = true;
    }
  }
}

// `offset` counts from the start of the tensor.
void Digester::see_tensor(const Place& place, std::uint64_t offset,
                          std::span<const std::byte> bytes) {
  const std::uint64_t tensor_bytes = place.end - place.offset;
  while (!bytes.empty()) {
    const std::uint64_t piece = offset / checksum_piece_bytes;
    const std::uint64_t at = offset % checksum_piece_bytes;
    const std::uint64_t piece_bytes =
        std::min(checksum_piece_bytes, tensor_bytes - piece * checksum_piece_bytes);
    const std::uint64_t here = std::min<std::uint64_t>(bytes.size(), piece_bytes - at);
    if (here == piece_bytes) {
      pieces_[place.first_piece + piece] = xxh3(bytes.data(), here);
    } else {
      add_fragment(place.first_piece + piece, piece_bytes, at, bytes.first(here));
    }
    offset += here;
    bytes = bytes.subspan(here);
  }
}

void Digester::add_fragment(std::size_t piece, std::uint64_t piece_bytes, std::uint64_t at,
                            std::span<const std::byte> bytes) {
  Partial whole;
  {
    const std::lock_guard lock(mutex_);
    Partial& partial = partials_[piece];
    if (partial.bytes == nullptr) partial.bytes.reset(new std::byte[piece_bytes]);
    std::memcpy(partial.bytes.get() + at, bytes.data(), bytes.size());
    partial.filled += bytes.size();
    if (partial.filled < piece_bytes) return;
    whole = std::move(partial);
    partials_.erase(piece);
  }
  pieces_[piece] = xxh3(whole.bytes.get(), piece_bytes);
}

Digests digests_of_pieces(std::span<const std::uint64_t> pieces) {
  Digests digests;
  while (!pieces.empty()) {
    const auto chunk = pieces.first(std::min<std::size_t>(pieces_per_chunk, pieces.size()));
    digests.push_back(xxh3(chunk.data(), chunk.size_bytes()));
    pieces = pieces.subspan(chunk.size());
  }
  return digests;
}

Digests Digester::of(std::size_t tensor) const {
  const std::span all(pieces_);
  return digests_of_pieces(all.subspan(firsts_[tensor], piece_count(tensors_[tensor].bytes)));
}

std::optional<Error> Digester::verdict() noexcept {
  if (out_of_memory_) {
    return Error(
        {.operation = "verify", .code = ENOMEM, .hint = "too little memory for checksums"});
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const WatchedTensor& tensor = tensors_[i];
    if (tensor.expected.empty()) continue;
    const Digests found = of(i);
    const auto [wrong, expected] =
        std::mismatch(found.begin(), found.end(), tensor.expected.begin(), tensor.expected.end());
    if (wrong == found.end()) continue;
    const auto first = static_cast<std::uint64_t>(wrong - found.begin()) * checksum_chunk_bytes;
    return Error({.operation = "verify",
                  .path = tensor.file->path(),
                  .offset = tensor.offset + first,
                  .length = std::min(checksum_chunk_bytes, tensor.bytes - first),
                  .code = EBADMSG,
                  .hint = "the bytes of tensor '" + tensor.name +
                          "' are not those that were saved: their checksum is wrong; use another "
                          "copy of the file"});
  }
  return std::nullopt;
}

}  // namespace tensorferry::checkpoint

namespace tensorferry {

std::vector<std::uint64_t> checksums_of_pieces(std::span<const std::byte> bytes) {
  std::vector<std::uint64_t> pieces;
  pieces.reserve(bytes.size() / checksum_piece_bytes + 1);
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min<std::size_t>(checksum_piece_bytes, bytes.size()));
    pieces.push_back(xxh3(piece.data(), piece.size()));
    bytes = bytes.subspan(piece.size());
  }
  return pieces;
}

std::uint64_t safetensors_checksum(std::span<const std::byte> chunk) {
  const std::vector<std::uint64_t> pieces = checksums_of_pieces(chunk);
  return xxh3(pieces.data(), pieces.size() * sizeof(std::uint64_t));
}

}  // namespace tensorferry
