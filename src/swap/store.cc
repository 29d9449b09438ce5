#include "swap/store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/alignment.h"

namespace tensorferry::swap {

namespace {

// Files grow in large steps, so that they consist of few extents of the file system.
constexpr std::uint64_t growth_bytes_max = 256 * MiB;

// After how many bytes of tensors the store looks again how fast the drives are.
constexpr std::uint64_t learning_bytes = 16 * MiB;

// How often a signal may interrupt the growth of a file.
constexpr int interrupts_max = 100;

// A path that stays true when the program changes its directory.
std::string anchored(const std::string& given) {
  if (given.starts_with('/') || given.find('\0') != std::string::npos) return given;
  std::string real = os::real_path(given);
  return real.empty() ? given : real;  // whoever opens it says why
}

}  // namespace

Allocation::~Allocation() {
  if (store_ != nullptr) store_->give_back(extents_);
}

AttachedFiles::~AttachedFiles() { store->detach(numbers); }

std::uint64_t Allocation::bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const auto& [drive, extent] : extents_) bytes += extent.bytes;
  return bytes;
}

std::vector<Allocation::FileRange> Allocation::ranges(std::uint64_t offset,
                                                      std::uint64_t bytes) const {
  std::vector<FileRange> found;
  std::uint64_t begin = 0;  // of the extent, in the tensor
  const std::uint64_t end = offset + bytes;
  for (const auto& [drive, extent] : extents_) {
    const std::uint64_t from = std::max(offset, begin);
    const std::uint64_t to = std::min(end, begin + extent.bytes);
    if (from < to) {
      const File& file = attached_ != nullptr ? attached_->files[drive] : store_->file(drive);
      found.push_back({file, extent.offset + (from - begin), from, to - from});
    }
    begin += extent.bytes;
  }
  return found;
}

Result<std::shared_ptr<Store>> Store::make(os::System& system,
                                           const std::vector<std::string>& directories,
                                           const std::string& run, unsigned rank,
                                           DeviceUses device_uses) {
  std::shared_ptr<Store> store(new Store(system, directories.size(), std::move(device_uses)),
                               os::DeleteOwn{});
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
  store->shares_.set_speeds(store->speeds_.assumed());
  return store;
}

Status Store::add_drive(const std::string& given, const std::string& run, unsigned rank) {
  auto directory = RunDirectory::make(system_, anchored(given), run, rank);
  if (!directory.ok()) return directory.error();
  const Result<int> made = directory.value()->make_file();
  if (!made.ok()) return made.error();
  auto file = files::OpenFile::borrow(system_, made.value());
  system_.close(made.value());
  if (!file.ok()) return file.error();
  speeds_.add(file.value()->device());
  paths_.push_back(directory.value()->path());
  const auto& notes = directory.value()->notes();
  notes_.insert(notes_.end(), notes.begin(), notes.end());
  drives_.push_back(
      {os::real_path(given), std::move(directory.value()), File(std::move(file.value())), {}});
  return Nothing{};
}

// Allocates the space on the drive now, so that a full drive fails here and not at a write.
int Store::grow(Drive& drive, std::uint64_t bytes) {
  return extend(drive, bytes - std::min(bytes, drive.free.free_tail_bytes()));
}

int Store::extend(Drive& drive, std::uint64_t lacking) {
  const std::uint64_t total = drive.free.total_bytes();
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
  const bool enough = free_bytes() >= bytes;  // on all drives together
  for (std::size_t drive = 0; drive < drives_.size(); ++drive) {
    // Takes the last space of the drive: a half, a quarter and so on of what is needed.
    for (std::uint64_t more = bytes - found; enough && more >= stripe_bytes_min;
         more = align_down(more / 2, page_bytes())) {
      if (grow(drives_[drive], more) == 0) break;
    }
    while (found < bytes) {
      const auto extent = drives_[drive].free.take_some(bytes - found);
      if (!extent) break;
      taken.push_back({drive, *extent});
      found += extent->bytes;
    }
  }
  return found;
}

