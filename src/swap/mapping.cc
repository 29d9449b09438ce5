#include "swap/mapping.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/alignment.h"

namespace tensorferry::swap {

Mapping::Mapping(os::System& system, std::byte* memory, std::uint64_t bytes,
                 std::uint64_t mapped_bytes, std::vector<Part> parts)
    : system_(system),
      memory_(memory),
      bytes_(bytes),
      mapped_bytes_(mapped_bytes),
      parts_(std::move(parts)) {}

Mapping::~Mapping() { system_.unmap(memory_, mapped_bytes_); }

Result<std::shared_ptr<Mapping>> Mapping::make(os::System& system, std::vector<Part> parts) {
  const auto no_addresses = [](std::uint64_t bytes) {
    return Error({.operation = "map tensors",
                  .length = bytes,
                  .code = ENOMEM,
                  .hint = "no addresses left; raise ulimit -v or vm.max_map_count"});
  };
  // Files are mapped over whatever is at their addresses, so that these must be ours.
  std::uint64_t bytes = 0;
  for (const Part& part : parts) {
    if (part.bytes > bytes_max - bytes) return no_addresses(bytes_max);
    bytes += part.bytes;
  }
  const std::uint64_t mapped = align_up(std::max<std::uint64_t>(bytes, 1), page_bytes());
  std::byte* const memory = system.map(mapped);
  if (memory == nullptr) return no_addresses(bytes);
  std::shared_ptr<Mapping> mapping(new Mapping(system, memory, bytes, mapped, std::move(parts)));
  std::uint64_t at = 0;
  for (const Part& part : mapping->parts_) {
    if (const Status shown = mapping->show(part, at); !shown.ok()) return shown.error();
    at += part.bytes;
  }
  return mapping;
}

Status Mapping::show(const Part& part, std::uint64_t at) {
  for (const Place::Stretch& stretch : part.place->stretches(part.offset, part.bytes)) {
    files::OpenFile& file = *stretch.file.opened();
    const Result<int> fd = file.buffered_fd();
    if (!fd.ok()) return fd.error();
    std::byte* const memory = memory_ + at + (stretch.offset - part.offset);
    const int mapped = system_.map_file(memory, align_up(stretch.bytes, page_bytes()), fd.value(),
                                        stretch.file_offset);
    if (mapped < 0) {
      return Error({.operation = "map tensors",
                    .path = file.path(),
                    .offset = stretch.file_offset,
                    .length = stretch.bytes,
                    .code = -mapped,
                    .hint = "raise vm.max_map_count if there are very many"});
    }
  }
  return Nothing{};
}

}  // namespace tensorferry::swap
