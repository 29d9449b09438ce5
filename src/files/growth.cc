#include "files/growth.h"

#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace tensorferry::files {

namespace {

// The operations under way that make one file longer.
struct Growing {
  std::uint64_t old_end = 0;
  std::uint64_t reached = 0;  // the furthest end of all of them
  unsigned pending = 0;
  std::vector<Growth::Range> failed;  // with room for all of them
  std::size_t ranges = 0;
};

using Inode = std::pair<std::uint64_t, std::uint64_t>;  // with its device

struct Registry {
  std::mutex mutex;
  std::map<Inode, Growing> growing;
};

// Never destroyed: operations may end after main() has returned.
Registry& registry() {
  static Registry& instance = *new Registry();
  return instance;
}

// A fork must not copy the registry while another thread changes it; what grows is the parent's.
[[maybe_unused]] const int fork_watch =
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     registry().growing.clear();
                     registry().mutex.unlock();
                   });

// Where the file ends once what failed is gone: from the end down, ranges that failed and holes are
// taken away, until there is data of somebody else.
std::uint64_t whole_end(OpenFile& file, std::uint64_t size, Growing& growing) {
  const std::uint64_t least = growing.old_end;
  std::uint64_t end = size;
  std::ranges::sort(growing.failed, std::greater(), &Growth::Range::begin);
  for (const Growth::Range& range : growing.failed) {
    if (end > range.end) {
      end = file.data_end(range.end, end);
      if (end > range.end) return end;
    }
    end = std::min(end, std::max(range.begin, least));
    if (end <= least) return least;
  }
  return file.data_end(least, end);
}

Status cut(OpenFile& file, Growing& growing) {
  const Result<std::uint64_t> size = file.size();
  if (!size.ok()) return size.error();
  if (size.value() > growing.reached || size.value() <= growing.old_end) return Nothing{};
  const std::uint64_t end = whole_end(file, size.value(), growing);
  return end < size.value() ? file.resize(end) : Nothing{};
}

}  // namespace

std::optional<Growth> Growth::begin(std::shared_ptr<OpenFile> file, std::vector<Range> ranges) {
  std::uint64_t reached = 0;
  for (const Range& range : ranges) reached = std::max(reached, range.end);
  const std::lock_guard lock(registry().mutex);
  struct statx facts{};
  if (!file->look_at(STATX_SIZE | STATX_INO, &facts)) return std::nullopt;
  const Inode inode{(std::uint64_t{facts.stx_dev_major} << 32) | facts.stx_dev_minor,
                    facts.stx_ino};
  auto found = registry().growing.find(inode);
  const std::uint64_t old_end =
      found != registry().growing.end() ? found->second.old_end : facts.stx_size;
  if (reached <= old_end) return std::nullopt;
  if (found == registry().growing.end()) {
    found = registry().growing.emplace(inode, Growing{}).first;
    found->second.old_end = old_end;
  }
  Growing& growing = found->second;
  growing.ranges += ranges.size();
  growing.failed.reserve(growing.ranges);
  growing.reached = std::max(growing.reached, reached);
  ++growing.pending;
  return Growth(std::move(file), std::move(ranges), old_end, inode);
}

Growth::~Growth() {
  if (file_ != nullptr) (void)cut_back();
}

void Growth::keep() noexcept { (void)end(Outcome::kept); }

Status Growth::cut_back() noexcept { return end(Outcome::failed); }

Status Growth::end(Outcome outcome) noexcept {
  const std::shared_ptr<OpenFile> file = std::move(file_);
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().growing.find(inode_);
  if (generation_ != os::fork_generation() || found == registry().growing.end()) return Nothing{};
  Growing& growing = found->second;
  if (outcome == Outcome::failed) {
    growing.failed.insert(growing.failed.end(), ranges_.begin(), ranges_.end());
  }
  if (--growing.pending > 0) return Nothing{};
  Growing ended = std::move(growing);
  registry().growing.erase(found);
  return ended.failed.empty() ? Nothing{} : cut(*file, ended);
}

}  // namespace tensorferry::files
