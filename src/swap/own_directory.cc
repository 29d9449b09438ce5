#include "swap/own_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace tensorferry::swap {

namespace {

Error failure(const char* operation, const std::string& path, int code, std::string hint) {
  return Error({.operation = operation, .path = path, .code = code, .hint = std::move(hint)});
}

}  // namespace

// Another user may have made it first.
Result<int> open_own_directory(os::System& system, int parent, const std::string& name,
                               const std::string& path) {
  const uid_t user = ::geteuid();
  if (const int made = system.make_directory_at(parent, name.c_str(), 0700);
      made < 0 && made != -EEXIST) {
    return failure(
        "make swap directory", path, -made,
        made == -ENOSPC ? "the drive is full; free space on it"
        : made == -EROFS
            ? "the file system is mounted read-only; remount it or give another directory"
            : "no permission to write there; check owner and mode");
  }
  const int fd =
      system.open_at(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (fd < 0) {
    return failure("open swap directory", path, -fd,
                   fd == -ELOOP || fd == -ENOTDIR
                       ? "a link or a file has the name of our directory; remove it"
                       : "check owner and mode");
  }
  struct statx facts{};
  const int got = system.statx(fd, STATX_UID | STATX_MODE, &facts);
  if (got == 0 && facts.stx_uid == user && (facts.stx_mode & (S_IWGRP | S_IWOTH)) == 0) return fd;
  system.close(fd);
  if (got < 0) return failure("statx", path, -got, {});
  if (facts.stx_uid != user) {
    return failure(
        "open swap directory", path, EPERM,
        "the directory belongs to user " + std::to_string(facts.stx_uid) + "; remove it");
  }
  return failure("open swap directory", path, EPERM,
                 "other users may write to the directory; chmod it to 700 or remove it");
}

}  // namespace tensorferry::swap
