// A file descriptor that closes itself.
#pragma once

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <string>

namespace tensorferry::bench {

class OwnedDescriptor {
 public:
  // Opens the path, as open() does, with O_CLOEXEC. If that fails, opened() is false and errno has
  // the reason.
  OwnedDescriptor(const std::string& path, int flags, mode_t mode = 0) noexcept
      : fd_(open(path.c_str(), flags | O_CLOEXEC, mode)) {}
  ~OwnedDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  OwnedDescriptor(const OwnedDescriptor&) = delete;
  OwnedDescriptor& operator=(const OwnedDescriptor&) = delete;

  [[nodiscard]] bool opened() const noexcept { return fd_ >= 0; }
  [[nodiscard]] int get() const noexcept { return fd_; }

 private:
  int fd_;
};

}  // namespace tensorferry::bench
