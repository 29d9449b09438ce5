// Shared by the tests of open files: files on a real disk, descriptors that close themselves, and
// the check that none stays open.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <utility>

#include "files/open_file.h"
#include "support/pattern.h"
#include "support/temp_dir.h"
#include "support/thrown.h"
#include "tensorferry/error.h"

namespace tensorferry::files {

using support::error_of;

[[nodiscard]] inline std::size_t open_descriptors() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    count += entry.is_symlink() ? 1 : 0;
  }
  return count;
}

[[nodiscard]] inline Error opening(const std::string& path, Access access) {
  return error_of([&] { (void)File::open(path, access); });
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const std::string& path, int flags) : fd_(::open(path.c_str(), flags, 0600)) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  [[nodiscard]] int number() const { return fd_; }

 private:
  int fd_;
};

// Every test must close every descriptor that it opens.
class OpenFileTest : public ::testing::Test {
 protected:
  OpenFileTest() : descriptors_before_(open_descriptors()) {}
  void TearDown() override { EXPECT_EQ(open_descriptors(), descriptors_before_) << "leaked"; }

  std::string make_file(const std::string& name, std::size_t bytes = 10'000) {
    support::write_whole_file(dir.file(name), support::pattern(bytes, 0, 1));
    return dir.file(name);
  }

  support::TempDir dir;

 private:
  std::size_t descriptors_before_;
};

[[nodiscard]] inline struct stat facts_of(int fd) {
  struct stat facts{};
  EXPECT_EQ(::fstat(fd, &facts), 0);
  return facts;
}

[[nodiscard]] inline struct stat facts_of(const std::string& path) {
  struct stat facts{};
  EXPECT_EQ(::stat(path.c_str(), &facts), 0) << path;
  return facts;
}

}  // namespace tensorferry::files
