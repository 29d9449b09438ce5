#include "checkpoint/header.h"

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <tuple>
#include <utility>

#include "checkpoint/json.h"

namespace tensorferry::checkpoint {

namespace {

constexpr std::string_view metadata_key = "__metadata__";

Error broken_header(const std::string& path, std::uint64_t offset, std::string hint) {
  return Error({.operation = "open",
                .path = path,
                .offset = offset,
                .code = EBADMSG,
                .hint = "this is not a safetensors file, or it is damaged: " + std::move(hint)});
}

struct FoundTensor {
  HeaderTensor tensor;
  std::size_t at = 0;  // of its name, in the JSON
};

// Reads the JSON of a header into lists, without a look at what the numbers mean.
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view json) : json_(json) {}

  bool read();

  // Where it stopped, and why.
  [[nodiscard]] std::size_t offset() const noexcept { return json_.offset(); }
  [[nodiscard]] std::string failure() const {
    return (in_tensor_ ? "tensor " + shown(name_) : "the header") + ": " + json_.failure();
  }
  [[nodiscard]] std::vector<FoundTensor>& tensors() noexcept { return tensors_; }
  [[nodiscard]] std::optional<Metadata>& metadata() noexcept { return metadata_; }

 private:
  void read_metadata();
  void read_tensor(HeaderTensor& tensor);
  void read_fields(HeaderTensor& tensor);
  void read_list(HeaderTensor& tensor);
  void read_dtype(DType& dtype);
  void read_shape(std::vector<std::uint64_t>& shape);
  void read_offsets(HeaderTensor& tensor);

  JsonReader json_;
  std::string name_;  // of what it reads or has read last
  bool in_tensor_ = false;
  std::vector<FoundTensor> tensors_;
  std::optional<Metadata> metadata_;
};

bool HeaderReader::read() {
  bool metadata_seen = false;
  for (json_.enter_object(); json_.next_member(name_);) {
    if (name_ != metadata_key) {
      FoundTensor found{.tensor = {}, .at = json_.key_offset()};
      in_tensor_ = true;
      read_tensor(found.tensor);
      if (!json_.ok()) return false;
      in_tensor_ = false;
      found.tensor.name = name_;
      tensors_.push_back(std::move(found));
    } else if (std::exchange(metadata_seen, true)) {
      json_.fail("__metadata__ appears twice");
    } else {
      read_metadata();
    }
  }
  return json_.finish();
}

void HeaderReader::read_metadata() {
  if (json_.peek() == JsonReader::Kind::word) {
    json_.read_null();
    return;
  }
  Metadata metadata;
  std::string key;
  std::string value;
  for (json_.enter_object(); json_.next_member(key);) {
    if (json_.peek() != JsonReader::Kind::string) {
      json_.fail("a value of __metadata__ is not a string");
    }
    if (json_.read_string(value)) metadata.insert_or_assign(key, value);
  }
  metadata_ = std::move(metadata);
}

void HeaderReader::read_tensor(HeaderTensor& tensor) {
  if (json_.peek() == JsonReader::Kind::array) {
    read_list(tensor);
  } else {
    read_fields(tensor);
  }
}

void HeaderReader::read_list(HeaderTensor& tensor) {
  json_.enter_array();
  int count = 0;
  while (json_.next_element()) {
    switch (++count) {
      case 1:
        read_dtype(tensor.dtype);
        break;
      case 2:
        read_shape(tensor.shape);
        break;
      case 3:
        read_offsets(tensor);
        break;
      default:
        json_.fail("a tensor as a list has more than three parts");
    }
  }
  if (count < 3) json_.fail("a tensor as a list has fewer than three parts");
}

void HeaderReader::read_fields(HeaderTensor& tensor) {
  bool dtype = false;
  bool shape = false;
  bool offsets = false;
  std::string field;
  for (json_.enter_object(); json_.next_member(field);) {
    bool twice = false;
    if (field == "dtype") {
      twice = std::exchange(dtype, true);
      read_dtype(tensor.dtype);
    } else if (field == "shape") {
      twice = std::exchange(shape, true);
      read_shape(tensor.shape);
    } else if (field == "data_offsets") {
      twice = std::exchange(offsets, true);
      read_offsets(tensor);
    } else {
      json_.skip();
    }
    if (twice) json_.fail(field + " appears twice");
  }
  if (!dtype) json_.fail("dtype is missing");
  if (!shape) json_.fail("shape is missing");
  if (!offsets) json_.fail("data_offsets is missing");
}

void HeaderReader::read_dtype(DType& dtype) {
  std::string name;
  const bool wrapped = json_.peek() == JsonReader::Kind::object;
  const std::size_t at = json_.offset();
  if (!wrapped) {
    json_.read_string(name);
  } else if (json_.enter_object() && !json_.next_member(name)) {
    json_.fail("dtype is an empty object");
  } else if (json_.ok() && json_.read_null() && json_.next_member(name)) {
    json_.fail("dtype is an object of several members");
  }
  const std::optional<DType> known = dtype_named(name);
  if (!known) {
    json_.fail_at(at, "dtype " + shown(name) + " is unknown");
  } else {
    dtype = *known;
  }
}

void HeaderReader::read_shape(std::vector<std::uint64_t>& shape) {
  std::uint64_t size = 0;
  shape.clear();
  for (json_.enter_array(); json_.next_element();) {
    if (json_.read_unsigned(size)) shape.push_back(size);
  }
}

