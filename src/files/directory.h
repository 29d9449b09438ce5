// The directory that holds an open file, for whoever makes the file's entry in it durable.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/result.h"
#include "files/identity.h"
#include "os/system.h"

namespace tensorferry::files {

// Open as long as the object lives. Thread-safe, as nothing changes.
class Directory {
 public:
  // The directory that holds the regular file `fd` now, wherever it was renamed to since it was
  // opened as `path`. Of several hard links the one counts by which it was opened; where that is
  // gone, the directory it was in. nullptr where no entry is left to make durable. An Error where
  // the directory cannot be found or opened. Without /proc it is found by `path` alone, if the file
  // is still there.
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
