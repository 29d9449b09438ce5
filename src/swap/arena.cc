#include "swap/arena.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <optional>

#include "base/alignment.h"
#include "os/fork_mutex.h"
#include "os/kept_memory.h"
#include "os/system.h"
#include "tensorferry/error.h"
#include "tensorferry/pinned_buffer.h"

namespace tensorferry::swap {

namespace {

// All arenas of the process. Never destroyed: buffers may outlive main().
struct Arenas {
  std::mutex mutex;
  std::map<const std::byte*, std::weak_ptr<Arena>> by_address;
};

Arenas& arenas() {
  static Arenas& all = *new Arenas();
  return all;
}

std::mutex& arenas_mutex() { return arenas().mutex; }
[[maybe_unused]] const int fork_watch = os::hold_during_forks<arenas_mutex>();

OwnedMemory page_locked(std::size_t bytes) {
  auto buffer = std::make_shared<const PinnedBuffer>(bytes);
  return {buffer->bytes(), buffer};
}

Error no_memory(std::size_t bytes) {
  return Error({.operation = "map swap buffers",
                .length = bytes,
                .code = ENOMEM,
                .hint = "make buffer_bytes smaller"});
}

// Mapped memory that children of fork() do not get, just as page-locked memory.
class Mapped {
 public:
  explicit Mapped(std::span<std::byte> memory)
      : memory_(memory), kept_(std::in_place, os::System::real(), memory) {}
  ~Mapped() {
    kept_.reset();
    os::System::real().unmap(memory_.data(), memory_.size());
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

 private:
  const std::span<std::byte> memory_;
  std::optional<os::KeptFromChildren> kept_;
};

OwnedMemory ordinary(std::size_t bytes) {
  if (bytes == 0) return {};
  std::byte* const data = os::System::real().map(bytes);
  if (data == nullptr) throw no_memory(bytes);
  const std::span<std::byte> memory{data, bytes};
  return {memory, std::make_shared<const Mapped>(memory)};
}

}  // namespace

Lease::Lease(std::shared_ptr<Arena> arena, Extent extent, std::size_t asked_bytes)
    : arena_(std::move(arena)), extent_(extent), asked_bytes_(asked_bytes) {}

Lease::~Lease() { arena_->give_back(extent_); }

std::span<std::byte> Lease::pages() const noexcept {
  return arena_->memory_.bytes.subspan(extent_.offset, extent_.bytes);
}

Arena::Arena(OwnedMemory memory) : memory_(std::move(memory)), generation_(os::fork_generation()) {
  free_.grow(size());
}

std::shared_ptr<Arena> Arena::make(std::size_t bytes, SwapMemory kind) {
  if (bytes > bytes_max) throw no_memory(bytes);
  const std::size_t pages = align_up(bytes, page_bytes());
  std::shared_ptr<Arena> arena(
      new Arena(kind == SwapMemory::page_locked ? page_locked(pages) : ordinary(pages)),
      os::DeleteOwn{});
  Arenas& all = arenas();
  const std::lock_guard lock(all.mutex);
  all.by_address[arena->memory_.bytes.data()] = arena;
  return arena;
}

Arena::~Arena() {
  Arenas& all = arenas();
  const std::lock_guard lock(all.mutex);
  all.by_address.erase(memory_.bytes.data());
}

std::shared_ptr<Lease> Arena::holder(std::span<const std::byte> memory) {
  std::shared_ptr<Arena> arena;
  {
    Arenas& all = arenas();
    const std::lock_guard lock(all.mutex);
    const auto next = all.by_address.upper_bound(memory.data());
    if (next == all.by_address.begin()) return nullptr;
    arena = std::prev(next)->second.lock();
  }
  return arena == nullptr ? nullptr : arena->find(memory);
}

std::shared_ptr<Lease> Arena::try_take(std::size_t bytes) {
  if (bytes > size()) return nullptr;
  const std::uint64_t pages = align_up(std::max<std::uint64_t>(bytes, 1), page_bytes());
  const std::lock_guard lock(mutex_);
  const auto offset = free_.take(pages);
  if (!offset) return nullptr;
  auto lease = std::make_shared<Lease>(shared_from_this(), Extent{*offset, pages}, bytes);
  leases_[*offset] = lease;
  return lease;
}

void Arena::give_back(Extent extent) {
  if (generation_ != os::fork_generation()) return;
  {
    const std::lock_guard lock(mutex_);
    leases_.erase(extent.offset);
    free_.give_back(extent);
    ++changes_;
  }
  changed_.notify_all();
}

std::shared_ptr<Lease> Arena::find(std::span<const std::byte> memory) {
  if (generation_ != os::fork_generation()) return nullptr;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const auto first = reinterpret_cast<std::uintptr_t>(memory_.bytes.data());
  if (begin < first || begin - first >= size()) return nullptr;
  // Outlives the lock: if it is the last reference, its end takes the lock.
  std::shared_ptr<Lease> lease;
  const std::lock_guard lock(mutex_);
  const auto next = leases_.upper_bound(begin - first);
  if (next == leases_.begin()) return nullptr;
  lease = std::prev(next)->second.lock();
  if (lease == nullptr) return nullptr;
  const std::span<std::byte> pages = lease->pages();
  const auto skipped = static_cast<std::size_t>(memory.data() - pages.data());
  return skipped <= pages.size() && memory.size() <= pages.size() - skipped ? lease : nullptr;
}

std::uint64_t Arena::changes() const {
  const std::lock_guard lock(mutex_);
  return changes_;
}

bool Arena::wait_until(std::uint64_t seen, std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const auto changed = [&] { return changes_ != seen; };
  if (deadline == std::chrono::steady_clock::time_point::max()) {
    changed_.wait(lock, changed);
    return true;
  }
  return changed_.wait_until(lock, deadline, changed);
}

void Arena::touch() {
  {
    const std::lock_guard lock(mutex_);
    ++changes_;
  }
  changed_.notify_all();
}

std::uint64_t Arena::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_.total_bytes() - free_.free_bytes();
}

}  // namespace tensorferry::swap
