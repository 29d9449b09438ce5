#include "files/open_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "base/alignment.h"
#include "base/errno_name.h"
#include "tensorferry/error.h"

namespace tensorferry::files {

namespace {

// Smaller writes past the end are not worth two more system calls.
constexpr std::uint64_t reserve_bytes_min = MiB;

// The smallest slot does not hold larger blocks.
constexpr std::size_t offset_alignment_max = 64 * KiB;

// How long we wait for another program to release its lease on a file; the kernel breaks the lease
// after 45 s.
constexpr std::chrono::seconds lease_wait_max{60};

std::string hint_for(int code, bool writing) {
  switch (code) {
    case ENOENT:
      return writing ? "the directory does not exist; make it first"
                     : "no such file; check the path";
    case EACCES:
      return writing ? "no permission to write here; check owner and mode"
                     : "no permission to read the file; check owner and mode";
    case EPERM:
      return "not permitted; the file may be immutable or append-only (see lsattr)";
    case ENXIO:
      return "a FIFO, a socket or a device without a driver; give a regular file or a block device";
    case EWOULDBLOCK:
      return "another program holds a lease on the file and does not release it; try again later";
    case EISDIR:
      return "this is a directory; give the path of a file in it";
    case EROFS:
      return "the file system is mounted read-only; remount it or give another path";
    case EMFILE:
    case ENFILE:
      return "out of file descriptors; raise ulimit -n or close files";
    case ELOOP:
      return "too many symbolic links in the path";
    case ENAMETOOLONG:
      return "the path or one of its parts is too long";
    case ENOTDIR:
      return "a part of the path is not a directory";
    case ETXTBSY:
      return "the file is a program that is running";
    default:
      return {};
  }
}

// Whether another attempt to open the file would fail too.
bool refused_for_good(int code) noexcept {
  return code == EACCES || code == EPERM || code == ENOENT;
}

// Whether the mode of the file is the cause; else /proc is missing.
bool forbidden(int code) noexcept { return code == EACCES || code == EPERM; }

std::string why_not_twice(int code) {
  return forbidden(code) ? "the mode of the file forbids opening it a second time"
                         : "without /proc the file cannot be opened a second time";
}

std::string why_demoted(int code) {
  return why_not_twice(code) + ", so writes of partial blocks end its use of O_DIRECT";
}

// Never destroyed: files refer to them. Made when the library is loaded: made at first use, a
// forked child might wait for ever for another thread that was making them.
const std::string& demoted_by_mode = *new std::string(why_demoted(EACCES));
const std::string& demoted_without_proc = *new std::string(why_demoted(ENOENT));

}  // namespace

OpenFile::OpenFile(os::System& system, std::string path, int open_flags)
    : system_(system),
      path_(std::make_shared<const std::string>(std::move(path))),
      open_flags_(open_flags) {}

OpenFile::~OpenFile() {
  const int buffered = buffered_fd_.load(std::memory_order_acquire);
  if (direct_fd_ >= 0) system_.close(direct_fd_);
  if (buffered >= 0 && buffered != direct_fd_) system_.close(buffered);
}

Error OpenFile::failure(const char* operation, int code) const {
  return Error(
      {.operation = operation, .path = path(), .code = code, .hint = hint_for(code, writable())});
}

Error OpenFile::wrong_kind(unsigned mode) const {
  if (S_ISDIR(mode)) return failure("open", EISDIR);
  return Error({.operation = "open",
                .path = path(),
                .code = EINVAL,
                .hint = "neither a regular file nor a block device; give one of these"});
}

bool OpenFile::readable() const noexcept { return open_flags_ != O_WRONLY; }
bool OpenFile::writable() const noexcept { return open_flags_ != O_RDONLY; }

Result<std::shared_ptr<OpenFile>> OpenFile::open(os::System& system, const std::string& path,
                                                 Access access, unsigned permissions) {
  const int flags = access == Access::read ? O_RDONLY : access == Access::write ? O_WRONLY : O_RDWR;
  std::shared_ptr<OpenFile> file(new OpenFile(system, path, flags));
  if (path.find('\0') != std::string::npos) {
    return Error({.operation = "open",
                  .path = path,
                  .code = EINVAL,
                  .hint = "the path holds a NUL character"});
  }

  // Opening a device may have effects, so look at the kind of the file first.
  struct statx facts{};
  if (system.stat_path(path.c_str(), STATX_TYPE, &facts) == 0 && !S_ISREG(facts.stx_mode) &&
      !S_ISBLK(facts.stx_mode)) {
    return file->wrong_kind(facts.stx_mode);
  }
  const int common = flags | O_CLOEXEC | (flags == O_RDONLY ? 0 : O_CREAT);
  int fd = file->open_path(common | O_DIRECT, permissions);
  const bool direct = fd >= 0;
  if (fd == -EINVAL) {
    file->direct_reason_ = "the file system refuses O_DIRECT";
    fd = file->open_path(common, permissions);
  }
  if (fd < 0) return file->failure("open", -fd);
  file->own_flags_ = true;
  if (const Status adopted = file->adopt(fd, direct); !adopted.ok()) return adopted.error();
  // Removes O_NONBLOCK: with it io_uring fails requests instead of waiting.
  const int waits = system.set_flags(fd, file->direct() ? O_DIRECT : 0);
  if (waits < 0) return file->failure("fcntl", -waits);
  return file;
}

// Opens the path with O_NONBLOCK: somebody may have put a FIFO there meanwhile, which would wait
// for its other end for ever. Waits only for a lease, which file servers hold.
int OpenFile::open_path(int flags, unsigned permissions) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + lease_wait_max;
  for (;;) {
    const int fd = system_.open(path().c_str(), flags | O_NONBLOCK | O_NOCTTY, permissions);
    if (fd != -EWOULDBLOCK || Clock::now() > deadline) return fd;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Result<std::shared_ptr<OpenFile>> OpenFile::borrow(os::System& system, int descriptor) {
  std::string path = os::read_link("/proc/self/fd/" + std::to_string(descriptor));
  if (!path.starts_with('/')) path = "descriptor " + std::to_string(descriptor);
  const int flags = system.flags(descriptor);
  std::shared_ptr<OpenFile> file(
      new OpenFile(system, std::move(path), flags < 0 ? O_RDONLY : flags & O_ACCMODE));
  const auto refuse = [&file](int code, const char* hint) {
    return Error({.operation = "use descriptor", .path = file->path(), .code = code, .hint = hint});
  };
  if (flags < 0) return refuse(-flags, "the descriptor is not open");
  if ((flags & O_APPEND) != 0) {
    return refuse(EINVAL,
                  "the descriptor has O_APPEND, which ignores offsets; open the file without it");
  }
  if ((flags & O_PATH) != 0) {
    return refuse(EBADF,
                  "the descriptor has O_PATH and cannot move bytes; open the file without it");
  }

  const int fd = system.duplicate(descriptor);
  if (fd < 0) return file->failure("duplicate descriptor", -fd);
  const bool direct = (flags & O_DIRECT) != 0;
  if (const Status adopted = file->adopt(fd, direct); !adopted.ok()) return adopted.error();
  if ((flags & O_NONBLOCK) != 0 && file->main_fd() == fd) {
    // With O_NONBLOCK io_uring fails requests instead of waiting, and only the caller may clear it.
    const Result<int> waits = file->reopen(flags & O_DIRECT);
    if (!waits.ok()) {
      return refuse(waits.error().code(),
                    "the descriptor has O_NONBLOCK, and the file cannot be opened a second time; "
                    "open it without O_NONBLOCK");
    }
    file->set(direct, waits.value());
    file->own_flags_ = direct;
    system.close(fd);
  }
  if (!direct && file->direct_reason_.empty()) {
    // The caller's descriptor is buffered; large transfers need a direct one.
    if (Result<int> reopened = file->reopen(O_DIRECT); reopened.ok()) {
      struct statx facts{};
      if (system.statx(reopened.value(), STATX_DIOALIGN, &facts) == 0) {
        file->direct_fd_ = reopened.value();
        file->own_flags_ = true;
        if (Status learned = file->learn_alignment(facts); !learned.ok()) return learned.error();
      } else {
        system.close(reopened.value());
        file->direct_reason_ = "the system does not report the alignment that O_DIRECT needs";
      }
    } else {
      file->direct_reason_ = "the file could not be opened a second time with O_DIRECT (" +
                             errno_name(reopened.error().code()) + "): " + reopened.error().hint();
    }
  }
  return file;
}

void OpenFile::set(bool direct, int fd) noexcept {
  if (direct) {
    direct_fd_ = fd;
  } else {
    buffered_fd_ = fd;
  }
}

// Takes ownership of an open descriptor and examines it.
Status OpenFile::adopt(int fd, bool direct) {
  set(direct, fd);
  struct statx facts{};
  const unsigned mask = STATX_TYPE | STATX_INO | STATX_DIOALIGN;
  if (const int got = system_.statx(fd, mask, &facts); got < 0) return failure("statx", -got);
  if (!S_ISREG(facts.stx_mode) && !S_ISBLK(facts.stx_mode)) return wrong_kind(facts.stx_mode);
  regular_ = S_ISREG(facts.stx_mode);
  identity_ = identity_of(facts);
  device_ = regular_ ? &device_of(facts.stx_dev_major, facts.stx_dev_minor)
                     : &device_of(facts.stx_rdev_major, facts.stx_rdev_minor);
  return direct ? learn_alignment(facts) : Nothing{};
}

// Learns the alignment that the direct descriptor needs, or that the file is not really direct.
Status OpenFile::learn_alignment(const struct statx& facts) {
  std::size_t memory_alignment = facts.stx_dio_mem_align;
  std::size_t offset_alignment = facts.stx_dio_offset_align;
  if ((facts.stx_mask & STATX_DIOALIGN) == 0) {
    struct statfs holder{};
    if (system_.statfs(direct_fd_, &holder) == 0 &&
        (holder.f_type == TMPFS_MAGIC || holder.f_type == RAMFS_MAGIC)) {
      direct_reason_ = "the file system is in memory";
    }
    memory_alignment = offset_alignment =
        device_->logical_block_bytes > 0 ? device_->logical_block_bytes : page_bytes();
  } else if (offset_alignment == 0) {
    direct_reason_ = "the file system does not support O_DIRECT on this file";
  } else if (offset_alignment > offset_alignment_max) {
    direct_reason_ = "O_DIRECT needs blocks of " + std::to_string(offset_alignment) + " bytes here";
  }
  if (!direct_reason_.empty()) {
    if (buffered_fd_ < 0 && own_flags_) {
      buffered_fd_ = std::exchange(direct_fd_, -1);  // open() removes O_DIRECT from it
      return Nothing{};
    }
    if (const Result<int> buffered = buffered_fd(); !buffered.ok()) return buffered.error();
    system_.close(std::exchange(direct_fd_, -1));
    return Nothing{};
  }
  memory_alignment_ = std::bit_ceil(std::max<std::size_t>(memory_alignment, 1));
  offset_alignment_ = std::bit_ceil(std::max<std::size_t>(offset_alignment, 1));
  return Nothing{};
}

// Opens the same file once more, even if it has been renamed or deleted.
Result<int> OpenFile::reopen(int extra_flags) {
  const std::string link = "/proc/self/fd/" + std::to_string(main_fd());
  const int flags = open_flags_ | O_CLOEXEC | extra_flags;
  const int fd = system_.open(link.c_str(), flags, 0);
  if (fd == -ENOENT || fd == -ENOTDIR) return reopen_by_path(flags);
  if (fd < 0) return failure("open a second time", -fd);
  return fd;
}

// Without /proc: by the path, if the file is still there.
Result<int> OpenFile::reopen_by_path(int flags) {
  struct statx mine{};
  struct statx facts{};
  if (const int got = system_.statx(main_fd(), STATX_INO, &mine); got < 0) {
    return failure("statx", -got);
  }
  const auto is_mine = [&](int got) { return got >= 0 && identity_of(facts) == identity_of(mine); };
  if (is_mine(system_.stat_path(path().c_str(), STATX_INO, &facts))) {
    const int fd = open_path(flags, 0);
    if (fd < 0) return failure("open a second time", -fd);
    if (is_mine(system_.statx(fd, STATX_INO, &facts)) &&
        system_.set_flags(fd, flags & O_DIRECT) >= 0) {
      return fd;
    }
    system_.close(fd);
  }
  return Error({.operation = "open a second time",
                .path = path(),
                .code = ENOENT,
                .hint = "/proc is not mounted, and the file has left this path; mount /proc"});
}

// If several threads open it at once, the first descriptor counts.
Result<int> OpenFile::buffered_fd() {
  const int known = buffered_fd_.load(std::memory_order_acquire);
  if (known >= 0) return known;
  Result<int> opened = reopen(0);
  int first = -1;
  if (opened.ok()) {
    if (buffered_fd_.compare_exchange_strong(first, opened.value())) return opened;
    system_.close(opened.value());
    return first;
  }
  first = buffered_fd_.load(std::memory_order_acquire);
  return first >= 0 ? Result<int>(first) : demote(opened.error());
}

// Nobody else uses this open file, unless this process has forked. Requests in flight end as they
// began; later ones go through the page cache, whole blocks and partial ones alike.
Result<int> OpenFile::demote(const Error& refusal) {
  const int code = refusal.code();
  if (!refused_for_good(code)) return refusal;
  if (!own_flags_) {
    return Error({.operation = "open a second time",
                  .path = path(),
                  .code = code,
                  .hint = why_not_twice(code) +
                          ", and partial blocks need a descriptor without O_DIRECT; give one"});
  }
  if (system_.set_flags(direct_fd_, 0) < 0) return refusal;
  demotion_reason_.store(forbidden(code) ? &demoted_by_mode : &demoted_without_proc,
                         std::memory_order_release);
  int first = -1;
  return buffered_fd_.compare_exchange_strong(first, direct_fd_) ? direct_fd_ : first;
}

Result<std::shared_ptr<const Directory>> OpenFile::directory() {
  if (!regular_) return std::shared_ptr<const Directory>();
  return Directory::of(system_, main_fd(), path());
}

Result<std::uint64_t> OpenFile::size() {
  if (!regular_) {
    std::uint64_t bytes = 0;
    if (const int got = system_.block_device_bytes(main_fd(), &bytes); got < 0) {
      return failure("size of block device", -got);
    }
    return bytes;
  }
  struct statx facts{};
  if (const int got = system_.statx(main_fd(), STATX_SIZE, &facts); got < 0) {
    return failure("statx", -got);
  }
  return std::uint64_t{facts.stx_size};
}

Status OpenFile::resize(std::uint64_t bytes) {
  if (const int got = system_.truncate(main_fd(), bytes); got < 0) {
    return Error({.operation = "resize",
                  .path = path(),
                  .length = bytes,
                  .code = -got,
                  .hint = regular_ ? hint_for(-got, true) : "a block device has a fixed size"});
  }
  return Nothing{};
}

std::uint64_t OpenFile::free_bytes() {
  struct statfs facts{};
  if (!regular_ || system_.statfs(main_fd(), &facts) < 0) return 0;
  return static_cast<std::uint64_t>(facts.f_bavail) * static_cast<std::uint64_t>(facts.f_bsize);
}

void OpenFile::reserve(std::uint64_t offset, std::uint64_t bytes, std::uint64_t old_end) {
  if (!regular_ || !direct() || bytes < reserve_bytes_min) return;
  const std::uint64_t begin = std::max(offset, old_end);
  const std::uint64_t end = offset + bytes;
  // If the space is too small, the write itself fails, as late as possible.
  if (begin >= end || free_bytes() < end - begin) return;
  // Allocate first, then move the end: if the first call fails, nobody sees a file of zeros.
  if (system_.fallocate(direct_fd_, FALLOC_FL_KEEP_SIZE, begin, end - begin) < 0) return;
  system_.fallocate(direct_fd_, 0, begin, end - begin);
}

File open(os::System& system, const std::string& path, Access access, unsigned permissions) {
  return File(OpenFile::open(system, path, access, permissions).or_throw());
}

}  // namespace tensorferry::files

namespace tensorferry {

File File::open(const std::string& path, Access access, unsigned permissions) {
  return files::open(os::System::real(), path, access, permissions);
}

File File::borrow(int descriptor) {
  return File(files::OpenFile::borrow(os::System::real(), descriptor).or_throw());
}

const std::string& File::path() const noexcept { return opened_->path(); }
std::uint64_t File::size() const { return opened_->size().or_throw(); }
void File::resize(std::uint64_t bytes) { opened_->resize(bytes).or_throw(); }
bool File::direct() const noexcept { return opened_->direct(); }
const std::string& File::direct_reason() const noexcept { return opened_->direct_reason(); }
std::size_t File::memory_alignment() const noexcept { return opened_->memory_alignment(); }
std::size_t File::offset_alignment() const noexcept { return opened_->offset_alignment(); }
std::size_t File::block_bytes() const noexcept {
  return files::preferred_block_bytes(opened_->device());
}

}  // namespace tensorferry
