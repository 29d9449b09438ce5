#include "job_setup.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <random>
#include <system_error>
#include <utility>

using tensorferry::Access;
using tensorferry::File;
using tensorferry::Handle;

namespace {

constexpr std::size_t page_bytes = 4096;
// torch puts a large tensor on a multiple of 64 bytes, seldom on one that O_DIRECT accepts.
constexpr std::size_t ordinary_offset = 64;

}  // namespace

// --- memory and files ----------------------------------------------------------------------------

Memory::Memory(MemoryKind kind, std::size_t bytes) {
  if (kind == MemoryKind::pinned) {
    pinned_.emplace(bytes);
    bytes_ = pinned_->bytes();
    return;
  }
  mapped_bytes_ = bytes + page_bytes;
  mapped_ =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  bytes_ = {static_cast<std::byte*>(mapped_) + ordinary_offset, bytes};
}

Memory::~Memory() {
  if (mapped_bytes_ != 0) munmap(mapped_, mapped_bytes_);
}

void Memory::fill(std::uint64_t seed) const {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> pattern(MiB / sizeof(std::uint64_t));
  std::generate(pattern.begin(), pattern.end(), random);
  for (std::size_t at = 0; at < bytes_.size(); at += MiB) {
    std::memcpy(bytes_.data() + at, pattern.data(), std::min(MiB, bytes_.size() - at));
  }
}

void prepare_file(const std::string& path, std::size_t bytes, std::uint64_t seed) {
  const File file = File::open(path, Access::read_write);
  if (file.size() >= bytes) return;
  const Memory memory(MemoryKind::pinned, std::min(bytes, 256 * MiB));
  memory.fill(seed);
  Handle handle;
  for (std::size_t at = 0; at < bytes; at += memory.bytes().size()) {
    const std::size_t length = std::min(memory.bytes().size(), bytes - at);
    handle.write(memory.bytes().first(length), file, at).wait();
  }
  handle.sync(file).wait();
}

File open_for(const Job& job, const std::string& path) {
  return File::open(path, job.direction == Direction::read ? Access::read : Access::write);
}

tensorferry::Operation begin_transfer(Handle& handle, Direction direction,
                                      std::span<std::byte> memory, const File& file,
                                      std::uint64_t offset) {
  return direction == Direction::read ? handle.read(memory, file, offset)
                                      : handle.write(memory, file, offset);
}

void describe(Result& result, const Job& job, const Handle& handle, const File& file) {
  result.engine = handle.engine();
  result.engine_reason = handle.engine_reason();
  result.direct = file.direct();
  result.direct_reason = file.direct_reason();
  result.stats = handle.stats();
  const std::uint64_t moved = result.stats.read_bytes + result.stats.written_bytes;
  result.request_bytes = moved / std::max<std::uint64_t>(result.stats.requests, 1);
  result.queue_depth = job.options.queue_depth != 0
                           ? job.options.queue_depth
                           : tensorferry::device_of(file.path()).queue_depth;
}

// --- the clock -----------------------------------------------------------------------------------

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

Used used_so_far() {
  rusage counted{};
  getrusage(RUSAGE_SELF, &counted);
  return {static_cast<double>(std::clock()) / CLOCKS_PER_SEC,
          static_cast<double>(counted.ru_nvcsw) + static_cast<double>(counted.ru_nivcsw)};
}

// --- threads that work together ------------------------------------------------------------------

Team::Team(unsigned threads, std::function<void(unsigned)> work)
    : work_(std::move(work)), gate_(threads) {
  for (unsigned i = 1; i < threads; ++i) {
    others_.emplace_back([this, i] {
      for (;;) {
        gate_.arrive_and_wait();  // run() or the end
        if (ended_) return;
        work_as(i);
        gate_.arrive_and_wait();  // all have done their work
      }
    });
  }
}

Team::~Team() {
  ended_ = true;
  gate_.arrive_and_wait();
}

void Team::run() {
  gate_.arrive_and_wait();
  work_as(0);
  gate_.arrive_and_wait();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Team::work_as(unsigned thread) noexcept {
  try {
    work_(thread);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
  }
}
