#include "bench/run/scratch.h"

#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "bench/run/sizes.h"
#include "tensorferry/error.h"

namespace tensorferry::bench {

namespace {

Error refusal(const char* operation, const std::string& path, int code) {
  const char* hint = code == ENOENT    ? "create the directory first, or name another"
                     : code == ENOTDIR ? "name a directory, not a file"
                     : code == EROFS   ? "the file system is mounted read-only"
                     : code == EACCES || code == EPERM ? "name a directory that you may write to"
                                                       : "";
  return Error({.operation = operation, .path = path, .code = code, .hint = hint});
}

}  // namespace

void check_space(const std::string& directory, std::uint64_t bytes_needed) {
  struct statvfs facts{};
  if (statvfs(directory.c_str(), &facts) != 0) throw refusal("use directory", directory, errno);
  const std::uint64_t free_bytes = std::uint64_t{facts.f_bavail} * facts.f_frsize;
  if (free_bytes >= bytes_needed) return;
  throw Error({.operation = "make test files",
               .path = directory,
               .length = bytes_needed,
               .code = ENOSPC,
               .hint = rounded_size(bytes_needed) + " are needed but only " +
                       rounded_size(free_bytes) +
                       " are free; choose smaller sizes or another directory"});
}

Scratch::Scratch(const std::string& directory, std::uint64_t bytes_needed) {
  // Before check_space(): a smaller size would not help.
  if (access(directory.c_str(), W_OK) != 0) throw refusal("make a directory in", directory, errno);
  check_space(directory, bytes_needed);
  std::string pattern = (std::filesystem::path(directory) / "tensorferry-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw refusal("make a directory in", directory, errno);
  path_ = std::move(pattern);
}

Scratch::~Scratch() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace tensorferry::bench
