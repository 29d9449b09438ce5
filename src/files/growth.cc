#include "files/growth.h"

#include <pthread.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "files/identity.h"

namespace tensorferry::files {

// The running operations that make one file longer.
struct Growing {
  explicit Growing(const Identity& known_as) : file(known_as) {}
  ~Growing();
  Growing(const Growing&) = delete;
  Growing& operator=(const Growing&) = delete;

  const Identity file;
  std::mutex mutex;  // guards the members below, and the end of the file while we read or cut it
  unsigned pending = 0;
  std::uint64_t old_end = 0;
  std::uint64_t reached = 0;          // the furthest end of all operations
  std::uint64_t kept_end = 0;         // the furthest end of those that have succeeded
  std::vector<Growth::Range> failed;  // has capacity for all ranges
  std::size_t ranges = 0;
};

namespace {

struct Registry {
  std::mutex mutex;  // never held during a system call
  std::map<Identity, std::weak_ptr<Growing>> growing;
};

// Never destroyed: operations may end after main() has returned.
Registry& registry() {
  static Registry& instance = *new Registry();
  return instance;
}

// A fork must not copy the registry while another thread changes it. The operations are the
// parent's.
[[maybe_unused]] const int growth_fork_watch =
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     registry().growing.clear();
                     registry().mutex.unlock();
                   });

std::shared_ptr<Growing> growing_of(const Identity& file) {
  const std::lock_guard lock(registry().mutex);
  std::weak_ptr<Growing>& known = registry().growing[file];
  std::shared_ptr<Growing> growing = known.lock();
  if (growing == nullptr) known = growing = std::make_shared<Growing>(file);
  return growing;
}

// The end of the file without failed ranges: removes them from the end downwards, until it meets
// other bytes.
std::uint64_t whole_end(std::uint64_t size, Growing& growing) {
  std::uint64_t end = size;
  std::ranges::sort(growing.failed, std::greater(), &Growth::Range::begin);
  for (const Growth::Range& range : growing.failed) {
    if (range.begin < end && end <= range.end) end = range.begin;
  }
  return std::max({end, growing.old_end, growing.kept_end});
}

Status cut(OpenFile& file, Growing& growing) {
  const Result<std::uint64_t> size = file.size();
  if (!size.ok()) return size.error();
  if (size.value() > growing.reached) return Nothing{};
  const std::uint64_t end = whole_end(size.value(), growing);
  return end < size.value() ? file.resize(end) : Nothing{};
}

}  // namespace

Growing::~Growing() {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().growing.find(file);
  if (found != registry().growing.end() && found->second.expired()) {
    registry().growing.erase(found);
  }
}

std::optional<Growth> Growth::begin(std::shared_ptr<OpenFile> file, std::vector<Range> ranges) {
  if (!file->regular()) return std::nullopt;
  std::uint64_t reached = 0;
  for (const Range& range : ranges) reached = std::max(reached, range.end);
  std::shared_ptr<Growing> growing = growing_of(file->identity());
  std::uint64_t old_end = 0;
  {
    const std::lock_guard lock(growing->mutex);
    if (growing->pending == 0) {
      const Result<std::uint64_t> size = file->size();
      if (!size.ok()) return std::nullopt;
      growing->old_end = size.value();
      growing->reached = growing->kept_end = 0;
      growing->ranges = 0;
      growing->failed.clear();
    }
    old_end = growing->old_end;
    if (reached <= old_end) return std::nullopt;
    growing->ranges += ranges.size();
    growing->failed.reserve(growing->ranges);
    growing->reached = std::max(growing->reached, reached);
    ++growing->pending;
  }
  return Growth(std::move(file), std::move(ranges), old_end, std::move(growing));
}

Growth::~Growth() {
  if (file_ != nullptr) (void)cut_back();
}

void Growth::keep() noexcept { (void)end(Outcome::kept); }

Status Growth::cut_back() noexcept { return end(Outcome::failed); }

Status Growth::end(Outcome outcome) noexcept {
  const std::shared_ptr<OpenFile> file = std::move(file_);
  const std::shared_ptr<Growing> growing = std::move(growing_);
  if (generation_ != os::fork_generation()) return Nothing{};
  const std::lock_guard lock(growing->mutex);
  if (outcome == Outcome::failed) {
    growing->failed.insert(growing->failed.end(), ranges_.begin(), ranges_.end());
  } else {
    for (const Range& range : ranges_) {
      growing->kept_end = std::max(growing->kept_end, range.end);
    }
  }
  if (--growing->pending > 0 || growing->failed.empty()) return Nothing{};
  return cut(*file, *growing);
}

}  // namespace tensorferry::files
