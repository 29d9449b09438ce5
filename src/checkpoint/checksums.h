// The entry of a header's metadata that has the checksums of the tensors: a JSON object from the
// name of a tensor to 16 hex digits for each 16 MiB of it, one after the other. Digests have a
// fixed width, so a header with any digests is as long as the final one. Nothing here computes a
// digest.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/alignment.h"
#include "base/result.h"
#include "checkpoint/header.h"

namespace tensorferry::checkpoint {

inline constexpr std::string_view checksums_key = "tensorferry.xxh3";
inline constexpr std::uint64_t checksum_chunk_bytes = 16 * MiB;  // the last chunk may be shorter

// One for each chunk of a tensor: see digester.h.
using Digests = std::vector<std::uint64_t>;

// How many chunks a tensor has: none without bytes.
[[nodiscard]] constexpr std::uint64_t chunk_count(std::uint64_t tensor_bytes) noexcept {
  return tensor_bytes / checksum_chunk_bytes + (tensor_bytes % checksum_chunk_bytes != 0 ? 1 : 0);
}

struct TensorDigests {
  std::string_view name;  // UTF-8
  std::span<const std::uint64_t> digests;
};

// The value of the entry, in the given order.
[[nodiscard]] std::string write_checksums(std::span<const TensorDigests> tensors);

// Reads the value of the entry of a file with these tensors; some of them may have none. An Error
// (EBADMSG) for anything that write_checksums() does not write for them: other JSON, other digits,
// another count of chunks, a tensor twice, a tensor that the file does not have.
[[nodiscard]] Result<std::map<std::string, Digests, std::less<>>> read_checksums(
    std::string_view value, const Header& header, const std::string& path);

}  // namespace tensorferry::checkpoint
