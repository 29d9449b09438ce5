#include "checkpoint/contents.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <span>
#include <utility>

#include "checkpoint/checksums.h"
#include "checkpoint/index.h"
#include "checkpoint/json.h"
#include "files/open_file.h"

namespace tensorferry::checkpoint {

namespace {

constexpr std::string_view index_ending = ".index.json";

Error damaged(const std::string& path, std::string hint) {
  return Error({.operation = "open", .path = path, .code = EBADMSG, .hint = std::move(hint)});
}

// Reads bytes through the page cache: headers are small and often read again.
Status read_exactly(os::System& system, files::OpenFile& file, std::span<std::byte> memory,
                    std::uint64_t offset) {
  const Result<int> fd = file.buffered_fd();
  if (!fd.ok()) return fd.error();
  while (!memory.empty()) {
    const ssize_t got = system.pread(fd.value(), memory.data(), memory.size(), offset);
    if (got == -EINTR) continue;
    if (got > 0) {
      memory = memory.subspan(static_cast<std::size_t>(got));
      offset += static_cast<std::uint64_t>(got);
      continue;
    }
    return Error({.operation = "read",
                  .path = file.path(),
                  .offset = offset,
                  .length = memory.size(),
                  .code = got == 0 ? ENODATA : static_cast<int>(-got),
                  .hint = got == 0 ? "the file has become shorter while its header was read" : ""});
  }
  return Nothing{};
}

struct FileHeader {
  Header header;
  std::uint64_t data_offset = 0;
};

Result<FileHeader> read_header(os::System& system, files::OpenFile& file) {
  const Result<std::uint64_t> size = file.size();
  if (!size.ok()) return size.error();
  std::vector<std::byte> first(std::min<std::uint64_t>(length_field_bytes, size.value()));
  if (Status read = read_exactly(system, file, first, 0); !read.ok()) return read.error();
  const auto json_bytes = header_json_bytes(first, size.value(), file.path());
  if (!json_bytes.ok()) return json_bytes.error();
  std::vector<std::byte> json(json_bytes.value());
  if (Status read = read_exactly(system, file, json, length_field_bytes); !read.ok()) {
    return read.error();
  }
  const std::uint64_t data_offset = length_field_bytes + json.size();
  auto header = parse_header(json, size.value() - data_offset, file.path());
  if (!header.ok()) return header.error();
  return FileHeader{std::move(header.value()), data_offset};
}

Result<Index> read_index(os::System& system, const std::string& path) {
  try {
    const File file = files::open(system, path, Access::read);
    const std::uint64_t size = file.size();
    if (size > index_bytes_max) return damaged(path, "the index is longer than 100,000,000 bytes");
    std::vector<std::byte> json(size);
    if (Status read = read_exactly(system, *file.opened(), json, 0); !read.ok()) {
      return read.error();
    }
    return parse_index(json, path);
  } catch (const Error& error) {
    return error;
  }
}

}  // namespace

Result<std::shared_ptr<const Contents>> Contents::open(os::System& system,
                                                       const std::string& path) {
  std::shared_ptr<Contents> contents(new Contents);
  Status opened = path.ends_with(index_ending) ? contents->add_set(system, path)
                                               : contents->add_file(system, path);
  if (!opened.ok()) return opened.error();
  contents->index_names();
  return std::shared_ptr<const Contents>(std::move(contents));
}

Status Contents::add_file(os::System& system, const std::string& path) {
  try {
    files_.push_back(files::open(system, path, Access::read));
  } catch (const Error& error) {
    return error;
  }
  auto read = read_header(system, *files_.back().opened());
  if (!read.ok()) return read.error();
  auto& [header, data_offset] = read.value();
  if (header.metadata) {
    if (const auto entry = header.metadata->find(std::string(checksums_key));
        entry != header.metadata->end()) {
      auto known = read_checksums(entry->second, header, path);
      // Another program may have kept the entry and changed the tensors: a reader that does not
      // verify need not care.
      if (known.ok()) {
        digests_.merge(known.value());
      } else {
        checksums_problem_ = known.error().hint();
      }
      header.metadata->erase(entry);
    }
    metadata_ = std::move(header.metadata);
  }
  for (HeaderTensor& tensor : header.tensors) {
    const std::uint64_t bytes = tensor.end - tensor.begin;
    tensors_.push_back({.name = std::move(tensor.name),
                        .dtype = tensor.dtype,
                        .shape = std::move(tensor.shape),
                        .file = files_.size() - 1,
                        .offset = data_offset + tensor.begin,
                        .bytes = bytes});
  }
  return Nothing{};
}

Status Contents::add_set(os::System& system, const std::string& path) {
  auto index = read_index(system, path);
  if (!index.ok()) return index.error();
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  for (const std::string& name : index.value().files) {
    if (Status added = add_file(system, folder + name); !added.ok()) return added;
  }
  std::map<std::string_view, std::size_t> expected;  // the file of each tensor
  for (const IndexTensor& tensor : index.value().tensors) expected[tensor.name] = tensor.file;
  for (const TensorInfo& tensor : tensors_) {
    const auto known = expected.find(tensor.name);
    const std::string where =
        "tensor " + shown(tensor.name) + " is in " + shown(index.value().files[tensor.file]);
    if (known == expected.end()) {
      return damaged(path, where + ", and the index does not name it there or names it twice");
    }
    if (known->second != tensor.file) {
      return damaged(path,
                     where + ", and the index says " + shown(index.value().files[known->second]));
    }
    expected.erase(known);
  }
  if (!expected.empty()) {
    const auto& [name, file] = *expected.begin();
    return damaged(path, "tensor " + shown(name) + " is not in " +
                             shown(index.value().files[file]) + ", where the index says it is");
  }
  metadata_ = std::move(index.value().metadata);
  return Nothing{};
}

void Contents::index_names() {
  for (std::size_t i = 0; i < tensors_.size(); ++i) names_.emplace(tensors_[i].name, i);
  for (const TensorInfo& tensor : tensors_) {
    if (tensor.bytes > 0 && !digests_.contains(tensor.name)) unchecked_.push_back(tensor.name);
  }
}

const TensorInfo* Contents::find(std::string_view name) const noexcept {
  const auto found = names_.find(name);
  return found == names_.end() ? nullptr : &tensors_[found->second];
}

const Digests& Contents::digests_of(const TensorInfo& tensor) const {
  static const Digests none;
  const auto found = digests_.find(tensor.name);
  return found == digests_.end() ? none : found->second;
}

}  // namespace tensorferry::checkpoint
