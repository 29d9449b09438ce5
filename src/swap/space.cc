#include "swap/space.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "base/alignment.h"
#include "memory/any_copy.h"
#include "swap/page_sums.h"

namespace tensorferry::swap {

namespace {

Error wrong(const char* operation, std::string_view key, int code, const std::string& what) {
  return Error(
      {.operation = operation, .code = code, .hint = "tensor '" + std::string(key) + "': " + what});
}

Error out_of_range(const char* operation, std::string_view key, std::uint64_t held,
                   std::uint64_t bytes, std::uint64_t offset) {
  return wrong(operation, key, EINVAL,
               std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                   " are outside of its " + std::to_string(held) + " bytes");
}

os::System& system_of(const Seams& seams) {
  return seams.handle.system != nullptr ? *seams.handle.system : os::System::real();
}

// The same memory up to the end of its last page, if the lease holds all of that: then whole pages
// move. Nobody uses the bytes that a read adds at the end.
std::span<std::byte> whole_pages(std::span<std::byte> memory, const Lease* lease) {
  if (lease == nullptr) return memory;
  const std::span<std::byte> pages = lease->pages();
  const auto left = static_cast<std::size_t>(pages.data() + pages.size() - memory.data());
  return {memory.data(), std::min(align_up(memory.size(), page_bytes()), left)};
}

}  // namespace

Space::Space(const SwapOptions& options, const Seams& seams)
    : generation_(os::fork_generation()),
      store_(Store::make(system_of(seams), options.directories, options.run, options.rank,
                         seams.device_uses ? seams.device_uses : DeviceUses([this] {
                           return handle_.conductor().device_use();
                         }))
                 .or_throw()),
      arena_(Arena::make(options.buffer_bytes, options.memory)),
      checksums_(options.checksums == SwapChecksums::computed),
      handle_(handle::make_handle(options.handle, seams.handle)) {}

void Space::close() noexcept {
  if (generation_ != os::fork_generation()) return;
  handle_.cancel_all();  // writes too: their files are removed
  try {
    handle_.close();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): nobody needs the files
  }
  store_->remove_directories();
}

void Space::reserve(std::uint64_t bytes) {
  check_generation();
  store_->reserve(bytes).or_throw();
}

void Space::check_generation() const {
  if (generation_ == os::fork_generation()) return;
  throw Error(
      {.operation = "use swap space",
       .path = store_->paths().front(),
       .code = ECHILD,
       .hint = "the swap space belongs to the parent of this process; open another one here"});
}

Space::Entry& Space::find(std::string_view key, const char* operation) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) {
    throw wrong(operation, key, ENOENT, "no tensor of that name; put() it first");
  }
  return found->second;
}

Operation Space::nothing_to_do() { return handle_.read({}, store_->file(0), 0); }

Operation Space::put(std::string_view key, std::span<const std::byte> memory, CudaStream stream) {
  check_generation();
  auto version = std::make_shared<Version>();
  version->bytes = memory.size();
  version->work = memory::work_before(memory, stream).or_throw();
  version->allocation = store_->take(memory.size()).or_throw();
  version->memory = memory;
  version->lease = Arena::holder(memory);
  const std::string name(key);
  std::shared_ptr<const Prefetched> outdated;
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[name];
    entry.versions.push_back(version);
    outdated = take_prefetched(entry);
    if (outdated != nullptr) ++counts_.prefetches_in_vain;
  }
  const std::span<const std::byte> source =
      version->lease == nullptr
          ? memory
          : whole_pages({const_cast<std::byte*>(memory.data()), memory.size()},
                        version->lease.get());
  const auto ranges = version->allocation->ranges(0, source.size());
  const auto sums = checksums_ ? std::make_shared<PageSums>(name, ranges, version->bytes) : nullptr;
  std::vector<handle::Part> parts;
  for (const Allocation::FileRange& range : ranges) {
    parts.push_back(handle::part_of(source.subspan(range.offset, range.bytes), range.file,
                                    range.file_offset, stream));
  }
  try {
    Operation operation = parts.empty()
                              ? nothing_to_do()
                              : handle_.conductor()
                                    .transfer(handle::Direction::write, parts, Durability::none,
                                              handle::Caller::goes_on, sums)
                                    .or_throw();
    handle::Transfer* const transfer = &operation.transfer();
    transfer->before_done(
        [self = shared_from_this(), name, version, transfer, sums](handle::Outcome outcome) {
          if (sums != nullptr) version->checksum = sums->sum();
          self->written(name, version, outcome, transfer);
        });
    const std::lock_guard lock(mutex_);
    version->write = transfer->weak_from_this();
    return operation;
  } catch (...) {
    written(name, version, handle::Outcome::failed, nullptr);
    throw;
  }
}

