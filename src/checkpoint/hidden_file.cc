#include "checkpoint/hidden_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <string_view>

#include "files/open_file.h"

namespace tensorferry::checkpoint {

namespace {

constexpr std::string_view ending = ".tensorferry";
constexpr unsigned mode_bits = 07777;
// A file name has at most 255 bytes. The rest is for the dots, the numbers and the ending.
constexpr std::size_t name_part_max = 200;

std::string prefix_of(const std::string& name) { return "." + name.substr(0, name_part_max) + "."; }

std::string next_hidden_name(const std::string& name) {
  static std::atomic<std::uint64_t> last{0};
  return prefix_of(name) + std::to_string(::getpid()) + "-" + std::to_string(++last) +
         std::string(ending);
}

// The path itself, or what a link at its end points to; empty if that does not exist.
std::string without_link(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_symlink(path, ignored) ? os::real_path(path) : path;
}

}  // namespace

HiddenFile::HiddenFile(os::System& system, std::string path)
    : system_(system), generation_(os::fork_generation()), path_(std::move(path)) {
  const std::size_t slash = path_.rfind('/');
  folder_ = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  name_ = slash == std::string::npos ? path_ : path_.substr(slash + 1);
}

HiddenFile::~HiddenFile() {
  if (!hidden_.empty() && generation_ == os::fork_generation()) {
    (void)system_.remove_at(directory_, hidden_.c_str(), 0);
  }
  for (const int fd : {lock_, directory_}) {
    if (fd >= 0) system_.close(fd);
  }
}

Error HiddenFile::failure(const char* operation, int code, std::string hint) const {
  return Error({.operation = operation, .path = path_, .code = -code, .hint = std::move(hint)});
}

Result<std::unique_ptr<HiddenFile>> HiddenFile::create(os::System& system, const std::string& path,
                                                       unsigned permissions) {
  const std::string target = without_link(path);
  if (target.empty()) {
    return Error({.operation = "create",
                  .path = path,
                  .code = ENOENT,
                  .hint = path.empty() ? "the path is empty"
                                       : "it is a symbolic link to a file that does not exist"});
  }
  std::unique_ptr<HiddenFile> made(new HiddenFile(system, target));
  if (made->name_.empty() || made->name_ == "." || made->name_ == "..") {
    return made->failure("create", -EISDIR, "the path names a directory; add a file name");
  }
  if (Status opened = made->open_directory(); !opened.ok()) return opened.error();
  bool replaces = false;
  if (Status known = made->learn_mode(permissions, replaces); !known.ok()) return known.error();
  made->remove_abandoned();
  if (Status created = made->make(permissions); !created.ok()) return created.error();
  // The umask may have taken bits away that the old file has.
  if (replaces) (void)system.set_mode(made->lock_, permissions & mode_bits);
  return made;
}

Status HiddenFile::open_directory() {
  directory_ = system_.open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (directory_ >= 0) return Nothing{};
  return failure("create", std::exchange(directory_, -1),
                 "the directory " + folder_ + " cannot be opened");
}

Status HiddenFile::learn_mode(unsigned& permissions, bool& replaces) {
  struct statx facts{};
  const int found = system_.stat_at(directory_, name_.c_str(), STATX_TYPE | STATX_MODE, &facts);
  if (found == -ENOENT) return Nothing{};
  if (found < 0) return failure("create", found);
  if (!S_ISREG(facts.stx_mode)) {
    return failure("create", S_ISDIR(facts.stx_mode) ? -EISDIR : -EINVAL,
                   "only a regular file can be replaced by a new one");
  }
  permissions = facts.stx_mode & mode_bits;
  replaces = true;
  return Nothing{};
}

void HiddenFile::remove_abandoned() {
  const std::string prefix = prefix_of(name_);
  for (const std::string& name : os::list_directory(directory_)) {
    if (!name.starts_with(prefix) || !name.ends_with(ending)) continue;
    const int fd = system_.open_at(directory_, name.c_str(),
                                   O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0);
    if (fd < 0) continue;
    struct statx facts{};
    const bool ours = system_.statx(fd, STATX_TYPE | STATX_UID, &facts) == 0 &&
                      S_ISREG(facts.stx_mode) && facts.stx_uid == ::geteuid();
    if (ours && system_.lock_file(fd) == 0) (void)system_.remove_at(directory_, name.c_str(), 0);
    system_.close(fd);
  }
}

// Between open and lock another process may take the file for abandoned: then it is made anew.
Status HiddenFile::make(unsigned permissions) {
  constexpr int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  constexpr int attempts = 100;
  for (int attempt = 0; attempt < attempts; ++attempt) {
    const std::string name = next_hidden_name(name_);
    // The maker must be able to open it twice, whatever mode it gets in the end.
    const int fd =
        system_.open_at(directory_, name.c_str(), flags, permissions | S_IRUSR | S_IWUSR);
    if (fd == -EEXIST) continue;
    if (fd < 0) return failure("create", fd, "a new file cannot be made in " + folder_);
    const int locked = system_.lock_file(fd);  // some file systems have no locks
    struct statx facts{};
    const bool there = system_.statx(fd, STATX_NLINK, &facts) == 0 && facts.stx_nlink > 0;
    if (locked == -EWOULDBLOCK || !there) {
      system_.close(fd);
      continue;
    }
    lock_ = fd;
    hidden_ = name;
    try {
      file_ =
          files::open(system_, folder_ + (folder_.ends_with('/') ? "" : "/") + name, Access::write);
    } catch (const Error& error) {
      return error;
    }
    return Nothing{};
  }
  return failure("create", -EEXIST, "no name was free for a hidden file in " + folder_);
}

Status HiddenFile::commit() {
  if (hidden_.empty()) return failure("commit", -EINVAL, "the file has its name already");
  if (const int synced = system_.fsync(lock_); synced < 0) {
    return failure("sync", synced,
                   "the new file may not be on the drive; the old one is unchanged");
  }
  const int renamed = system_.rename_at(directory_, hidden_.c_str(), name_.c_str());
  if (renamed < 0) {
    return failure("rename", renamed,
                   "the new file could not get its name; the old one is unchanged");
  }
  hidden_.clear();
  if (const int synced = system_.fsync(directory_); synced < 0) {
    return failure("sync", synced,
                   "the new file is whole, but after a power cut the old one may be back: the "
                   "directory " +
                       folder_ + " could not be synced");
  }
  return Nothing{};
}

}  // namespace tensorferry::checkpoint
