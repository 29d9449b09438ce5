// The index of a set of safetensors files, as `model.safetensors.index.json` has it: which file
// holds which tensor. A pure function of bytes; nothing here opens a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "checkpoint/header.h"

namespace tensorferry::checkpoint {

// A longer index is refused, as a longer header is.
inline constexpr std::uint64_t index_bytes_max = header_json_bytes_max;

struct IndexTensor {
  std::string name;
  std::size_t file = 0;  // index in Index::files
};

struct Index {
  std::vector<std::string> files;    // sorted, each once; plain names in the folder of the index
  std::vector<IndexTensor> tensors;  // by name
  std::optional<Metadata> metadata = {};  // values that are not strings are left as JSON
};

// Reads {"metadata": {...}, "weight_map": {tensor: file, ...}}; other members are ignored. Of two
// entries of one name the last counts. An Error (EBADMSG) has the offset and says what is wrong:
// also a file name that leads out of the folder. Time is n log n and memory linear in the length.
[[nodiscard]] Result<Index> parse_index(std::span<const std::byte> json, const std::string& path);

}  // namespace tensorferry::checkpoint
