#include "handle/gpu_copies.h"

#include <utility>

namespace tensorferry::handle {

namespace {

Error copy_error(const Run& run, const Block& block, Direction direction, const Error& error) {
  const char* way = direction == Direction::read ? " to cuda:" : " from cuda:";
  return Error({.operation = "copy" + std::string(way) + std::to_string(run.gpu),
                .path = run.file->path(),
                .offset = block.wanted_offset,
                .length = block.wanted_bytes,
                .code = error.code(),
                .hint = error.operation() + ": " + error.hint()});
}

}  // namespace

Result<GpuCopies::Lane*> GpuCopies::lane(int gpu, Direction direction) {
  for (Lane& known : lanes_) {
    if (known.gpu == gpu && known.direction == direction) return &known;
  }
  auto stream = os::GpuStream::open(gpu);
  if (!stream.ok()) return explain(stream.error());
  lanes_.push_back(
      {.gpu = gpu, .direction = direction, .stream = std::move(stream.value()), .copies = {}});
  return &lanes_.back();
}

Status GpuCopies::start(std::uint32_t tag, const Run& run, const Block& block, std::byte* slot,
                        Direction direction) {
  Result<Lane*> found = lane(run.gpu, direction);
  if (!found.ok()) return copy_error(run, block, direction, found.error());
  os::GpuStream& stream = *found.value()->stream;
  std::byte* at = direction == Direction::read ? slot + (block.wanted_offset - block.offset) : slot;
  CudaStatus status = Nothing{};
  run.plan.for_each_memory(
      block.wanted_offset, block.wanted_bytes, [&](std::byte* memory, std::size_t bytes) {
        std::byte* const here = std::exchange(at, at + bytes);
        if (!status.ok() || memory == nullptr) return;
        status = direction == Direction::read ? stream.copy(memory, here, bytes)
                                              : stream.copy(here, memory, bytes);
      });
  auto mark = status.ok() ? stream.mark() : CudaResult<std::uint64_t>(status.error());
  if (!mark.ok()) {
    (void)stream.finish();  // some of it may have started
    return copy_error(run, block, direction, explain(mark.error()));
  }
  found.value()->copies.emplace_back(tag, mark.value());
  ++under_way_;
  return Nothing{};
}

}  // namespace tensorferry::handle