std::vector<std::size_t> Store::drives_in_turn() {
  std::vector<std::size_t> turn(drives_.size());
  std::iota(turn.begin(), turn.end(), std::size_t{0});
  std::ranges::rotate(turn, turn.begin() + static_cast<std::ptrdiff_t>(next_));
  next_ = (next_ + 1) % drives_.size();
  return turn;
}

Result<std::shared_ptr<Allocation>> Store::take(std::uint64_t bytes) {
  learn_after(bytes);
  std::vector<DriveExtent> taken;
  const std::lock_guard lock(mutex_);
  if (bytes > bytes_max) return beyond_any_file(bytes);
  const std::uint64_t needed = align_up(bytes, page_bytes());
  std::uint64_t found = 0;
  // What the full drives leave goes to the others.
  for (auto drives = drives_in_turn(); found < needed && !drives.empty();) {
    for (const auto& [drive, share] : shares_.cut(needed - found, drives)) {
      const std::uint64_t got = take_whole(drive, share, taken);
      if (got == 0) std::erase(drives, drive);
      found += got;
    }
  }
  if (found < needed) found += take_fragments(needed - found, taken);
  if (found < needed) {
    for (const auto& [drive, extent] : taken) drives_[drive].free.give_back(extent);
    return no_space(needed);
  }
  return std::make_shared<Allocation>(shared_from_this(), std::move(taken));
}

void Store::learn_after(std::uint64_t bytes) {
  if (drives_.size() < 2) return;
  {
    const std::lock_guard lock(mutex_);
    unlearned_bytes_ += std::min(bytes, learning_bytes);
    if (unlearned_bytes_ < learning_bytes) return;
    unlearned_bytes_ = 0;
  }
  learn();
}

void Store::learn() {
  if (!device_uses_) return;
  const std::vector<handle::DeviceUse> uses = device_uses_();  // the handle has locks of its own
  const std::lock_guard lock(mutex_);
  speeds_.learn(uses);
  shares_.set_speeds(speeds_.assumed());
}

std::uint64_t Store::free_bytes() const {
  std::uint64_t bytes = 0;
  for (const Drive& drive : drives_) {
    bytes += drive.free.free_bytes() + drive.file.opened()->free_bytes();
  }
  return bytes;
}

Error Store::no_space(std::uint64_t needed_bytes) const {
  const bool full = growth_error_ == ENOSPC || growth_error_ == EDQUOT || growth_error_ == EFBIG;
  return Error({.operation = "swap out",
                .path = drives_.front().file.path(),
                .length = needed_bytes,
                .code = full ? ENOSPC : growth_error_,
                .hint = "needed " + std::to_string(needed_bytes) + " bytes, free " +
                        std::to_string(free_bytes()) +
                        (full ? "; tensors that are swapped out can still be read; free space or "
                                "add a directory on another drive"
                              : "; the file could not grow; check the drive")});
}

Error Store::beyond_any_file(std::uint64_t bytes) {
  growth_error_ = EFBIG;
  return no_space(bytes);
}

std::uint64_t Store::reserved_share(std::size_t drive, std::uint64_t bytes) const {
  const double share = std::ceil(static_cast<double>(bytes) * shares_.part(drive));
  return align_up(static_cast<std::uint64_t>(share), page_bytes());
}

int Store::reserve_on(Drive& drive, std::uint64_t bytes) {
  return drive.free.free_tail_bytes() >= bytes ? 0 : grow(drive, bytes);
}

Status Store::reserve(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > bytes_max) return beyond_any_file(bytes);
  std::uint64_t lacking = 0;       // on full drives
  std::vector<std::size_t> roomy;  // the others, of which one takes it
  for (std::size_t i = 0; i < drives_.size(); ++i) {
    const std::uint64_t share = reserved_share(i, bytes);
    if (reserve_on(drives_[i], share) == 0) {
      roomy.push_back(i);
    } else {
      lacking += share;
    }
  }
  const bool all_reserved =
      lacking == 0 || std::ranges::any_of(roomy, [&](std::size_t i) {
        return reserve_on(drives_[i], reserved_share(i, bytes) + lacking) == 0;
      });
  if (!all_reserved) return no_space(bytes);
  return Nothing{};
}

