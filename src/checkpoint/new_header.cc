#include "checkpoint/new_header.h"

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/alignment.h"
#include "checkpoint/json.h"

namespace tensorferry::checkpoint {

namespace {

Error refused(std::string why) {
  return Error({.operation = "save_safetensors", .code = EINVAL, .hint = std::move(why)});
}

std::vector<std::size_t> order_of(std::span<const NewTensor> tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, [tensors](std::size_t left, std::size_t right) {
    if (tensors[left].dtype != tensors[right].dtype) {
      return tensors[left].dtype > tensors[right].dtype;
    }
    return tensors[left].name < tensors[right].name;
  });
  return order;
}

Status check_names(std::span<const NewTensor> tensors, const std::optional<Metadata>& metadata) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const NewTensor& tensor : tensors) {
    if (tensor.name == "__metadata__") return refused("a tensor cannot have the name __metadata__");
    if (!is_utf8(tensor.name)) return refused("the name " + shown(tensor.name) + " is not UTF-8");
    names.emplace_back(tensor.name);
  }
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  if (twice != names.end()) return refused("two tensors have the name " + shown(*twice));
  for (const auto& [key, value] : metadata.value_or(Metadata{})) {
    if (!is_utf8(key) || !is_utf8(value)) {
      return refused("the metadata " + shown(key) + " is not UTF-8");
    }
  }
  return Nothing{};
}

void append_metadata(std::string& json, const Metadata& metadata) {
  json += R"("__metadata__":{)";
  for (bool first = true; const auto& [key, value] : metadata) {
    if (!std::exchange(first, false)) json += ',';
    append_json_string(json, key);
    json += ':';
    append_json_string(json, value);
  }
  json += '}';
}

void append_tensor(std::string& json, const NewTensor& tensor, std::uint64_t begin,
                   std::uint64_t end) {
  append_json_string(json, tensor.name);
  json += R"(:{"dtype":")";
  json += to_string(tensor.dtype);
  json += R"(","shape":[)";
  for (bool first = true; const std::uint64_t size : tensor.shape) {
    if (!std::exchange(first, false)) json += ',';
    json += std::to_string(size);
  }
  json += R"(],"data_offsets":[)" + std::to_string(begin) + ',' + std::to_string(end) + "]}";
}

}  // namespace

Result<NewHeader> make_header(std::span<const NewTensor> tensors,
                              const std::optional<Metadata>& metadata, std::size_t alignment) {
  if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > header_json_bytes_max) {
    return refused("the alignment " + std::to_string(alignment) +
                   " is not a power of two, or is too large");
  }
  if (Status checked = check_names(tensors, metadata); !checked.ok()) return checked.error();

  NewHeader header{.bytes = std::string(length_field_bytes, '\0'), .order = order_of(tensors)};
  header.bytes += '{';
  if (metadata) append_metadata(header.bytes, *metadata);
  bool first = !metadata;
  for (const std::size_t index : header.order) {
    const NewTensor& tensor = tensors[index];
    const Result<std::uint64_t> bytes = tensor_bytes(tensor.dtype, tensor.shape);
    if (!bytes.ok()) return refused("tensor " + shown(tensor.name) + ": " + bytes.error().hint());
    if (bytes.value() > bytes_max - header.data_bytes) {
      return refused("the tensors have more bytes than a file can have");
    }
    const std::uint64_t begin = header.data_bytes;
    header.data_bytes += bytes.value();
    if (!std::exchange(first, false)) header.bytes += ',';
    append_tensor(header.bytes, tensor, begin, header.data_bytes);
  }
  header.bytes += '}';
  header.bytes.resize(align_up(header.bytes.size(), alignment), ' ');

  std::uint64_t length = header.bytes.size() - length_field_bytes;
  if (length > header_json_bytes_max) {
    return refused("the header has " + std::to_string(length) + " bytes; more than " +
                   std::to_string(header_json_bytes_max) + " are not allowed");
  }
  for (std::size_t i = 0; i < length_field_bytes; ++i, length >>= 8U) {
    header.bytes[i] = static_cast<char>(length & 0xFFU);
  }
  return header;
}

}  // namespace tensorferry::checkpoint
