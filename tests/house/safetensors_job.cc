// Says what the library makes of safetensors files: one line for each, as JSON. Their bytes come on
// the standard input, each file behind its length in 8 little-endian bytes. Headers are made anew
// from what was read, so that tests see that nothing is lost on the way.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/header.h"
#include "checkpoint/json.h"
#include "checkpoint/new_header.h"

using namespace tensorferry;

namespace {

Result<checkpoint::Header> read(std::span<const std::byte> file) {
  const std::span first = file.first(std::min(file.size(), checkpoint::length_field_bytes));
  const auto length = checkpoint::header_json_bytes(first, file.size(), "file");
  if (!length.ok()) return length.error();
  const std::span rest = file.subspan(checkpoint::length_field_bytes);
  return checkpoint::parse_header(rest.first(length.value()), rest.size() - length.value(), "file");
}

std::string text_of(const checkpoint::Header& header) {
  std::vector<checkpoint::NewTensor> tensors;
  std::string names;
  for (const checkpoint::HeaderTensor& tensor : header.tensors) {
    tensors.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    names += names.empty() ? "" : ",";
    checkpoint::append_json_string(names, tensor.name);
  }
  const auto made = checkpoint::make_header(tensors, header.metadata, 8);
  if (!made.ok()) return std::string("cannot be made: ") + made.error().what();
  return "{\"names\":[" + names +
         "],\"header\":" + made.value().bytes.substr(checkpoint::length_field_bytes) + "}";
}

std::string refusal(const Error& error) {
  std::string text = "{\"error\":";
  checkpoint::append_json_string(text, error.what());
  return text + ",\"code\":" + std::to_string(error.code()) + "}";
}

}  // namespace

int main() {
  std::string input;
  std::vector<char> some(std::size_t{1} << 20);
  while (const std::size_t got = std::fread(some.data(), 1, some.size(), stdin)) {
    input.append(some.data(), got);
  }
  std::span<const std::byte> rest = std::as_bytes(std::span(input));
  while (rest.size() >= 8) {
    std::uint64_t length = 0;
    std::memcpy(&length, rest.data(), sizeof length);
    const auto header = read(rest.subspan(8, length));
    std::puts((header.ok() ? text_of(header.value()) : refusal(header.error())).c_str());
    rest = rest.subspan(8 + length);
  }
  return 0;
}
