// The snapshots of a swap space. Versions that a snapshot names are held, so that their extents are
// not used again; names of the files outside of the run's directory make them outlive the run.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "base/alignment.h"
#include "swap/space.h"

namespace tensorferry::swap {

namespace {

Error refused(const std::string& name, int code, std::string hint) {
  return Error({.operation = "snapshot",
                .code = code,
                .hint = "snapshot '" + name + "': " + std::move(hint)});
}

void check_name(const std::string& name) {
  constexpr std::size_t longest = 200;
  const bool plain = std::ranges::all_of(name, [](char letter) {
    return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
           (letter >= '0' && letter <= '9') || letter == '-' || letter == '_' || letter == '.';
  });
  if (plain && !name.empty() && name.size() <= longest) return;
  throw refused(name, EINVAL, "the name may have letters, digits, '-', '_' and '.', at most 200");
}

// The sizes of files of a snapshot.
std::vector<std::uint64_t> sizes_of(const AttachedFiles& attached) {
  std::vector<std::uint64_t> sizes;
  for (const File& file : attached.files) sizes.push_back(file.size());
  return sizes;
}

// Extents of a tensor, which nobody has checked yet.
std::vector<DriveExtent> checked(const SwapSnapshot& snapshot, const SwapSnapshot::Tensor& tensor,
                                 const std::vector<std::uint64_t>& sizes) {
  std::vector<DriveExtent> extents;
  std::uint64_t bytes = 0;
  for (const auto& [file, offset, length] : tensor.extents) {
    const bool whole = offset % page_bytes() == 0 && length % page_bytes() == 0 && length > 0;
    if (!whole || file >= sizes.size() || offset > sizes[file] || length > sizes[file] - offset ||
        length > std::numeric_limits<std::uint64_t>::max() - bytes) {
      throw refused(snapshot.name, EINVAL,
                    "tensor '" + tensor.key +
                        "' lies outside of its files, which have been cut "
                        "or are others; use another snapshot");
    }
    extents.push_back({static_cast<std::size_t>(file), {offset, length}});
    bytes += length;
  }
  if (bytes < tensor.bytes || bytes - tensor.bytes >= page_bytes()) {
    throw refused(snapshot.name, EINVAL,
                  "tensor '" + tensor.key + "' does not fit its extents; use another snapshot");
  }
  return extents;
}

}  // namespace

std::uint64_t Space::pinned_more(const Versions& versions,
                                 std::span<const std::string> replaced) const {
  const std::lock_guard lock(mutex_);
  std::set<const Allocation*> kept;  // whatever happens to the replaced ones
  for (const auto& [name, own] : snapshots_) {
    if (std::ranges::find(replaced, name) != replaced.end()) continue;
    for (const auto& version : own) kept.insert(version->allocation.get());
  }
  std::uint64_t more = 0;
  std::set<const Allocation*> current;
  for (const auto& version : versions) {
    const Allocation* const own = version->allocation.get();
    if (own->attached() == nullptr && current.insert(own).second && !kept.contains(own)) {
      more += own->bytes();
    }
  }
  std::uint64_t freed = 0;
  for (const std::string& name : replaced) {
    const auto found = snapshots_.find(name);
    if (found == snapshots_.end()) continue;
    for (const auto& version : found->second) {
      const Allocation* const own = version->allocation.get();
      if (own->attached() == nullptr && !kept.contains(own) && current.insert(own).second) {
        freed += own->bytes();
      }
    }
  }
  return more - std::min(more, freed);
}

SwapSnapshot Space::describe(const std::string& name, std::span<const std::string> keys,
                             const Versions& versions, SnapshotLinks& links) const {
  SwapSnapshot made{.name = name, .files = {}, .tensors = {}};
  std::map<const files::OpenFile*, std::uint64_t> numbers;
  for (std::size_t i = 0; i < versions.size(); ++i) {
    const Version& version = *versions[i];
    SwapSnapshot::Tensor tensor{keys[i], version.bytes, {}, version.checksum};
    const auto& attached = version.allocation->attached();
    for (const auto& [drive, extent] : version.allocation->extents()) {
      const File& file = attached != nullptr ? attached->files[drive] : store_->file(drive);
      const auto [known, is_new] = numbers.try_emplace(file.opened().get(), numbers.size());
      if (is_new) {
        links
            .add(file.opened()->main_fd(),
                 attached != nullptr ? attached->directories[drive] : store_->given(drive),
                 name + "." + std::to_string(known->second))
            .or_throw();
      }
      tensor.extents.push_back({known->second, extent.offset, extent.bytes});
    }
    made.tensors.push_back(std::move(tensor));
  }
  return made;
}

SwapSnapshot Space::snapshot(const std::string& name, std::span<const std::string> keys,
                             std::span<const std::string> replaced) {
  check_generation();
  check_name(name);
  Versions versions;
  for (const std::string& key : keys) versions.push_back(settled(key, "snapshot"));
  {
    const std::lock_guard lock(mutex_);
    if (snapshots_.contains(name)) throw refused(name, EEXIST, "this space has taken one already");
  }
  store_->make_room(pinned_more(versions, replaced)).or_throw();

  // The drives sync while the names are made.
  std::vector<Operation> syncs;
  std::set<std::size_t> used;
  for (const auto& version : versions) {
    if (version->allocation->attached() != nullptr) continue;  // they are durable
    for (const auto& [drive, extent] : version->allocation->extents()) {
      if (used.insert(drive).second) syncs.push_back(handle_.sync(store_->file(drive)));
    }
  }
  SnapshotLinks links(store_->system());
  SwapSnapshot made = describe(name, keys, versions, links);
  links.sync().or_throw();
  for (const Operation& sync : syncs) sync.wait();
  const std::lock_guard lock(mutex_);
  snapshots_.emplace(name, std::move(versions));
  made.files = links.keep();
  return made;
}

bool Space::drop_snapshot(const std::string& name) {
  check_generation();
  Versions gone;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  const auto found = snapshots_.find(name);
  if (found == snapshots_.end()) return false;
  gone = std::move(found->second);
  snapshots_.erase(found);
  return true;
}

std::vector<std::string> Space::snapshots() const {
  check_generation();
  std::vector<std::string> names;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, versions] : snapshots_) names.push_back(name);
  return names;
}

