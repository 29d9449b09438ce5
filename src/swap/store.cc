#include "swap/store.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/alignment.h"

namespace tensorferry::swap {

namespace {

// A smaller part of a tensor is not worth another drive.
constexpr std::uint64_t stripe_bytes_min = MiB;

// Files grow in large steps, so that they consist of few extents of the file system.
constexpr std::uint64_t growth_bytes_max = 256 * MiB;

// How often a signal may interrupt the growth of a file.
constexpr int interrupts_max = 100;

}  // namespace

Allocation::~Allocation() { store_->give_back(extents_); }

std::vector<Allocation::FileRange> Allocation::ranges(std::uint64_t offset,
                                                      std::uint64_t bytes) const {
  std::vector<FileRange> found;
  std::uint64_t begin = 0;  // of the extent, in the tensor
  const std::uint64_t end = offset + bytes;
  for (const auto& [drive, extent] : extents_) {
    const std::uint64_t from = std::max(offset, begin);
    const std::uint64_t to = std::min(end, begin + extent.bytes);
    if (from < to) {
      found.push_back({store_->file(drive), extent.offset + (from - begin), from, to - from});
    }
    begin += extent.bytes;
  }
  return found;
}

Result<std::shared_ptr<Store>> Store::make(os::System& system,
                                           const std::vector<std::string>& directories,
                                           const std::string& run, unsigned rank) {
  std::shared_ptr<Store> store(new Store(system), os::DeleteOwn{});
  if (directories.empty()) {
    return Error({.operation = "open swap space",
                  .code = EINVAL,
                  .hint = "name at least one directory on the drive to swap to"});
  }
  for (const std::string& directory : directories) {
    if (const Status added = store->add_drive(directory, run, rank); !added.ok()) {
      return added.error();
    }
  }
  return store;
}

Status Store::add_drive(const std::string& given, const std::string& run, unsigned rank) {
  auto directory = RunDirectory::make(system_, given, run, rank);
  if (!directory.ok()) return directory.error();
  const Result<int> made = directory.value()->make_file();
  if (!made.ok()) return made.error();
  auto file = files::OpenFile::borrow(system_, made.value());
  system_.close(made.value());
  if (!file.ok()) return file.error();
  paths_.push_back(directory.value()->path());
  const auto& notes = directory.value()->notes();
  notes_.insert(notes_.end(), notes.begin(), notes.end());
  drives_.push_back({std::move(directory.value()), File(std::move(file.value())), {}});
  return Nothing{};
}

// Allocates the space on the drive now, so that a full drive fails here and not at a write.
int Store::grow(Drive& drive, std::uint64_t bytes) {
  const std::uint64_t total = drive.free.total_bytes();
  const std::uint64_t lacking = bytes - std::min(bytes, drive.free.free_tail_bytes());
  if (lacking > bytes_max - total) {
    growth_error_ = EFBIG;
    return -growth_error_;
  }
  const std::uint64_t step = std::clamp(total / 4, 16 * MiB, growth_bytes_max);
  for (const std::uint64_t more : {std::max(lacking, align_up(step, page_bytes())), lacking}) {
    const int fd = drive.file.opened()->main_fd();
    int grown = system_.fallocate(fd, 0, total, more);
    for (int again = 0; grown == -EINTR && again < interrupts_max; ++again) {  // tmpfs
      grown = system_.fallocate(fd, 0, total, more);
    }
    if (grown == -EOPNOTSUPP) grown = system_.truncate(fd, total + more);
    if (grown >= 0) {
      drive.free.grow(more);
      return 0;
    }
    growth_error_ = -grown;
    (void)system_.truncate(fd, total);  // gives back what it allocated before it failed
  }
  return -growth_error_;
}

std::uint64_t Store::take_whole(std::size_t index, std::uint64_t bytes,
                                std::vector<DriveExtent>& taken) {
  Drive& drive = drives_[index];
  auto offset = drive.free.take(bytes);
  if (!offset && grow(drive, bytes) == 0) offset = drive.free.take(bytes);
  if (!offset) return 0;
  taken.push_back({index, {*offset, bytes}});
  return bytes;
}

std::uint64_t Store::take_fragments(std::uint64_t bytes, std::vector<DriveExtent>& taken) {
  std::uint64_t found = 0;
  for (std::size_t drive = 0; drive < drives_.size(); ++drive) {
    while (found < bytes) {
      const auto extent = drives_[drive].free.take_some(bytes - found);
      if (!extent) break;
      taken.push_back({drive, *extent});
      found += extent->bytes;
    }
  }
  return found;
}

Result<std::shared_ptr<Allocation>> Store::take(std::uint64_t bytes) {
  std::vector<DriveExtent> taken;
  const std::lock_guard lock(mutex_);
  if (bytes > bytes_max) return beyond_any_file(bytes);
  const std::uint64_t needed = align_up(bytes, page_bytes());
  const std::size_t count = drives_.size();
  const std::uint64_t stripe = align_up(
      std::max((needed + count - 1) / count, std::min(needed, stripe_bytes_min)), page_bytes());
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < count && found < needed; ++i) {
    found += take_whole((next_ + i) % count, std::min(stripe, needed - found), taken);
  }
  for (std::size_t i = 0; i < count && found < needed; ++i) {  // a drive is full
    found += take_whole((next_ + i) % count, needed - found, taken);
  }
  if (found < needed) found += take_fragments(needed - found, taken);
  next_ = (next_ + 1) % count;
  if (found < needed) {
    for (const auto& [drive, extent] : taken) drives_[drive].free.give_back(extent);
    return no_space(needed);
  }
  return std::make_shared<Allocation>(shared_from_this(), std::move(taken));
}

Error Store::no_space(std::uint64_t needed_bytes) const {
  const bool full = growth_error_ == ENOSPC || growth_error_ == EDQUOT || growth_error_ == EFBIG;
  std::uint64_t free_bytes = 0;
  for (const Drive& drive : drives_) {
    free_bytes += drive.free.free_bytes() + drive.file.opened()->free_bytes();
  }
  return Error({.operation = "swap out",
                .path = drives_.front().file.path(),
                .length = needed_bytes,
                .code = full ? ENOSPC : growth_error_,
                .hint = "needed " + std::to_string(needed_bytes) + " bytes, free " +
                        std::to_string(free_bytes) +
                        (full ? "; tensors that are swapped out can still be read; free space or "
                                "add a directory on another drive"
                              : "; the file could not grow; check the drive")});
}

Error Store::beyond_any_file(std::uint64_t bytes) {
  growth_error_ = EFBIG;
  return no_space(bytes);
}

Status Store::reserve(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > bytes_max) return beyond_any_file(bytes);
  const std::uint64_t share = align_up((bytes + drives_.size() - 1) / drives_.size(), page_bytes());
  for (Drive& drive : drives_) {
    if (drive.free.free_tail_bytes() < share && grow(drive, share) < 0) return no_space(bytes);
  }
  return Nothing{};
}

void Store::give_back(const std::vector<DriveExtent>& taken) {
  if (generation_ != os::fork_generation()) return;
  const std::lock_guard lock(mutex_);
  for (const auto& [drive, extent] : taken) drives_[drive].free.give_back(extent);
}

void Store::remove_directories() {
  for (Drive& drive : drives_) drive.directory.reset();
}

std::uint64_t Store::file_bytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t bytes = 0;
  for (const Drive& drive : drives_) bytes += drive.free.total_bytes();
  return bytes;
}

}  // namespace tensorferry::swap
