// Growth: a failed write cuts off the bytes that it added to a file, and no others.
#include "files/growth.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/alignment.h"
#include "support/pattern.h"
#include "support/temp_dir.h"

namespace tensorferry::files {
namespace {

class GrowthTest : public ::testing::Test {
 protected:
  GrowthTest() { reopen(); }

  void reopen() { file = OpenFile::open(os::System::real(), path, Access::read_write).or_throw(); }
  [[nodiscard]] Growth begin(std::uint64_t first, std::uint64_t last) {
    auto growth = Growth::begin(file, {{first, last}});
    EXPECT_TRUE(growth.has_value());
    file->reserve(first, last - first, growth->old_end());
    return std::move(*growth);
  }
  void write(std::uint64_t offset, std::size_t bytes) {
    const auto data = support::pattern(bytes, offset, 1);
    const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    EXPECT_EQ(::pwrite(fd, data.data(), bytes, static_cast<off_t>(offset)),
              static_cast<ssize_t>(bytes));
    EXPECT_EQ(::fsync(fd), 0);
    ::close(fd);
  }
  [[nodiscard]] std::uint64_t size() { return file->size().or_throw(); }

  support::TempDir dir;
  const std::string path = dir.file("data");
  std::shared_ptr<OpenFile> file;
};

TEST_F(GrowthTest, a_failed_write_is_cut_off_at_the_old_end) {
  write(0, 5000);
  Growth growth = begin(4096, 8 * MiB);
  write(2 * MiB, MiB);  // some of it, beyond a hole
  EXPECT_TRUE(growth.cut_back().ok());
  EXPECT_EQ(size(), 5000U);
}

TEST_F(GrowthTest, a_write_that_succeeded_stays) {
  Growth growth = begin(0, 4 * MiB);
  write(0, 4 * MiB);
  growth.keep();
  EXPECT_EQ(size(), 4 * MiB);
}

TEST_F(GrowthTest, one_that_nobody_settled_has_failed) {
  {
    const Growth growth = begin(0, 4 * MiB);
  }
  EXPECT_EQ(size(), 0U);
}

TEST_F(GrowthTest, overwriting_is_no_growth) {
  write(0, 4 * MiB);
  EXPECT_FALSE(Growth::begin(file, {{0, 4 * MiB}}).has_value());
}

TEST_F(GrowthTest, neighbours_that_all_fail_leave_the_old_end_whoever_ends_first) {
  for (const bool first_ends_first : {true, false}) {
    Growth first = begin(0, 2 * MiB);
    Growth second = begin(2 * MiB, 4 * MiB);
    write(3 * MiB, MiB);
    EXPECT_TRUE((first_ends_first ? first : second).cut_back().ok());
    EXPECT_TRUE((first_ends_first ? second : first).cut_back().ok());
    EXPECT_EQ(size(), 0U);
  }
}

TEST_F(GrowthTest, what_another_write_has_brought_is_never_cut) {
  Growth fails = begin(0, 2 * MiB);
  Growth works = begin(2 * MiB, 4 * MiB);
  write(2 * MiB, 2 * MiB);
  works.keep();
  EXPECT_TRUE(fails.cut_back().ok());
  EXPECT_EQ(size(), 4 * MiB);
}

TEST_F(GrowthTest, what_lies_below_a_gap_is_never_cut) {
  Growth fails = begin(4 * MiB, 8 * MiB);
  // By another process, which may be writing more: the kernel shows a hole until those bytes
  // arrive.
  write(MiB, MiB);
  EXPECT_TRUE(fails.cut_back().ok());
  EXPECT_EQ(size(), 4 * MiB);
}

TEST_F(GrowthTest, what_lies_between_failed_writes_is_never_cut) {
  Growth low = begin(0, 2 * MiB);
  Growth high = begin(4 * MiB, 6 * MiB);
  EXPECT_TRUE(low.cut_back().ok());
  EXPECT_TRUE(high.cut_back().ok());
  EXPECT_EQ(size(), 4 * MiB);
}

TEST_F(GrowthTest, a_write_over_what_another_has_brought_takes_only_its_own_with_it) {
  Growth slow = begin(0, 2 * MiB);
  Growth works = begin(2 * MiB, 4 * MiB);
  write(2 * MiB, 2 * MiB);
  works.keep();
  Growth fails = begin(2 * MiB, 6 * MiB);  // again, and more
  EXPECT_TRUE(fails.cut_back().ok());
  write(0, 2 * MiB);
  slow.keep();
  EXPECT_EQ(size(), 4 * MiB);
}

// --- A file system that hangs ------------------------------------------------------------------

struct Stuck final : os::System {
  int truncate(int fd, std::uint64_t bytes) override {
    waits = true;
    while (waits) std::this_thread::yield();
    return os::System::truncate(fd, bytes);
  }
  std::atomic<bool> waits{false};
};

TEST_F(GrowthTest, a_file_system_that_does_not_answer_holds_up_no_other_file_and_no_fork) {
  Stuck system;
  file = OpenFile::open(system, dir.file("stuck"), Access::read_write).or_throw();
  Growth growth = begin(0, 4 * MiB);
  std::thread cutting([&] { EXPECT_TRUE(growth.cut_back().ok()); });
  while (!system.waits) std::this_thread::yield();
  std::atomic<bool> went_on{false};
  std::thread others([&] {
    const auto other =
        OpenFile::open(os::System::real(), dir.file("other"), Access::read_write).or_throw();
    EXPECT_TRUE(Growth::begin(other, {{0, MiB}}).has_value());
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    EXPECT_EQ(::waitpid(child, nullptr, 0), child);
    went_on = true;
  });
  for (int i = 0; i < 1000 && !went_on; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(went_on);
  system.waits = false;
  cutting.join();
  others.join();
  file.reset();
}

TEST_F(GrowthTest, a_file_that_somebody_has_made_longer_still_is_left_alone) {
  Growth fails = begin(0, 2 * MiB);
  write(8 * MiB, 4096);
  EXPECT_TRUE(fails.cut_back().ok());
  EXPECT_EQ(size(), 8 * MiB + 4096);
}

TEST_F(GrowthTest, a_file_that_is_opened_twice_is_one_file) {
  Growth first = begin(0, 2 * MiB);
  reopen();
  Growth second = begin(2 * MiB, 4 * MiB);
  EXPECT_TRUE(first.cut_back().ok());
  EXPECT_TRUE(second.cut_back().ok());
  EXPECT_EQ(size(), 0U);
}

TEST_F(GrowthTest, the_position_of_a_borrowed_descriptor_stays) {
  write(0, 4096);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::lseek(fd, 17, SEEK_SET), 17);
  file = OpenFile::borrow(os::System::real(), fd).or_throw();
  Growth growth = begin(4 * MiB, 8 * MiB);
  EXPECT_TRUE(growth.cut_back().ok());
  EXPECT_EQ(::lseek(fd, 0, SEEK_CUR), 17);
  EXPECT_LE(size(), 4 * MiB);
  ::close(fd);
}

TEST_F(GrowthTest, a_forked_child_cuts_nothing) {
  std::optional<Growth> growth = begin(0, 4 * MiB);
  const pid_t child = ::fork();
  if (child == 0) {
    growth.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(size(), 4 * MiB);
  growth.reset();
  EXPECT_EQ(size(), 0U);
}

TEST_F(GrowthTest, a_file_that_cannot_be_cut_is_told) {
  struct NoTruncate final : os::System {
    int truncate(int, std::uint64_t) override { return -EIO; }
  } system;
  file = OpenFile::open(system, path, Access::read_write).or_throw();
  Growth growth = begin(0, 4 * MiB);
  const Status cut = growth.cut_back();
  ASSERT_FALSE(cut.ok());
  EXPECT_EQ(cut.error().code(), EIO);
  EXPECT_EQ(cut.error().path(), path);
  file.reset();
}

}  // namespace
}  // namespace tensorferry::files