void Space::attach(const SwapSnapshot& snapshot) {
  check_generation();
  const std::shared_ptr<const AttachedFiles> attached = store_->attach(snapshot.files).or_throw();
  const std::vector<std::uint64_t> sizes = sizes_of(*attached);
  Versions versions;
  for (const SwapSnapshot::Tensor& tensor : snapshot.tensors) {
    auto version = std::make_shared<Version>();
    version->allocation = std::make_shared<Allocation>(attached, checked(snapshot, tensor, sizes));
    version->bytes = tensor.bytes;
    version->pending = false;
    version->checksum = tensor.checksum;
    version->unread = tensor.checksum.has_value();
    versions.push_back(std::move(version));
  }
  std::vector<Entry> gone;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < versions.size(); ++i) {
    Entry& entry = entries_[snapshot.tensors[i].key];
    Entry& old = gone.emplace_back();
    old.prefetched = take_prefetched(entry);
    // Writes that are under way find their version, and change nothing.
    old.versions = std::exchange(entry.versions, {});
    std::ranges::copy_if(old.versions, std::back_inserter(entry.versions),
                         [](const auto& version) { return version->pending; });
    entry.versions.push_back(std::move(versions[i]));
  }
}

}  // namespace tensorferry::swap

namespace tensorferry {

bool trim_snapshot_file(const std::string& path, std::span<const SwapSnapshot::Extent> kept,
                        std::uint64_t names) {
  os::System& system = os::System::real();
  const int fd = system.open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0);
  if (fd < 0) {
    throw Error({.operation = "open file of snapshot",
                 .path = path,
                 .code = -fd,
                 .hint = "check that the drive is mounted"});
  }
  struct statx facts{};
  bool freed = system.lock_file(fd) == 0 &&
               system.statx(fd, STATX_NLINK | STATX_SIZE, &facts) == 0 && facts.stx_nlink == names;
  std::vector<SwapSnapshot::Extent> sorted(kept.begin(), kept.end());
  std::ranges::sort(sorted, {}, &SwapSnapshot::Extent::offset);
  sorted.push_back({0, facts.stx_size, 0});
  std::uint64_t from = 0;
  for (const auto& [file, offset, bytes] : sorted) {
    if (freed && offset > from) {
      freed = system.fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from,
                               offset - from) == 0;
    }
    from = std::max(from, offset + bytes);
  }
  system.close(fd);
  return freed;
}

}  // namespace tensorferry
