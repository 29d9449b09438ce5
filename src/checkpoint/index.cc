#include "checkpoint/index.h"

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

#include "checkpoint/json.h"

namespace tensorferry::checkpoint {

namespace {

Error broken_index(const std::string& path, std::uint64_t offset, std::string hint) {
  return Error(
      {.operation = "open",
       .path = path,
       .offset = offset,
       .code = EBADMSG,
       .hint = "this is not an index of safetensors files, or it is damaged: " + std::move(hint)});
}

bool is_plain_name(std::string_view name) noexcept {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string_view::npos;
}

using WeightMap = std::map<std::string, std::string>;

void read_weight_map(JsonReader& json, WeightMap& files) {
  std::string name;
  std::string file;
  for (json.enter_object(); json.next_member(name);) {
    const std::size_t at = json.key_offset();
    if (!json.read_string(file)) return;
    if (!is_plain_name(file)) {
      json.fail_at(at, "the file " + shown(file) + " of tensor " + shown(name) +
                           " is not the name of a file in the same folder");
    }
    files.insert_or_assign(name, file);
  }
}

void read_metadata(JsonReader& json, std::string_view text, std::optional<Metadata>& metadata) {
  if (json.peek() == JsonReader::Kind::word) {
    json.read_null();
    return;
  }
  metadata.emplace();
  std::string key;
  std::string value;
  for (json.enter_object(); json.next_member(key);) {
    if (json.peek() == JsonReader::Kind::string) {
      json.read_string(value);
    } else {
      const std::size_t begin = json.offset();
      json.skip();
      value = text.substr(begin, json.offset() - begin);
    }
    metadata->insert_or_assign(key, value);
  }
}

bool read_index(JsonReader& json, std::string_view text, WeightMap& files,
                std::optional<Metadata>& metadata) {
  std::string member;
  bool files_seen = false;
  bool metadata_seen = false;
  for (json.enter_object(); json.next_member(member);) {
    if (member == "weight_map") {
      if (std::exchange(files_seen, true)) json.fail("weight_map appears twice");
      read_weight_map(json, files);
    } else if (member == "metadata") {
      if (std::exchange(metadata_seen, true)) json.fail("metadata appears twice");
      read_metadata(json, text, metadata);
    } else {
      json.skip();
    }
  }
  if (!files_seen) json.fail("weight_map is missing");
  return json.finish();
}

}  // namespace

Result<Index> parse_index(std::span<const std::byte> json, const std::string& path) {
  if (json.size() > index_bytes_max) {
    return broken_index(path, 0,
                        "it has " + std::to_string(json.size()) + " bytes; more than " +
                            std::to_string(index_bytes_max) + " are not allowed");
  }
  const std::string_view text(reinterpret_cast<const char*>(json.data()), json.size());
  JsonReader reader(text);
  WeightMap files;
  Index index;
  if (!read_index(reader, text, files, index.metadata)) {
    return broken_index(path, reader.offset(), reader.failure());
  }
  index.files.reserve(files.size());
  for (const auto& [name, file] : files) index.files.push_back(file);
  std::ranges::sort(index.files);
  const auto repeated = std::ranges::unique(index.files);
  index.files.erase(repeated.begin(), repeated.end());
  index.tensors.reserve(files.size());
  for (const auto& [name, file] : files) {
    const auto place = std::ranges::lower_bound(index.files, file);
    index.tensors.push_back(
        {.name = name, .file = static_cast<std::size_t>(place - index.files.begin())});
  }
  return index;
}

}  // namespace tensorferry::checkpoint
