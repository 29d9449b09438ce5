// Makes the header of a new safetensors file. A pure function; nothing here opens a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "checkpoint/header.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry::checkpoint {

struct NewTensor {
  std::string name;
  DType dtype = DType::u8;
  std::vector<std::uint64_t> shape = {};
};

struct NewHeader {
  std::string bytes;  // of the file, from its start to the first tensor
  // Indexes of the given tensors, in the order in which they lie in the file, one after the other.
  std::vector<std::size_t> order;
  std::uint64_t data_bytes = 0;  // of all tensors
};

// The header that safetensors writes: tensors by falling dtype, then by name. JSON is padded with
// spaces so that tensors begin at a multiple of `alignment`. With 8 that is what the package
// writes, byte for byte, except that it leaves the order of the metadata to chance; here it is
// sorted. An Error (EINVAL): a name or a metadata text that is not UTF-8, a name twice or
// `__metadata__`, a shape that tensor_bytes() refuses, a header that is too long, an alignment that
// is not a power of two or beyond header_json_bytes_max.
[[nodiscard]] Result<NewHeader> make_header(std::span<const NewTensor> tensors,
                                            const std::optional<Metadata>& metadata,
                                            std::size_t alignment);

}  // namespace tensorferry::checkpoint
