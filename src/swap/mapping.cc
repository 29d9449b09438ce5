#include "swap/mapping.h"

#include <algorithm>
#include <cerrno>

#include "base/alignment.h"

namespace tensorferry::swap {

Mapping::Mapping(os::System& system, std::byte* memory, std::uint64_t bytes,
                 std::uint64_t mapped_bytes)
    : system_(system), memory_(memory), bytes_(bytes), mapped_bytes_(mapped_bytes) {}

Mapping::~Mapping() { system_.unmap(memory_, mapped_bytes_); }

Result<std::shared_ptr<Mapping>> Mapping::make(os::System& system, std::uint64_t bytes) {
  const std::uint64_t mapped = align_up(std::max<std::uint64_t>(bytes, 1), page_bytes());
  std::byte* const memory = system.map(mapped);
  if (memory == nullptr) {
    return Error({.operation = "map tensors",
                  .path = {},
                  .offset = {},
                  .length = bytes,
                  .code = ENOMEM,
                  .hint = "no addresses left; raise ulimit -v or vm.max_map_count"});
  }
  return std::shared_ptr<Mapping>(new Mapping(system, memory, bytes, mapped));
}

Status Mapping::add(const std::shared_ptr<Place>& place, std::uint64_t offset,
                    std::uint64_t bytes) {
  for (const Place::Stretch& stretch : place->stretches(offset, bytes)) {
    files::OpenFile& file = *stretch.file.opened();
    const Result<int> fd = file.buffered_fd();
    if (!fd.ok()) return fd.error();
    const std::uint64_t at = filled_bytes_ + stretch.offset - offset;
    const int mapped = system_.map_file(memory_ + at, align_up(stretch.bytes, page_bytes()),
                                        fd.value(), stretch.file_offset);
    if (mapped < 0) {
      return Error({.operation = "map tensors",
                    .path = file.path(),
                    .offset = stretch.file_offset,
                    .length = stretch.bytes,
                    .code = -mapped,
                    .hint = "raise vm.max_map_count if there are very many"});
    }
  }
  filled_bytes_ += bytes;
  places_.push_back(place);
  return Nothing{};
}

}  // namespace tensorferry::swap
