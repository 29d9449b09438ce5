// Reads tensors of safetensors files.
#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "checkpoint/contents.h"
#include "checkpoint/digester.h"
#include "checkpoint/slices.h"
#include "handle/conductor.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry {

namespace checkpoint {

namespace {

Error refuse(const Contents& contents, const TensorInfo* tensor, int code, std::string hint) {
  const std::size_t file = tensor != nullptr ? tensor->file : 0;
  return Error({.operation = "read tensor",
                .path = contents.files().empty() ? "" : contents.files()[file].path(),
                .code = code,
                .hint = std::move(hint)});
}

// Collects what a call of read() asks for.
class Reads {
 public:
  Reads(const Contents& contents, Verify verify) : contents_(contents), verify_(verify) {}

  Status add(const TensorRead& read) {
    const TensorInfo* tensor = contents_.find(read.name);
    if (tensor == nullptr) {
      return refuse(contents_, nullptr, ENOENT,
                    "there is no tensor '" + std::string(read.name) + "'");
    }
    const auto slices = slices_of(*tensor, read.ranges);
    if (!slices.ok()) return refuse(contents_, tensor, EINVAL, slices.error().hint());
    const std::uint64_t wanted = slices.value().total_bytes();
    if (read.memory.size() != wanted) {
      return refuse(contents_, tensor, EINVAL,
                    "tensor '" + tensor->name + "': " + std::to_string(wanted) +
                        " bytes are asked for, and the memory has " +
                        std::to_string(read.memory.size()));
    }
    if (Status watched = watch(*tensor, slices.value().whole); !watched.ok()) return watched;
    if (wanted == 0) return Nothing{};
    const File& file = contents_.files()[tensor->file];
    const handle::Part all = handle::part_of(read.memory, file, tensor->offset, read.stream);
    std::byte* memory = all.memory;
    slices.value().for_each([&](std::uint64_t offset) {
      handle::Part& part = parts_.emplace_back(all);
      part.memory = std::exchange(memory, memory + slices.value().bytes);
      part.bytes = slices.value().bytes;
      part.offset += offset;
    });
    return Nothing{};
  }

  [[nodiscard]] std::span<handle::Part> parts() noexcept { return parts_; }
  [[nodiscard]] std::shared_ptr<handle::Witness> witness() {
    return watched_.empty() ? nullptr : std::make_shared<Digester>(std::move(watched_));
  }

 private:
  Status watch(const TensorInfo& tensor, bool whole) {
    if (verify_ == Verify::no) return Nothing{};
    if (!names_.insert(&tensor).second) {
      return refuse(contents_, &tensor, EINVAL,
                    "tensor '" + tensor.name + "' is asked for twice; to verify it, read it once");
    }
    const auto& expected = contents_.digests_of(tensor);
    const bool known = !expected.empty() || tensor.bytes == 0;
    if (whole && known) {
      watched_.push_back({tensor.name, contents_.files()[tensor.file].opened(), tensor.offset,
                          tensor.bytes, expected});
      return Nothing{};
    }
    if (verify_ == Verify::if_present) return Nothing{};
    const std::string& problem = contents_.checksums_problem();
    return refuse(contents_, &tensor, ENODATA,
                  "tensor '" + tensor.name + "' cannot be verified: " +
                      (known             ? "only a part of it is read"
                       : problem.empty() ? "the file has no checksum of it"
                                         : problem));
  }

  const Contents& contents_;
  const Verify verify_;
  std::vector<handle::Part> parts_;
  std::vector<WatchedTensor> watched_;
  std::set<const TensorInfo*> names_;
};

}  // namespace

}  // namespace checkpoint

Safetensors::Safetensors(std::shared_ptr<const checkpoint::Contents> contents)
    : contents_(std::move(contents)) {}

Safetensors Safetensors::open(const std::string& path) {
  return Safetensors(checkpoint::Contents::open(os::System::real(), path).or_throw());
}

const std::vector<File>& Safetensors::files() const noexcept { return contents_->files(); }
const std::vector<TensorInfo>& Safetensors::tensors() const noexcept {
  return contents_->tensors();
}
const TensorInfo* Safetensors::find(std::string_view name) const noexcept {
  return contents_->find(name);
}
const std::optional<std::map<std::string, std::string>>& Safetensors::metadata() const noexcept {
  return contents_->metadata();
}
bool Safetensors::has_checksums() const noexcept { return contents_->unchecked().empty(); }
std::vector<std::string_view> Safetensors::unchecked() const { return contents_->unchecked(); }
const std::string& Safetensors::checksums_problem() const noexcept {
  return contents_->checksums_problem();
}

SafetensorsContents parse_safetensors(std::span<const std::byte> bytes) {
  using namespace checkpoint;
  const auto first = bytes.first(std::min(bytes.size(), length_field_bytes));
  const std::uint64_t json_bytes = header_json_bytes(first, bytes.size(), "").or_throw();
  const std::uint64_t data_offset = length_field_bytes + json_bytes;
  Header header =
      parse_header(bytes.subspan(length_field_bytes, json_bytes), bytes.size() - data_offset, "")
          .or_throw();
  SafetensorsContents contents;
  contents.metadata = std::move(header.metadata);
  for (HeaderTensor& tensor : header.tensors) {
    contents.tensors.push_back({.name = std::move(tensor.name),
                                .dtype = tensor.dtype,
                                .shape = std::move(tensor.shape),
                                .offset = data_offset + tensor.begin,
                                .bytes = tensor.end - tensor.begin});
  }
  return contents;
}

Operation Safetensors::read(Handle& handle, std::span<const TensorRead> reads,
                            Verify verify) const {
  checkpoint::Reads all(*contents_, verify);
  for (const TensorRead& read : reads) {
    if (Status added = all.add(read); !added.ok()) throw Error(added.error());
  }
  return handle.conductor()
      .transfer(handle::Direction::read, all.parts(), Durability::none, handle::Caller::goes_on,
                all.witness())
      .or_throw();
}

}  // namespace tensorferry