// From now on nobody reads the tensor from the memory it was put from. A version that failed is
// removed; a version that is on the drive replaces the older ones. A worker does not wait for
// readers, which are threads of the user: the last reader ends the write instead.
void Space::written(const std::string& key, const std::shared_ptr<Version>& version,
                    handle::Outcome outcome, handle::Transfer* transfer) {
  const bool failed = outcome == handle::Outcome::failed;
  std::vector<std::shared_ptr<Version>> gone;  // destroyed without the lock
  std::shared_ptr<Lease> lease;
  {
    std::unique_lock lock(mutex_);
    version->pending = false;
    version->failed = failed;
    const auto found = entries_.find(key);
    if (found != entries_.end()) {
      auto& versions = found->second.versions;
      const auto self = std::ranges::find(versions, version);
      if (self != versions.end()) {
        const auto first = failed ? self : versions.begin();
        const auto last = failed ? self + 1 : self;
        gone.assign(first, last);
        versions.erase(first, last);
      }
      if (versions.empty()) {
        (void)take_prefetched(found->second);
        entries_.erase(found);
      }
    }
    if (version->readers > 0 && transfer != nullptr && transfer->hold()) {
      version->held = transfer->shared_from_this();
    } else {  // waits only on the thread of put()
      settled_.wait(lock, [&version] { return version->readers == 0; });
      version->memory = {};
      lease = std::move(version->lease);
    }
  }
  settled_.notify_all();
}

Operation Space::read(std::string_view key, const std::shared_ptr<Version>& version,
                      std::span<std::byte> memory, std::uint64_t offset, CudaStream stream) {
  const std::shared_ptr<Lease> lease = Arena::holder(memory);
  std::span<std::byte> target = memory;
  // The bytes behind the lease's bytes() belong to nobody, so the read may overwrite them.
  if (lease != nullptr &&
      memory.data() + memory.size() == lease->bytes().data() + lease->bytes().size()) {
    target = whole_pages(memory, lease.get());
  }
  const auto ranges = version->allocation->ranges(offset, target.size());
  std::vector<handle::Part> parts;
  for (const Allocation::FileRange& range : ranges) {
    parts.push_back(handle::part_of(target.subspan(range.offset - offset, range.bytes), range.file,
                                    range.file_offset, stream));
  }
  if (parts.empty()) return nothing_to_do();
  std::shared_ptr<handle::Witness> witness;
  if (version->unread && memory.size() == version->bytes) {
    witness =
        std::make_shared<PageSums>(std::string(key), ranges, version->bytes, version->checksum);
  }
  Operation operation = handle_.conductor()
                            .transfer(handle::Direction::read, parts, Durability::none,
                                      handle::Caller::goes_on, witness)
                            .or_throw();
  if (witness != nullptr) {
    operation.transfer().before_done([version](handle::Outcome outcome) {
      if (outcome == handle::Outcome::succeeded) version->unread = false;
    });
  }
  operation.when_done([version, lease] {});  // keeps both until then
  return operation;
}

void Space::forward(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Version>& version,
                    std::span<std::byte> memory, std::uint64_t offset) {
  const std::span<const std::byte> from = version->memory.subspan(offset, memory.size());
  counts_.forwarded_bytes += memory.size();
  ++version->readers;
  lock.unlock();
  Status copied = memory::copy_any(memory, from);
  std::shared_ptr<handle::Transfer> ended;
  std::shared_ptr<Lease> lease;  // destroyed without the lock
  lock.lock();
  if (--version->readers == 0 && version->held != nullptr) {
    ended = std::move(version->held);
    version->memory = {};
    lease = std::move(version->lease);
  }
  lock.unlock();
  settled_.notify_all();
  lease.reset();
  if (ended != nullptr) ended->release();
  std::move(copied).or_throw();
}

