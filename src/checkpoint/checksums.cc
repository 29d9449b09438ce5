#include "checkpoint/checksums.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <functional>
#include <optional>
#include <utility>

#include "checkpoint/json.h"

namespace tensorferry::checkpoint {

namespace {

constexpr std::size_t digest_digits = 16;

Error broken_checksums(const std::string& path, const std::string& hint) {
  return Error({.operation = "open",
                .path = path,
                .code = EBADMSG,
                .hint = "the checksums in its metadata (" + std::string(checksums_key) +
                        ") do not fit the file: " + hint});
}

void append_hex(std::string& text, std::uint64_t digest) {
  static constexpr std::string_view hex = "0123456789abcdef";
  for (unsigned shift = 64; shift > 0;) {
    shift -= 4;
    text += hex[digest >> shift & 15U];
  }
}

// Nothing if these are not lower-case digits of whole digests.
std::optional<Digests> digests_of(std::string_view digits) {
  if (digits.size() % digest_digits != 0 ||
      digits.find_first_not_of("0123456789abcdef") != std::string_view::npos) {
    return std::nullopt;
  }
  Digests digests(digits.size() / digest_digits);
  for (std::size_t i = 0; i < digests.size(); ++i) {
    const char* first = digits.data() + i * digest_digits;
    std::from_chars(first, first + digest_digits, digests[i], 16);
  }
  return digests;
}

}  // namespace

std::string write_checksums(std::span<const TensorDigests> tensors) {
  std::string text = "{";
  for (const TensorDigests& tensor : tensors) {
    if (text.size() > 1) text += ',';
    append_json_string(text, tensor.name);
    text += ":\"";
    for (const std::uint64_t digest : tensor.digests) append_hex(text, digest);
    text += '"';
  }
  return text + '}';
}

Result<std::map<std::string, Digests, std::less<>>> read_checksums(std::string_view value,
                                                                   const Header& header,
                                                                   const std::string& path) {
  std::map<std::string_view, std::uint64_t> sizes;
  for (const HeaderTensor& tensor : header.tensors) {
    sizes.emplace(tensor.name, tensor.end - tensor.begin);
  }
  std::map<std::string, Digests, std::less<>> found;
  JsonReader json(value);
  std::string name;
  std::string digits;
  for (json.enter_object(); json.next_member(name);) {
    if (!json.read_string(digits)) break;
    const auto size = sizes.find(name);
    if (size == sizes.end()) return broken_checksums(path, "there is no tensor " + shown(name));
    std::optional<Digests> digests = digests_of(digits);
    if (!digests || digests->size() != chunk_count(size->second)) {
      return broken_checksums(path,
                              "tensor " + shown(name) + " needs 16 hex digits for each 16 MiB");
    }
    if (!found.emplace(name, *std::move(digests)).second) {
      return broken_checksums(path, "tensor " + shown(name) + " appears twice");
    }
  }
  if (!json.finish()) return broken_checksums(path, json.failure());
  return found;
}

}  // namespace tensorferry::checkpoint
