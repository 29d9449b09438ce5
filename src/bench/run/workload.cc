#include "bench/run/workload.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <random>

#include "bench/run/interrupt.h"
#include "bench/run/sizes.h"

namespace tensorferry::bench {

namespace {

constexpr std::size_t torch_alignment = 64;

// Random, because some drives compress or detect zeros; repeated after a MiB, which is enough.
void fill(std::span<std::byte> bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> pattern(std::min(bytes.size(), MiB) / sizeof(std::uint64_t) + 1);
  std::ranges::generate(pattern, random);
  for (std::size_t at = 0; at < bytes.size(); at += MiB) {
    std::memcpy(bytes.data() + at, pattern.data(), std::min(MiB, bytes.size() - at));
    ++pattern.front();
  }
}

}  // namespace

double process_cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

std::string_view to_string(Direction direction) noexcept {
  return direction == Direction::read ? "read" : "write";
}

std::string_view to_string(MemoryKind kind) noexcept {
  switch (kind) {
    case MemoryKind::pinned:
      return "pinned";
    case MemoryKind::pageable:
      return "pageable";
    case MemoryKind::gpu:
      break;
  }
  return "gpu";
}

FilledMemory::FilledMemory(MemoryKind kind, std::size_t bytes, std::uint64_t seed) {
  if (kind == MemoryKind::pinned) {
    pinned_.emplace(bytes);
    bytes_ = pinned_->bytes();
    lock_problem_ = pinned_->locked() ? "" : pinned_->lock_reason();
  } else if (kind == MemoryKind::gpu) {
    gpu_.emplace(bytes);
    bytes_ = gpu_->bytes();
    lock_problem_ = "memory of a GPU was requested";
    return;
  } else {
    // The first address in a page that torch could use but O_DIRECT refuses.
    pageable_.resize(bytes + page_bytes);
    const auto address = reinterpret_cast<std::uintptr_t>(pageable_.data());
    const std::size_t skip = (page_bytes + torch_alignment - address % page_bytes) % page_bytes;
    bytes_ = std::span(pageable_).subspan(skip, bytes);
  }
  fill(bytes_, seed);
}

void FilledMemory::load_from(const std::string& path) {
  if (!gpu_) return;
  Handle handle;
  const File file = File::open(path, Access::read);
  const std::uint64_t there = file.size();
  for (std::size_t at = 0; at < bytes_.size() && there > 0;) {
    const std::size_t length = std::min<std::uint64_t>(bytes_.size() - at, there);
    finish(handle.read(bytes_.subspan(at, length), file));
    at += length;
  }
}

std::optional<Error> try_engine(EngineKind engine) {
  try {
    const Handle handle({.engine = engine});
    return {};
  } catch (const Error& error) {
    return error;
  }
}

Operation start(Handle& handle, Direction direction, std::span<std::byte> memory, const File& file,
                std::uint64_t offset) {
  return direction == Direction::read ? handle.read(memory, file, offset)
                                      : handle.write(memory, file, offset);
}

void extend(const File& file, std::uint64_t bytes, std::uint64_t seed, EngineKind engine) {
  const std::uint64_t begin = file.size();
  if (begin >= bytes) return;
  constexpr std::uint64_t piece_bytes = 64 * MiB;
  const FilledMemory memory(MemoryKind::pinned, std::min(piece_bytes, bytes - begin), seed);
  HandleOptions options;
  options.engine = engine;
  Handle handle(options);
  for (std::uint64_t at = begin; at < bytes; at += memory.bytes().size()) {
    const std::size_t length = std::min<std::uint64_t>(memory.bytes().size(), bytes - at);
    finish(handle.write(memory.bytes().first(length), file, at));
  }
  finish(handle.sync(file));
}

}  // namespace tensorferry::bench