// Extents that tensors leave have the sizes of others to come, so that pieces do.
Status Store::make_room(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > bytes_max) return beyond_any_file(bytes);
  std::uint64_t lacking = 0;  // on full drives
  for (std::size_t i = 0; i < drives_.size(); ++i) {
    const std::uint64_t share = reserved_share(i, bytes);
    const std::uint64_t here = drives_[i].free.free_bytes();
    if (here < share && extend(drives_[i], share - here) != 0) lacking += share - here;
  }
  const bool all_made = lacking == 0 || std::ranges::any_of(drives_, [&](Drive& drive) {
                          return extend(drive, lacking) == 0;
                        });
  if (!all_made) return no_space(bytes);
  return Nothing{};
}

Result<std::shared_ptr<const AttachedFiles>> Store::attach(const std::vector<std::string>& paths) {
  auto attached = std::make_shared<AttachedFiles>(shared_from_this());
  for (const std::string& path : paths) {
    const int fd = system_.open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC, 0);
    if (fd < 0) {
      return Error({.operation = "open file of snapshot",
                    .path = path,
                    .code = -fd,
                    .hint = fd == -ENOENT ? "the file is missing; mount the drive that has it"
                                          : "check owner and mode"});
    }
    struct statx facts{};
    const int got = system_.statx(fd, STATX_TYPE | STATX_UID, &facts);
    auto file = files::OpenFile::borrow(system_, fd);
    const bool ours = got == 0 && S_ISREG(facts.stx_mode) && facts.stx_uid == ::geteuid();
    const std::size_t folder = path.rfind('/', path.rfind('/') - 1);
    if (ours && file.ok()) {
      const std::lock_guard lock(mutex_);
      const bool held = std::ranges::any_of(drives_, [&](Drive& drive) {
        return drive.directory != nullptr && drive.directory->hold(fd, held_);
      });
      // On another drive it gets no name of ours. The lock keeps others from freeing parts of it.
      if (!held) (void)system_.share_file(file.value()->main_fd());
      attached->numbers.push_back(held_++);
    }
    system_.close(fd);
    if (!ours) {
      return Error({.operation = "open file of snapshot",
                    .path = path,
                    .code = EPERM,
                    .hint = "it is not a file of this user; remove it and use another snapshot"});
    }
    if (!file.ok()) return file.error();
    attached->files.emplace_back(std::move(file.value()));
    attached->directories.push_back(path.substr(0, folder));
  }
  return std::shared_ptr<const AttachedFiles>(std::move(attached));
}

void Store::detach(const std::vector<std::size_t>& numbers) {
  if (generation_ != os::fork_generation()) return;
  const std::lock_guard lock(mutex_);
  for (const Drive& drive : drives_) {
    if (drive.directory == nullptr) continue;
    for (const std::size_t number : numbers) drive.directory->let_go(number);
  }
}

void Store::give_back(const std::vector<DriveExtent>& taken) {
  if (generation_ != os::fork_generation()) return;
  const std::lock_guard lock(mutex_);
  for (const auto& [drive, extent] : taken) drives_[drive].free.give_back(extent);
}

void Store::remove_directories() {
  const std::lock_guard lock(mutex_);
  for (Drive& drive : drives_) drive.directory.reset();
}

std::uint64_t Store::file_bytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t bytes = 0;
  for (const Drive& drive : drives_) bytes += drive.free.total_bytes();
  return bytes;
}

std::vector<SwapDrive> Store::drives() {
  learn();
  const std::lock_guard lock(mutex_);
  const std::vector<double> known = speeds_.known();
  std::vector<SwapDrive> drives;
  for (std::size_t i = 0; i < drives_.size(); ++i) {
    const FreeExtents& free = drives_[i].free;
    drives.push_back({.directory = paths_[i],
                      .stored_bytes = free.total_bytes() - free.free_bytes(),
                      .bytes_per_second = static_cast<std::uint64_t>(known[i]),
                      .share = shares_.part(i)});
  }
  return drives;
}

}  // namespace tensorferry::swap
