#include "memory/region.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/alignment.h"
#include "base/errno_name.h"
#include "os/cuda.h"
#include "os/numa.h"

namespace tensorferry::memory {

namespace {

struct Listed {
  std::weak_ptr<Region> region;
  KnownToCuda cuda = KnownToCuda::yes;
};

// What no region has taken yet of the huge page that small regions share.
struct Rest {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

struct Registry {
  std::mutex mutex;
  std::map<const std::byte*, Listed> listed;
  std::atomic<bool> unknown_to_cuda{false};  // whether some still have to be registered
  std::mutex listeners_mutex;
  std::vector<const std::function<void()>*> listeners;
  std::atomic<std::uint64_t> ended{0};
  std::atomic<std::uint64_t> next_id{1};
  std::mutex rest_mutex;
  Rest rest;
};

// Never destroyed: threads may release regions after main() has returned.
Registry& registry() {
  static Registry& instance = *new Registry();
  return instance;
}

// A fork must not copy the registry while another thread changes it.
[[maybe_unused]] const int fork_watch = pthread_atfork(
    [] {
      registry().listeners_mutex.lock();
      registry().mutex.lock();
      registry().rest_mutex.lock();
    },
    [] {
      registry().rest_mutex.unlock();
      registry().mutex.unlock();
      registry().listeners_mutex.unlock();
    },
    [] {
      registry().listed.clear();  // regions, listeners and the rest are the parent's
      registry().listeners.clear();
      registry().rest = {};
      registry().rest_mutex.unlock();
      registry().mutex.unlock();
      registry().listeners_mutex.unlock();
    });

// Regions from this size up, if smaller than a huge page, share one.
constexpr std::size_t shared_page_bytes_min = 256 * KiB;

// Maps memory that begins at a multiple of a huge page's size. nullptr: no memory.
std::byte* map_aligned(std::size_t bytes, os::System& system) {
  const std::size_t slack = huge_page_bytes - page_bytes();
  std::byte* const mapped = system.map(bytes + slack);
  if (mapped == nullptr) return nullptr;
  // Cuts off both ends.
  const auto address = reinterpret_cast<std::uintptr_t>(mapped);
  const std::size_t before = align_up(address, huge_page_bytes) - address;
  if (before > 0) system.unmap(mapped, before);
  if (slack > before) system.unmap(mapped + before + bytes, slack - before);
  return mapped + before;
}

// Takes memory from the huge page that small regions share, or from a new one. A request of
// scattered small pages has a segment for each, and a drive may take twice as long for it. Each
// region is unmapped alone. nullptr: no memory.
std::byte* take_of_huge_page(std::size_t bytes, os::System& system) {
  const std::lock_guard lock(registry().rest_mutex);
  Rest& rest = registry().rest;
  if (rest.bytes < bytes) {
    std::byte* const page = map_aligned(huge_page_bytes, system);
    if (page == nullptr) return nullptr;
    if (rest.bytes > 0) system.unmap(rest.data, rest.bytes);
    rest = {page, huge_page_bytes};
    system.advise(page, huge_page_bytes, MADV_DONTFORK);
    system.advise(page, huge_page_bytes, MADV_HUGEPAGE);
    // Makes all of it, if the kernel has a huge page: those who take parts only lock them.
    system.advise(page, page_bytes(), MADV_POPULATE_WRITE);
  }
  std::byte* const taken = rest.data;
  rest = {taken + bytes, rest.bytes - bytes};
  return taken;
}

std::string why_not_locked(int code, std::size_t bytes) {
  std::string reason = "mlock of " + std::to_string(bytes) + " bytes: ";
  if (code == ENOMEM || code == EPERM || code == EAGAIN) {
    reason += "over the memlock limit of " + std::to_string(os::memlock_limit_bytes()) +
              " bytes; raise it with ulimit -l, LimitMEMLOCK= or limits.conf";
  } else {
    reason += errno_name(code);
  }
  return reason + "; the memory works unlocked";
}

}  // namespace

Region::Region(std::byte* data, std::size_t bytes, std::size_t mapped_bytes, os::System& system)
    : data_(data),
      bytes_(bytes),
      mapped_bytes_(mapped_bytes),
      system_(system),
      id_(registry().next_id.fetch_add(1, std::memory_order_relaxed)),
      generation_(os::fork_generation()) {
  kept_.emplace(system, mapped());
}

Result<std::shared_ptr<Region>> Region::create(std::size_t bytes, os::System& system,
                                               int numa_node) {
  const auto no_memory = [bytes] {
    return Error({.operation = "allocate page-locked memory",
                  .length = bytes,
                  .code = ENOMEM,
                  .hint = "ask for less, or free other memory"});
  };
  if (bytes > (std::size_t{1} << 62)) return no_memory();
  const std::size_t mapped_bytes = align_up(std::max<std::size_t>(bytes, 1), page_bytes());

  const bool huge = mapped_bytes >= huge_page_bytes;
  const bool shares = !huge && mapped_bytes >= shared_page_bytes_min && numa_node < 0;
  std::byte* const data = huge     ? map_aligned(mapped_bytes, system)
                          : shares ? take_of_huge_page(mapped_bytes, system)
                                   : system.map(mapped_bytes);
  if (data == nullptr) return no_memory();
  std::shared_ptr<Region> region(new Region(data, bytes, mapped_bytes, system));
  region->numa_reason_ = os::prefer_node(system, numa_node, region->mapped());
  region->populate();
  return region;
}

void Region::populate() {
  if (mapped_bytes_ < huge_page_bytes) {
    huge_page_reason_ = "smaller than a huge page";
  } else if (const int advised = system_.advise(data_, mapped_bytes_, MADV_HUGEPAGE); advised < 0) {
    huge_page_reason_ = "madvise(MADV_HUGEPAGE): " + errno_name(-advised) +
                        "; the kernel does not support transparent huge pages";
  } else if (os::read_text("/sys/kernel/mm/transparent_hugepage/enabled").find("[never]") !=
             std::string::npos) {
    huge_page_reason_ =
        "transparent huge pages are off; write madvise to "
        "/sys/kernel/mm/transparent_hugepage/enabled";
  }
  if (const int locked = system_.lock(data_, mapped_bytes_); locked < 0) {
    lock_reason_ = why_not_locked(-locked, mapped_bytes_);
    system_.advise(data_, mapped_bytes_, MADV_POPULATE_WRITE);
  }
  if (huge_page_reason_.empty()) {
    const std::int64_t huge = system_.huge_bytes(data_, mapped_bytes_);
    const auto whole = static_cast<std::int64_t>(align_down(mapped_bytes_, huge_page_bytes));
    if (huge >= 0 && huge < whole) {
      huge_page_reason_ = "the kernel had huge pages for only " + std::to_string(huge) + " of " +
                          std::to_string(whole) + " bytes; memory is short or fragmented";
    }
  }
}

bool Region::register_with_cuda() {
  if (cuda_.load(std::memory_order_acquire) != Cuda::unknown) return true;
  if (os::cuda() == nullptr) return false;
  const std::lock_guard lock(cuda_mutex_);
  if (cuda_.load(std::memory_order_relaxed) != Cuda::unknown) return true;
  const CudaResult<std::optional<int>> known = os::register_with_cuda(data_, mapped_bytes_);
  if (known.ok()) {
    const std::optional<int>& device = known.value();
    if (!device) return false;
    cuda_device_ = *device;
  } else {
    cuda_reason_ = explain(known.error()).what();
  }
  cuda_.store(known.ok() ? Cuda::known : Cuda::refused, std::memory_order_release);
  return true;
}

std::string Region::cuda_reason() const {
  const std::lock_guard lock(cuda_mutex_);
  return cuda_reason_;
}

Region::~Region() {
  if (generation_ != os::fork_generation()) return;  // the parent's: nothing is mapped here
  if (cuda_.load(std::memory_order_acquire) == Cuda::known) {
    os::unregister_with_cuda(cuda_device_, data_);
  }
  kept_.reset();
  system_.unmap(data_, mapped_bytes_);
  if (!registered_.load(std::memory_order_relaxed)) return;
  Registry& all = registry();
  all.ended.fetch_add(1, std::memory_order_release);
  const std::lock_guard lock(all.listeners_mutex);
  for (const auto* listener : all.listeners) (*listener)();
}

Status check_numa_node(int numa_node, os::System& system) {
  if (numa_node == -1) return Nothing{};
  std::string known;
  for (const os::NumaNode& node : system.numa_nodes()) {
    if (node.number == numa_node) return Nothing{};
    known += (known.empty() ? "" : ", ") + std::to_string(node.number);
  }
  return Error({.operation = "allocate page-locked memory",
                .code = EINVAL,
                .hint = "there is no NUMA node " + std::to_string(numa_node) +
                        "; the nodes of this machine: " + known});
}

void list_region(const std::shared_ptr<Region>& region, KnownToCuda cuda) {
  const std::lock_guard lock(registry().mutex);
  registry().listed[region->data()] = {region, cuda};
  if (cuda == KnownToCuda::yes) registry().unknown_to_cuda.store(true, std::memory_order_release);
}

void register_listed_with_cuda() {
  Registry& all = registry();
  if (!all.unknown_to_cuda.load(std::memory_order_acquire) || os::cuda() == nullptr) return;
  std::vector<std::shared_ptr<Region>> regions;
  {
    const std::lock_guard lock(all.mutex);
    all.unknown_to_cuda.store(false, std::memory_order_release);
    for (const auto& [first, listed] : all.listed) {
      if (listed.cuda == KnownToCuda::yes) regions.push_back(listed.region.lock());
    }
  }
  for (const auto& region : regions) {
    if (region != nullptr && !region->register_with_cuda()) {
      all.unknown_to_cuda.store(true, std::memory_order_release);
    }
  }
}

void unlist_region(const Region& region) noexcept {
  const std::lock_guard lock(registry().mutex);
  registry().listed.erase(region.data());
}

std::shared_ptr<Region> find_region(std::span<const std::byte> bytes) noexcept {
  if (bytes.empty()) return nullptr;
  // Outlives the lock: if it is the last reference, its end takes other locks.
  std::shared_ptr<Region> region;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto after = all.listed.upper_bound(bytes.data());
  if (after == all.listed.begin()) return nullptr;
  region = std::prev(after)->second.region.lock();
  return region != nullptr && region->holds(bytes) ? region : nullptr;
}

std::uint64_t ended_regions() noexcept { return registry().ended.load(std::memory_order_acquire); }

EndOfRegions::EndOfRegions(std::function<void()> listener) : listener_(std::move(listener)) {
  const std::lock_guard lock(registry().listeners_mutex);
  registry().listeners.push_back(&listener_);
}

EndOfRegions::~EndOfRegions() {
  const std::lock_guard lock(registry().listeners_mutex);
  std::erase(registry().listeners, &listener_);
}

}  // namespace tensorferry::memory