void HeaderReader::read_offsets(HeaderTensor& tensor) {
  const std::size_t at = json_.offset();
  std::uint64_t* const places[] = {&tensor.begin, &tensor.end};
  std::size_t count = 0;
  for (json_.enter_array(); json_.next_element(); ++count) {
    if (count < std::size(places)) {
      json_.read_unsigned(*places[count]);
    } else {
      json_.skip();
    }
  }
  if (count != std::size(places)) json_.fail_at(at, "data_offsets does not have two numbers");
}

// Of tensors of one name the last stays.
void remove_repeated(std::vector<FoundTensor>& tensors) {
  // Sorted, not hashed: hostile names cannot make this slow.
  std::ranges::sort(tensors, [](const FoundTensor& left, const FoundTensor& right) {
    const int order = left.tensor.name.compare(right.tensor.name);
    return order != 0 ? order < 0 : left.at > right.at;
  });
  const auto repeated = std::ranges::unique(
      tensors, {},
      [](const FoundTensor& found) -> const std::string& { return found.tensor.name; });
  tensors.erase(repeated.begin(), repeated.end());
}

std::string text_of(std::span<const std::uint64_t> shape) {
  constexpr std::size_t shown_max = 16;
  std::string text = "[";
  for (std::size_t i = 0; i < std::min(shape.size(), shown_max); ++i) {
    text += (i > 0 ? "," : "") + std::to_string(shape[i]);
  }
  return text + (shape.size() > shown_max ? ",...]" : "]");
}

// What is wrong with the place of a tensor that must begin where the one before it ends. Empty: all
// is well.
std::string fault_of(const HeaderTensor& tensor, std::uint64_t expected_begin) {
  const auto says =
      "data_offsets [" + std::to_string(tensor.begin) + "," + std::to_string(tensor.end) + "]";
  if (tensor.end < tensor.begin) return says + " end before they begin";
  if (tensor.begin != expected_begin) {
    return says + (tensor.begin < expected_begin ? " overlap" : " leave a hole after") +
           " the bytes up to " + std::to_string(expected_begin);
  }
  const Result<std::uint64_t> bytes = tensor_bytes(tensor.dtype, tensor.shape);
  if (!bytes.ok()) return bytes.error().hint();
  if (bytes.value() != tensor.end - tensor.begin) {
    return says + " have " + std::to_string(tensor.end - tensor.begin) + " bytes where " +
           std::string(to_string(tensor.dtype)) + " of shape " + text_of(tensor.shape) + " has " +
           std::to_string(bytes.value());
  }
  return {};
}

}  // namespace

Result<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::uint64_t> shape) {
  const auto refused = [](std::string why) {
    return Error({.operation = "tensor_bytes", .code = EINVAL, .hint = std::move(why)});
  };
  std::uint64_t bits = 1;
  bool fits = true;
  for (const std::uint64_t size : shape) fits = fits && !__builtin_mul_overflow(bits, size, &bits);
  if (!fits || __builtin_mul_overflow(bits, bits_of(dtype), &bits)) {
    return refused("shape " + text_of(shape) + " has more bits than 64 bits can count");
  }
  if (bits % 8 != 0) {
    return refused(std::string(to_string(dtype)) + " of shape " + text_of(shape) +
                   " does not end on a byte");
  }
  return bits / 8;
}

Result<std::uint64_t> header_json_bytes(std::span<const std::byte> first, std::uint64_t file_bytes,
                                        const std::string& path) {
  if (file_bytes < length_field_bytes || first.size() < length_field_bytes) {
    return broken_header(path, 0, "it is shorter than the 8 bytes of its header's length");
  }
  std::uint64_t length = 0;
  for (std::size_t i = length_field_bytes; i-- > 0;) {
    length = length << 8U | std::to_integer<std::uint64_t>(first[i]);
  }
  if (length > header_json_bytes_max) {
    return broken_header(path, 0,
                         "its header claims " + std::to_string(length) + " bytes; more than " +
                             std::to_string(header_json_bytes_max) + " are not allowed");
  }
  if (length > file_bytes - length_field_bytes) {
    return broken_header(
        path, 0,
        "its header claims " + std::to_string(length) + " bytes, but the file has " +
            std::to_string(file_bytes - length_field_bytes) + " after the first 8");
  }
  return length;
}

Result<Header> parse_header(std::span<const std::byte> json, std::uint64_t data_bytes,
                            const std::string& path) {
  HeaderReader reader({reinterpret_cast<const char*>(json.data()), json.size()});
  std::vector<FoundTensor>& found = reader.tensors();
  if (!reader.read())
    return broken_header(path, length_field_bytes + reader.offset(), reader.failure());
  remove_repeated(found);
  std::ranges::sort(found, {}, [](const FoundTensor& one) {
    return std::tie(one.tensor.begin, one.tensor.end, one.tensor.name);
  });
  Header header{.tensors = {}, .metadata = std::move(reader.metadata())};
  header.tensors.reserve(found.size());
  std::uint64_t end = 0;
  for (FoundTensor& one : found) {
    if (std::string fault = fault_of(one.tensor, end); !fault.empty()) {
      return broken_header(path, length_field_bytes + one.at,
                           "tensor " + shown(one.tensor.name) + ": " + fault);
    }
    end = one.tensor.end;
    header.tensors.push_back(std::move(one.tensor));
  }
  if (end != data_bytes) {
    return broken_header(path, length_field_bytes + json.size() + std::min(end, data_bytes),
                         "its tensors have " + std::to_string(end) + " bytes, but " +
                             std::to_string(data_bytes) + " follow the header");
  }
  return header;
}

}  // namespace tensorferry::checkpoint
