#include "swap/run_directory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "swap/own_directory.h"

namespace tensorferry::swap {

namespace {

constexpr const char* owner_name = "owner";
constexpr const char* tensors_name = "tensors";
constexpr std::string_view attached_prefix = "attached.";
constexpr int directory_flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

// Other runs lock the shared directory only while they start. That takes milliseconds, or as long
// as the file system needs to free the terabytes that killed runs have left. All ranks of a machine
// wait for that: the room is theirs.
constexpr std::chrono::minutes lock_limit{10};
constexpr std::chrono::milliseconds lock_pause{5};

// The name of a run as part of a file name: replaces characters that are special there.
std::string as_name(std::string_view run) {
  constexpr std::size_t longest = 64;
  std::string name(run.substr(0, longest));
  for (char& letter : name) {
    const bool plain = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
                       (letter >= '0' && letter <= '9') || letter == '-' || letter == '_';
    if (!plain) letter = '_';
  }
  return name;
}

std::string own_pid() { return std::to_string(::getpid()); }

// The first line of a small file.
std::string first_line(os::System& system, int fd) {
  std::array<char, 256> text{};
  const ssize_t got =
      system.pread(fd, std::as_writable_bytes(std::span(text)).data(), text.size(), 0);
  const std::string_view all(text.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  return std::string(all.substr(0, all.find('\n')));
}

std::uint64_t file_bytes(os::System& system, int directory, const char* name) {
  const int fd = system.open_at(directory, name, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
  if (fd < 0) return 0;
  struct statx facts{};
  const int got = system.statx(fd, STATX_BLOCKS, &facts);
  system.close(fd);
  return got < 0 ? 0 : facts.stx_blocks * 512;
}

}  // namespace

RunDirectory::RunDirectory(os::System& system, std::string given)
    : system_(system),
      generation_(os::fork_generation()),
      given_(std::move(given)),
      path_(given_) {}

RunDirectory::~RunDirectory() {
  if (own_fd_ >= 0 && generation_ == os::fork_generation()) remove_run(own_fd_, name_);
  for (const int fd : {owner_fd_, own_fd_, shared_fd_, given_fd_}) {
    if (fd >= 0) system_.close(fd);
  }
}

Error RunDirectory::failure(const char* operation, int code, std::string hint) const {
  return Error({.operation = operation, .path = path_, .code = code, .hint = std::move(hint)});
}

Result<std::unique_ptr<RunDirectory>> RunDirectory::make(os::System& system,
                                                         const std::string& given,
                                                         const std::string& run, unsigned rank) {
  std::unique_ptr<RunDirectory> directory(new RunDirectory(system, given));
  if (const Status opened = directory->open_given(); !opened.ok()) return opened.error();
  if (const Status opened = directory->open_shared(); !opened.ok()) return opened.error();
  if (const Status locked = directory->lock_shared(); !locked.ok()) return locked.error();
  directory->sweep(run);
  const Status made = directory->make_own(run, rank);
  // Nobody takes our run for a dead one: its owner file is locked by now.
  (void)system.unlock_file(directory->shared_fd_);
  if (!made.ok()) return made.error();
  return directory;
}

// Follows links: the user has chosen this path.
Status RunDirectory::open_given() {
  if (given_.empty() || given_.find('\0') != std::string::npos) {
    return failure("open swap directory", EINVAL, "name a directory on the drive to swap to");
  }
  given_fd_ = system_.open(given_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (given_fd_ < 0) {
    const int code = -std::exchange(given_fd_, -1);
    return failure("open swap directory", code,
                   code == ENOENT    ? "no such directory; make it, or mount the drive"
                   : code == ENOTDIR ? "not a directory; give one"
                                     : "check owner and mode");
  }
  struct statfs holder{};
  if (system_.statfs(given_fd_, &holder) == 0 &&
      (holder.f_type == TMPFS_MAGIC || holder.f_type == RAMFS_MAGIC)) {
    notes_.push_back(
        given_ + " is on a file system in memory: tensors that are swapped there stay in memory");
  }
  return Nothing{};
}

// The directory that all runs of this user share.
Status RunDirectory::open_shared() {
  const std::string name = "tensorferry-swap-" + std::to_string(::geteuid());
  path_ = given_ + "/" + name;
  const Result<int> opened = open_own_directory(system_, given_fd_, name, path_);
  if (!opened.ok()) return opened.error();
  shared_fd_ = opened.value();
  return Nothing{};
}

Status RunDirectory::lock_shared() {
  const auto deadline = std::chrono::steady_clock::now() + lock_limit;
  for (;;) {
    const int locked = system_.lock_file(shared_fd_);
    if (locked >= 0) return Nothing{};
    if (locked != -EWOULDBLOCK && locked != -EINTR) {
      return failure("lock swap directory", -locked,
                     "the file system does not support locks; give a directory on ext4 or xfs");
    }
    if (std::chrono::steady_clock::now() > deadline) {
      return failure("lock swap directory", ETIMEDOUT,
                     "another process holds the lock for too long; find it with fuser and end it");
    }
    std::this_thread::sleep_for(lock_pause);
  }
}

// While the shared directory is locked, nobody makes a directory in it: every one without a locked
// owner file is dead.
void RunDirectory::sweep(const std::string& run) {
  std::uint64_t freed_bytes = 0;
  unsigned dead = 0;
  std::string others;
  for (const std::string& name : os::list_directory(shared_fd_)) {
    const int directory = system_.open_at(shared_fd_, name.c_str(), directory_flags, 0);
    if (directory < 0) continue;  // not ours
    const int owner =
        system_.open_at(directory, owner_name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0);
    if (owner >= 0 && system_.lock_file(owner) < 0) {
      const std::string line = first_line(system_, owner);
      const bool kin = line.ends_with(" run " + (run.empty() ? own_pid() : as_name(run)));
      if (!kin) others += (others.empty() ? "" : ", ") + line;
    } else if (owner >= 0 || owner == -ENOENT) {
      freed_bytes += file_bytes(system_, directory, tensors_name);
      ++dead;
      remove_run(directory, name);
    }
    if (owner >= 0) system_.close(owner);
    system_.close(directory);
  }
  if (dead > 0) {
    notes_.push_back("removed the files of " + std::to_string(dead) + " ended runs in " + path_ +
                     ": " + std::to_string(freed_bytes) + " bytes");
  }
  if (!others.empty()) {
    notes_.push_back("another live run uses " + path_ + " too (" + others +
                     "): both share the drive");
  }
}

// Removes only names that we give. If the directory holds others, it stays.
void RunDirectory::remove_run(int directory, const std::string& name) {
  system_.remove_at(directory, tensors_name, 0);
  for (const std::string& held : os::list_directory(directory)) {
    if (held.starts_with(attached_prefix)) system_.remove_at(directory, held.c_str(), 0);
  }
  system_.remove_at(directory, owner_name, 0);
  if (shared_fd_ >= 0) system_.remove_at(shared_fd_, name.c_str(), AT_REMOVEDIR);
}

Status RunDirectory::make_own(const std::string& run, unsigned rank) {
  const std::string shared_path = path_;
  const std::string pid = own_pid();
  const std::string stem =
      (run.empty() ? "run" : as_name(run)) + "." + std::to_string(rank) + "." + pid + ".";
  int made = -EEXIST;
  for (unsigned number = 0; made == -EEXIST; ++number) {
    name_ = stem + std::to_string(number);
    path_ = shared_path + "/" + name_;
    made = system_.make_directory_at(shared_fd_, name_.c_str(), 0700);
  }
  if (made < 0) return failure("make swap directory", -made, "check free space and mode");
  own_fd_ = system_.open_at(shared_fd_, name_.c_str(), directory_flags, 0);
  if (own_fd_ < 0) {
    return failure("open swap directory", -std::exchange(own_fd_, -1), "check owner and mode");
  }
  owner_fd_ = system_.open_at(own_fd_, owner_name,
                              O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (owner_fd_ < 0) {
    return failure("make owner file", -std::exchange(owner_fd_, -1), "check free space");
  }
  if (const int locked = system_.lock_file(owner_fd_); locked < 0) {
    return failure("lock owner file", -locked,
                   "the file system does not support locks; give a directory on ext4 or xfs");
  }
  // For people, and for the notes of other runs. Only the lock counts.
  const std::string line = "process " + pid + " run " + (run.empty() ? pid : as_name(run)) + "\n";
  (void)system_.pwrite(owner_fd_, std::as_bytes(std::span(line)).data(), line.size(), 0);
  return Nothing{};
}

Result<int> RunDirectory::make_file() {
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  int fd = system_.open_at(own_fd_, tensors_name, flags, 0600);
  if (fd < 0) return failure("make swap file", -fd, "check free space");
  // Says that somebody may write to the file: trim_snapshot_file() looks.
  (void)system_.lock_file(fd);
  return fd;
}

bool RunDirectory::hold(int fd, std::size_t number) {
  const std::string name = std::string(attached_prefix) + std::to_string(number);
  return system_.link_file(fd, own_fd_, name.c_str()) == 0;
}

void RunDirectory::let_go(std::size_t number) {
  const std::string name = std::string(attached_prefix) + std::to_string(number);
  system_.remove_at(own_fd_, name.c_str(), 0);
}

}  // namespace tensorferry::swap