Operation Space::get(std::string_view key, std::span<std::byte> memory, std::uint64_t offset,
                     CudaStream stream) {
  check_generation();
  std::shared_ptr<Version> version;
  std::shared_ptr<os::GpuFence> ended;  // the work that fills the source, once it has ended
  bool ready = false;                   // whether the work on `stream` has ended
  std::unique_lock lock(mutex_);
  for (;;) {
    version = find(key, "swap in").versions.back();
    if (offset > version->bytes || memory.size() > version->bytes - offset) {
      throw out_of_range("swap in", key, version->bytes, memory.size(), offset);
    }
    if (!version->pending || (ready && ended == version->work)) break;
    lock.unlock();
    // The user's work may wait for this write. The write does not wait for us yet.
    if (!ready) memory::wait_for(memory::work_before(memory, stream).or_throw()).or_throw();
    memory::wait_for(version->work).or_throw();
    ready = true;
    ended = version->work;
    lock.lock();
  }
  if (version->pending) {
    forward(lock, version, memory, offset);
    return nothing_to_do();
  }
  const std::shared_ptr<const Prefetched> prefetched = take_prefetched(entries_.find(key)->second);
  if (prefetched != nullptr) ++counts_.prefetched;
  lock.unlock();
  if (prefetched == nullptr) return read(key, version, memory, offset, stream);
  try {
    prefetched->operation.wait();
  } catch (const Error&) {  // let another read tell the error
    return read(key, version, memory, offset, stream);
  }
  if (!ready) memory::wait_for(memory::work_before(memory, stream).or_throw()).or_throw();
  memory::copy_any(memory, prefetched->lease->bytes().subspan(offset, memory.size())).or_throw();
  return nothing_to_do();
}

bool Space::prefetch(std::string_view key) {
  check_generation();
  std::shared_ptr<Version> version;
  {
    const std::lock_guard lock(mutex_);
    const Entry& entry = find(key, "prefetch");
    version = entry.versions.back();
    if (version->pending) return false;  // the bytes are in memory
    if (entry.prefetched != nullptr) return true;
  }
  std::shared_ptr<Lease> lease = arena_->try_take(version->bytes);
  if (lease == nullptr) return false;
  const Operation operation = read(key, version, lease->bytes(), 0);
  operation.when_done([arena = arena_] { arena->touch(); });  // evict() may drop it now
  std::shared_ptr<const Prefetched> other;                    // from another thread meanwhile
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end() || found->second.versions.back() != version) return false;
  other = take_prefetched(found->second);
  const std::uint64_t number = ++prefetches_;
  found->second.prefetched =
      std::make_shared<const Prefetched>(Prefetched{number, version, std::move(lease), operation});
  prefetch_order_.emplace(number, key);
  return true;
}

std::shared_ptr<const Space::Prefetched> Space::take_prefetched(Entry& entry) {
  if (entry.prefetched != nullptr) prefetch_order_.erase(entry.prefetched->number);
  return std::exchange(entry.prefetched, nullptr);
}

void Space::raise_all() {
  if (!handle::classes_in_use()) return;
  std::vector<std::shared_ptr<handle::Transfer>> holders;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, entry] : entries_) {
      for (const auto& version : entry.versions) holders.push_back(version->write.lock());
      if (entry.prefetched == nullptr) continue;
      holders.push_back(entry.prefetched->operation.transfer().shared_from_this());
    }
  }
  for (const auto& holder : holders) {
    if (holder != nullptr) holder->raise_for_waiter();
  }
}

bool Space::evict() {
  std::shared_ptr<const Prefetched> victim;
  const std::lock_guard lock(mutex_);
  for (const auto& [number, key] : prefetch_order_) {
    Entry& entry = entries_.find(key)->second;
    if (!entry.prefetched->operation.done()) continue;
    victim = take_prefetched(entry);
    ++counts_.prefetches_in_vain;
    return true;
  }
  return false;
}

std::shared_ptr<Lease> Space::take(std::size_t bytes, SwapSpace::Clock::time_point deadline,
                                   const Operation* until) {
  check_generation();
  if (bytes > arena_->size()) {
    throw Error({.operation = "take swap buffer",
                 .length = bytes,
                 .code = EINVAL,
                 .hint = "the buffers hold " + std::to_string(arena_->size()) +
                         " bytes in total; raise buffer_bytes or ask for less at once"});
  }
  bool waited = false;
  for (;;) {
    const std::uint64_t seen = arena_->changes();
    std::shared_ptr<Lease> lease = arena_->try_take(bytes);
    if (lease == nullptr && evict()) continue;
    if (lease != nullptr) return lease;
    if (until != nullptr && until->done()) return nullptr;
    if (!std::exchange(waited, true)) {
      {
        const std::lock_guard lock(mutex_);
        ++counts_.waits;
      }
      raise_all();
      if (until != nullptr) {
        until->when_done([arena = std::weak_ptr(arena_)] {
          if (const std::shared_ptr<Arena> waited_for = arena.lock()) waited_for->touch();
        });
      }
    }
    if (!arena_->wait_until(seen, deadline)) return nullptr;
  }
}

