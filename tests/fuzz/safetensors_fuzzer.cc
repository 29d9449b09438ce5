// Any bytes are read as a safetensors file, as an index and as checksums, or refused with EBADMSG.
// What is read can be written, and is then read as the same.
#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checksums.h"
#include "checkpoint/header.h"
#include "checkpoint/index.h"
#include "checkpoint/new_header.h"
#include "fuzz/promise.h"

using namespace tensorferry;
using namespace tensorferry::checkpoint;

namespace {

template <class T>
bool accepted(const Result<T>& result, std::uint64_t input_bytes) {
  if (result.ok()) return true;
  const Error& error = result.error();
  fuzz::promise(error.code() == EBADMSG, "a refusal is EBADMSG");
  fuzz::promise(!error.hint().empty() && error.hint().size() < 2000, "a refusal has a short hint");
  fuzz::promise(error.offset().value_or(0) <= input_bytes, "an offset lies in the file");
  return false;
}

Result<Header> read_file(std::span<const std::byte> file) {
  const std::span first = file.first(std::min(file.size(), length_field_bytes));
  const Result<std::uint64_t> length = header_json_bytes(first, file.size(), "file");
  if (!accepted(length, file.size())) return length.error();
  const std::span rest = file.subspan(length_field_bytes);
  return parse_header(rest.first(length.value()), rest.size() - length.value(), "file");
}

void check_places(const Header& header, std::uint64_t file_bytes) {
  std::uint64_t end = 0;
  for (const HeaderTensor& tensor : header.tensors) {
    fuzz::promise(tensor.begin == end && tensor.end >= end, "tensors follow each other");
    fuzz::promise(tensor_bytes(tensor.dtype, tensor.shape).value() == tensor.end - tensor.begin,
                  "a tensor has the bytes of its shape");
    end = tensor.end;
  }
  fuzz::promise(end < file_bytes, "tensors lie in the file");
}

void check_written(const Header& header, std::size_t alignment) {
  std::vector<NewTensor> tensors;
  tensors.reserve(header.tensors.size());
  for (const HeaderTensor& tensor : header.tensors) {
    tensors.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  const NewHeader made = make_header(tensors, header.metadata, alignment).or_throw();
  fuzz::promise(made.bytes.size() % alignment == 0, "tensors begin where they are to begin");
  std::string file = made.bytes;
  file.resize(file.size() + made.data_bytes);
  const Header again = read_file(std::as_bytes(std::span(file))).or_throw();
  fuzz::promise(again.metadata == header.metadata, "metadata stays");
  fuzz::promise(again.tensors.size() == tensors.size(), "all tensors stay");
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const HeaderTensor& read = again.tensors[i];
    const NewTensor& written = tensors[made.order[i]];
    const bool empty = read.begin == read.end;  // those at one offset come by name
    fuzz::promise(empty || read.name == written.name, "a name stays");
    fuzz::promise(empty || read.dtype == written.dtype, "a dtype stays");
    fuzz::promise(empty || read.shape == written.shape, "a shape stays");
  }
}

void check_checksums(std::string_view entry, const Header& header) {
  const auto found = read_checksums(entry, header, "file");
  if (!accepted(found, entry.size())) return;
  std::vector<TensorDigests> digests;
  for (const auto& [name, of_tensor] : found.value()) digests.push_back({name, of_tensor});
  const auto again = read_checksums(write_checksums(digests), header, "file");
  fuzz::promise(again.ok() && again.value() == found.value(), "checksums are read as written");
}

void check_index(std::span<const std::byte> json) {
  const Result<Index> index = parse_index(json, "index");
  if (!accepted(index, json.size())) return;
  for (const std::string& file : index.value().files) {
    fuzz::promise(!file.empty() && file != ".." && file.find('/') == std::string::npos,
                  "files lie in the folder of the index");
  }
  for (const IndexTensor& tensor : index.value().tensors) {
    fuzz::promise(tensor.file < index.value().files.size(), "a tensor has a file");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file = std::as_bytes(std::span(data, size));
  check_index(file);
  const Result<Header> header = read_file(file);
  if (!accepted(header, size)) return 0;
  check_places(header.value(), size);
  check_written(header.value(), size % 2 == 0 ? 8 : 4096);
  if (!header.value().metadata) return 0;
  const auto entry = header.value().metadata->find(std::string(checksums_key));
  if (entry != header.value().metadata->end()) check_checksums(entry->second, header.value());
  return 0;
}
