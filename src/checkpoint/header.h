// The header of a safetensors file: 8 bytes with its length, then JSON that says which tensors the
// rest of the file holds. Pure functions of bytes; nothing here opens a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry::checkpoint {

// The first bytes of a file: the length of the JSON, little-endian.
inline constexpr std::size_t length_field_bytes = 8;
// safetensors refuses longer JSON. So it bounds what a hostile file can make a reader do.
inline constexpr std::uint64_t header_json_bytes_max = 100'000'000;

using Metadata = std::map<std::string, std::string>;

struct HeaderTensor {
  std::string name;
  DType dtype = DType::u8;
  std::vector<std::uint64_t> shape = {};
  std::uint64_t begin = 0;  // from the end of the header
  std::uint64_t end = 0;
};

struct Header {
  std::vector<HeaderTensor> tensors;  // by offset; those without bytes at one offset by name
  std::optional<Metadata> metadata;
};

// The bytes of a tensor. An Error (EINVAL) without a path if 64 bits cannot count its bits or if it
// does not end on a byte.
[[nodiscard]] Result<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::uint64_t> shape);

// The length of the JSON of a file of `file_bytes` that begins with these bytes: 8 of them, or the
// whole file if it is shorter. An Error (EBADMSG) if the file cannot hold it or it is too long.
[[nodiscard]] Result<std::uint64_t> header_json_bytes(std::span<const std::byte> first,
                                                      std::uint64_t file_bytes,
                                                      const std::string& path);

// Reads the JSON of a file in which `data_bytes` follow it. Accepts what the safetensors package
// accepts, 0.8 at the time of writing, also what its documents do not mention:
//   - of two tensors of one name, and of two entries of the metadata, the last counts
//   - a tensor may be ["F32", [2], [0, 8]], and a dtype {"F32": null}
//   - other fields of a tensor are ignored, but must be JSON
// An Error (EBADMSG) names the offset in the file, the rule and the tensor. Time is n log n and
// memory linear in the length of the JSON, whatever it says.
[[nodiscard]] Result<Header> parse_header(std::span<const std::byte> json, std::uint64_t data_bytes,
                                          const std::string& path);

}  // namespace tensorferry::checkpoint