std::optional<SwapSpace::Fetched> Space::fetch(std::string_view key,
                                               SwapSpace::Clock::time_point deadline) {
  check_generation();
  std::shared_ptr<Lease> lease;
  std::shared_ptr<os::GpuFence> ended;  // the work that fills the source, once it has ended
  for (;;) {
    std::unique_lock lock(mutex_);
    Entry& entry = find(key, "swap in");
    const std::shared_ptr<Version> version = entry.versions.back();
    const std::shared_ptr<const Prefetched> prefetched = take_prefetched(entry);
    if (prefetched != nullptr && !prefetched->operation.error()) {
      ++counts_.prefetched;
      return SwapSpace::Fetched{SwapBuffer(prefetched->lease), prefetched->operation};
    }
    if (lease == nullptr || lease->bytes().size() != version->bytes) {
      lock.unlock();
      lease = nullptr;
      lease = take(version->bytes, deadline);
      if (lease == nullptr) return std::nullopt;
      continue;  // somebody may have put it again meanwhile
    }
    if (version->pending && ended != version->work) {
      lock.unlock();
      memory::wait_for(version->work).or_throw();
      ended = version->work;
      continue;
    }
    if (version->pending) {
      forward(lock, version, lease->bytes(), 0);
      return SwapSpace::Fetched{SwapBuffer(lease), nothing_to_do()};
    }
    lock.unlock();
    return SwapSpace::Fetched{SwapBuffer(lease), read(key, version, lease->bytes(), 0)};
  }
}

bool Space::drop(std::string_view key) {
  check_generation();
  Entry gone;
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return false;
  (void)take_prefetched(found->second);
  gone = std::move(found->second);
  entries_.erase(found);
  return true;
}

std::shared_ptr<Space::Version> Space::settled(std::string_view key, const char* operation) {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::shared_ptr<Version> version = find(key, operation).versions.back();
    if (!version->pending) return version;
    const std::shared_ptr<handle::Transfer> write = version->write.lock();
    lock.unlock();
    if (write != nullptr) write->raise_for_waiter();
    lock.lock();
    if (version->pending) settled_.wait(lock);
    if (version->failed) {
      throw wrong(operation, key, EIO,
                  "its last write has failed; the tensor still has its older bytes");
    }
  }
}

std::shared_ptr<Mapping> Space::view(std::span<const SwapPart> parts) {
  check_generation();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const SwapPart& part = parts[i];
    if (part.offset % page_bytes() != 0 ||
        (part.bytes % page_bytes() != 0 && i + 1 < parts.size())) {
      throw wrong("view", part.key, EINVAL,
                  "offset and size of a part must be multiples of " + std::to_string(page_bytes()) +
                      " bytes");
    }
  }
  std::vector<Mapping::Slice> slices;
  slices.reserve(parts.size());
  for (const SwapPart& part : parts) {
    const std::shared_ptr<Version> version = settled(part.key, "view");
    if (part.offset > version->bytes || part.bytes > version->bytes - part.offset) {
      throw out_of_range("view", part.key, version->bytes, part.bytes, part.offset);
    }
    slices.push_back({version->allocation, part.offset, part.bytes});
  }
  return Mapping::make(os::System::real(), std::move(slices)).or_throw();
}

std::optional<std::uint64_t> Space::size(std::string_view key) const {
  check_generation();
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return std::nullopt;
  return found->second.versions.back()->bytes;
}

SwapStats Space::stats() const {
  check_generation();
  const Stats moved = handle_.stats();
  SwapStats now;
  {
    const std::lock_guard lock(mutex_);
    now = counts_;
    now.tensors = entries_.size();
    std::set<const Allocation*> current;
    for (const auto& [key, entry] : entries_) {
      now.tensor_bytes += entry.versions.back()->bytes;
      current.insert(entry.versions.back()->allocation.get());
    }
    now.snapshots = snapshots_.size();
    for (const auto& [name, versions] : snapshots_) {
      for (const auto& version : versions) {
        const Allocation& kept = *version->allocation;
        if (kept.attached() == nullptr && current.insert(&kept).second) {
          now.snapshot_bytes += kept.bytes();
        }
      }
    }
  }
  now.read_bytes = moved.read_bytes;
  now.written_bytes = moved.written_bytes;
  now.file_bytes = store_->file_bytes();
  now.buffer_bytes = arena_->size();
  now.buffer_bytes_used = arena_->used_bytes();
  now.drives = store_->drives();
  return now;
}

}  // namespace tensorferry::swap
