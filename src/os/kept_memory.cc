#include "os/kept_memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cerrno>
#include <iterator>
#include <map>
#include <mutex>

namespace tensorferry::os {

namespace {

using Ranges = std::map<const std::byte*, std::size_t>;  // first byte -> how many

struct Kept {
  std::mutex mutex;
  Ranges own;
  Ranges parents;
};

// Never destroyed: memory may be freed after main() has returned.
Kept& kept() {
  static Kept& all = *new Kept();
  return all;
}

// Reserves addresses. Returns false if something is mapped there.
bool hold(const std::byte* first, std::size_t bytes) noexcept {
  void* const held =
      ::mmap(const_cast<std::byte*>(first), bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  return held != MAP_FAILED || errno != EEXIST;
}

// In a child: reserves the addresses of the memory that it did not inherit, before anything else is
// mapped there. A pointer from before the fork must never point to something else. Reserves
// neighbours with one call: there may be thousands.
void hold_addresses() noexcept {
  Kept& all = kept();
  for (auto begin = all.own.begin(); begin != all.own.end();) {
    std::size_t bytes = begin->second;
    auto end = std::next(begin);
    for (; end != all.own.end() && end->first == begin->first + bytes; ++end) bytes += end->second;
    if (hold(begin->first, bytes)) {
      begin = end;
      continue;
    }
    // The child has inherited some of it: somebody undid MADV_DONTFORK.
    while (begin != end) {
      begin = hold(begin->first, begin->second) ? std::next(begin) : all.own.erase(begin);
    }
  }
  all.parents.merge(all.own);
  any_kept_by_parent.store(!all.parents.empty(), std::memory_order_relaxed);
  all.mutex.unlock();
}

[[maybe_unused]] const int kept_memory_fork_watch =
    pthread_atfork([] { kept().mutex.lock(); }, [] { kept().mutex.unlock(); }, hold_addresses);

}  // namespace

KeptFromChildren::KeptFromChildren(System& system, std::span<std::byte> memory)
    : memory_(memory.data()) {
  if (memory.empty() || system.advise(memory.data(), memory.size(), MADV_DONTFORK) < 0) return;
  const std::lock_guard lock(kept().mutex);
  kept().own[memory_] = memory.size();
}

KeptFromChildren::~KeptFromChildren() {
  const std::lock_guard lock(kept().mutex);
  kept().own.erase(memory_);
}

bool listed_as_kept_by_parent(std::span<const std::byte> memory) noexcept {
  if (memory.empty()) return false;
  Kept& all = kept();
  const std::lock_guard lock(all.mutex);
  const auto next = all.parents.lower_bound(memory.data() + memory.size());
  if (next == all.parents.begin()) return false;
  const auto& [first, bytes] = *std::prev(next);
  return memory.data() < first + bytes;
}

}  // namespace tensorferry::os
