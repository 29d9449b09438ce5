// The directory that holds an open file: syncing it makes the file's entry durable.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/result.h"
#include "files/identity.h"
#include "os/system.h"

namespace tensorferry::files {

// Open as long as the object lives. Immutable, so thread-safe.
class Directory {
 public:
  // The directory that holds the regular file `fd` now, even if the file was renamed after it was
  // opened as `path`. Of several hard links the one by which it was opened counts; if that one was
  // removed, the directory it was in. Returns nullptr if the file has no entry left. Fails if the
  // directory cannot be found or opened. Without /proc only `path` counts, if the file is still
  // there.
  [[nodiscard]] static Result<std::shared_ptr<const Directory>> of(os::System& system, int fd,
                                                                   const std::string& path);
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const Identity& identity() const noexcept { return identity_; }

 private:
  Directory(os::System& system, int fd, std::string path)
      : system_(system), fd_(fd), path_(std::move(path)) {}

  os::System& system_;
  const int fd_;
  const std::string path_;
  Identity identity_;
};

}  // namespace tensorferry::files
