#include "files/directory.h"

#include <fcntl.h>

#include <cerrno>
#include <string_view>
#include <utility>

#include "tensorferry/error.h"

namespace tensorferry::files {

namespace {

// How often a file may be renamed during the search.
constexpr int rounds_max = 100;

// The kernel appends this to a name that was removed.
constexpr std::string_view gone_mark = " (deleted)";

// A path without links, cut at its last slash.
std::pair<std::string, std::string> parent_and_name(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return {slash == 0 ? "/" : path.substr(0, slash), path.substr(slash + 1)};
}

Error failure(const char* operation, const std::string& path, int code, std::string hint) {
  return Error({.operation = operation, .path = path, .code = code, .hint = std::move(hint)});
}

Error not_found(const std::string& path, const std::string& why) {
  return failure("find directory", path, ENOENT,
                 why + "; full durability needs the directory of the file");
}

}  // namespace

Result<std::shared_ptr<const Directory>> Directory::of(os::System& system, int fd,
                                                       const std::string& path) {
  using Found = std::shared_ptr<const Directory>;
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  std::string before;
  for (int round = 0; round < rounds_max; ++round) {
    struct statx file{};
    if (const int got = system.statx(fd, STATX_TYPE | STATX_INO | STATX_NLINK, &file); got < 0) {
      return failure("statx", path, -got, {});
    }
    if (!S_ISREG(file.stx_mode) || file.stx_nlink == 0) return Found();
    std::string now = os::read_link(link);
    const bool told = now.starts_with('/');
    if (!told) now = os::real_path(path);
    if (now.empty()) {
      return not_found(path, "/proc is not mounted, and the file has left this path");
    }
    const auto [parent, name] = parent_and_name(now);
    const int opened = system.open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    std::shared_ptr<Directory> directory;
    if (opened >= 0) {
      directory.reset(new Directory(system, opened, parent));
      struct statx facts{};
      if (const int got = system.statx(opened, STATX_INO, &facts); got < 0) {
        return failure("statx", parent, -got, {});
      }
      directory->identity_ = identity_of(facts);
      const int seen = system.stat_at(opened, name.c_str(), STATX_INO, &facts);
      if (seen >= 0 && identity_of(facts) == identity_of(file)) return Found(directory);
      // We may read the directory, but not search it.
      if (told && seen == -EACCES) return Found(directory);
    }
    // The file may have been renamed meanwhile: only a result that comes twice counts.
    if (std::exchange(before, now) != now) continue;
    const bool gone = told && now.ends_with(gone_mark);
    if (gone && (opened >= 0 || opened == -ENOENT)) return Found(directory);
    if (opened < 0) {
      const bool too_many = opened == -EMFILE || opened == -ENFILE;
      return failure("open directory", parent, -opened,
                     too_many
                         ? "out of file descriptors; raise ulimit -n or close files"
                         : "full durability must open the directory of the file; check its mode");
    }
    return not_found(path, told
                               ? "the kernel says it is at " + now + ", but another file is there"
                               : "/proc is not mounted, and this path now belongs to another file");
  }
  return not_found(path, "the file was renamed again and again during the search");
}

Directory::~Directory() { system_.close(fd_); }

}  // namespace tensorferry::files
