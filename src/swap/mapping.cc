#include "swap/mapping.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/alignment.h"

namespace tensorferry::swap {

Mapping::Mapping(os::System& system, std::byte* memory, std::uint64_t bytes,
                 std::uint64_t mapped_bytes, std::vector<Slice> slices)
    : system_(system),
      memory_(memory),
      bytes_(bytes),
      mapped_bytes_(mapped_bytes),
      slices_(std::move(slices)) {}

Mapping::~Mapping() { system_.unmap(memory_, mapped_bytes_); }

Result<std::shared_ptr<Mapping>> Mapping::make(os::System& system, std::vector<Slice> slices) {
  const auto no_addresses = [](std::uint64_t bytes) {
    return Error(
        {.operation = "map tensors",
         .length = bytes,
         .code = ENOMEM,
         .hint = "the process has no addresses left; raise ulimit -v or vm.max_map_count"});
  };
  // Files replace whatever is mapped at their addresses, so reserve the addresses first.
  std::uint64_t bytes = 0;
  for (const Slice& slice : slices) {
    if (slice.bytes > bytes_max - bytes) return no_addresses(bytes_max);
    bytes += slice.bytes;
  }
  const std::uint64_t mapped = align_up(std::max<std::uint64_t>(bytes, 1), page_bytes());
  std::byte* const memory = system.map(mapped);
  if (memory == nullptr) return no_addresses(bytes);
  std::shared_ptr<Mapping> mapping(new Mapping(system, memory, bytes, mapped, std::move(slices)));
  std::uint64_t at = 0;
  for (const Slice& slice : mapping->slices_) {
    if (const Status mapped_slice = mapping->map(slice, at); !mapped_slice.ok()) {
      return mapped_slice.error();
    }
    at += slice.bytes;
  }
  return mapping;
}

Status Mapping::map(const Slice& slice, std::uint64_t at) {
  for (const Allocation::FileRange& range : slice.allocation->ranges(slice.offset, slice.bytes)) {
    files::OpenFile& file = *range.file.opened();
    const Result<int> fd = file.buffered_fd();
    if (!fd.ok()) return fd.error();
    std::byte* const memory = memory_ + at + (range.offset - slice.offset);
    const int mapped = system_.map_file(memory, align_up(range.bytes, page_bytes()), fd.value(),
                                        range.file_offset);
    if (mapped < 0) {
      return Error({.operation = "map tensors",
                    .path = file.path(),
                    .offset = range.file_offset,
                    .length = range.bytes,
                    .code = -mapped,
                    .hint = "if the process has very many mappings, raise vm.max_map_count"});
    }
  }
  return Nothing{};
}

}  // namespace tensorferry::swap
