// The owner of a directory, refused directories, and directories of dead runs.
#include "swap/run_directory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include "support/child.h"
#include "support/temp_dir.h"

namespace tensorferry::swap {
namespace {

namespace fs = std::filesystem;

class RunDirectoryTest : public ::testing::Test {
 protected:
  [[nodiscard]] Result<std::unique_ptr<RunDirectory>> make(const std::string& run = "") const {
    return RunDirectory::make(os::System::real(), given_.path(), run, 0);
  }
  [[nodiscard]] std::string shared() const {
    return given_.file("tensorferry-swap-" + std::to_string(::geteuid()));
  }
  [[nodiscard]] unsigned runs() const {
    unsigned count = 0;
    for ([[maybe_unused]] const auto& entry : fs::directory_iterator(shared())) ++count;
    return count;
  }
  [[nodiscard]] int refusal() const {
    const auto made = make();
    if (made.ok()) return 0;
    EXPECT_FALSE(made.error().hint().empty());
    return made.error().code();
  }

  const support::TempDir given_;
};

mode_t mode_of(const std::string& path) {
  struct stat facts{};
  EXPECT_EQ(::lstat(path.c_str(), &facts), 0) << path;
  return facts.st_mode & 07777U;
}

TEST_F(RunDirectoryTest, directory_and_file_are_for_their_owner_alone) {
  const mode_t before = ::umask(0);
  auto made = make();
  ::umask(before);
  ASSERT_TRUE(made.ok());
  const auto fd = made.value()->make_file();
  ASSERT_TRUE(fd.ok());
  EXPECT_EQ(mode_of(shared()), 0700U);
  EXPECT_EQ(mode_of(made.value()->path()), 0700U);
  EXPECT_EQ(mode_of(made.value()->path() + "/tensors"), 0600U);
  EXPECT_EQ(mode_of(made.value()->path() + "/owner"), 0600U);
  ::close(fd.value());
}

TEST_F(RunDirectoryTest, it_goes_with_its_end) {
  {
    auto made = make();
    ASSERT_TRUE(made.ok());
    ::close(made.value()->make_file().or_throw());
    EXPECT_EQ(runs(), 1U);
  }
  EXPECT_EQ(runs(), 0U);
}

TEST_F(RunDirectoryTest, a_child_of_fork_removes_nothing) {
  auto made = make();
  ASSERT_TRUE(made.ok());
  const auto child = support::run_in_child([&made]() -> std::string {
    made.value().reset();
    return {};
  });
  EXPECT_TRUE(child.passed()) << child;
  EXPECT_EQ(runs(), 1U);
}

// A child that another thread forks while a run starts has its descriptors, and may live long.
class ForkingSystem : public os::System {
 public:
  ~ForkingSystem() override {
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      ::waitpid(child_, nullptr, 0);
    }
  }
  int lock_file(int fd) override {
    const int locked = os::System::lock_file(fd);
    if (child_ >= 0) return locked;
    child_ = ::fork();
    while (child_ == 0) ::pause();
    return locked;
  }
  [[nodiscard]] pid_t child() const { return child_; }

 private:
  pid_t child_ = -1;
};

TEST_F(RunDirectoryTest, a_child_of_fork_does_not_lock_out_other_runs) {
  ForkingSystem forking;
  const auto made = RunDirectory::make(forking, given_.path(), "", 0);
  ASSERT_TRUE(made.ok());
  ASSERT_GT(forking.child(), 0);
  const int fd = ::open(shared().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  EXPECT_EQ(::flock(fd, LOCK_EX | LOCK_NB), 0);
  ::close(fd);
}

TEST_F(RunDirectoryTest, two_live_ones_have_a_directory_each) {
  const auto first = make("a");
  const auto second = make("a");
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first.value()->path(), second.value()->path());
  EXPECT_EQ(runs(), 2U);
  EXPECT_TRUE(second.value()->notes().empty()) << second.value()->notes().front();
}

TEST_F(RunDirectoryTest, another_live_run_is_told_of) {
  const auto first = make("a");
  const auto second = make("b");
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_EQ(second.value()->notes().size(), 1U);
  EXPECT_NE(second.value()->notes()[0].find("another live run"), std::string::npos);
  EXPECT_NE(second.value()->notes()[0].find(std::to_string(::getpid())), std::string::npos);
}

TEST_F(RunDirectoryTest, what_a_killed_run_left_is_removed_at_the_next_start) {
  const auto child = support::run_in_child([this]() -> std::string {
    auto made = make();
    if (!made.ok()) return made.error().what();
    const int fd = made.value()->make_file().or_throw();
    if (::ftruncate(fd, 8192) != 0 || ::pwrite(fd, "x", 1, 0) != 1) return "no file";
    ::raise(SIGKILL);
    return "still alive";
  });
  ASSERT_EQ(child.signal, SIGKILL);
  ASSERT_EQ(runs(), 1U);
  const auto next = make();
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(runs(), 1U);
  ASSERT_EQ(next.value()->notes().size(), 1U);
  EXPECT_NE(next.value()->notes()[0].find("removed the files of 1 ended"), std::string::npos);
}

TEST_F(RunDirectoryTest, foreign_files_in_a_dead_runs_directory_stay) {
  ASSERT_TRUE(make().ok());
  fs::create_directory(shared() + "/run.0.1.0");
  std::ofstream(shared() + "/run.0.1.0/thesis") << "years of work";
  fs::create_symlink("/etc", shared() + "/link");
  ASSERT_TRUE(make().ok());
  EXPECT_TRUE(fs::exists(shared() + "/run.0.1.0/thesis"));
  EXPECT_TRUE(fs::is_symlink(shared() + "/link"));
  EXPECT_TRUE(fs::exists("/etc/passwd"));
}

TEST_F(RunDirectoryTest, a_symbolic_link_in_our_place_is_refused) {
  fs::create_directory(given_.file("elsewhere"));
  fs::create_directory_symlink(given_.file("elsewhere"), shared());
  EXPECT_TRUE(refusal() == ELOOP || refusal() == ENOTDIR);
  EXPECT_TRUE(fs::is_empty(given_.file("elsewhere")));
}

TEST_F(RunDirectoryTest, a_fifo_or_a_file_in_our_place_is_refused) {
  ASSERT_EQ(::mkfifo(shared().c_str(), 0600), 0);
  EXPECT_EQ(refusal(), ENOTDIR);
  fs::remove(shared());
  std::ofstream(shared()) << "x";
  EXPECT_EQ(refusal(), ENOTDIR);
}

TEST_F(RunDirectoryTest, a_device_in_our_place_is_refused) {
  if (::mknod(shared().c_str(), S_IFCHR | 0600, 0x103) != 0) GTEST_SKIP() << "needs root";
  EXPECT_EQ(refusal(), ENOTDIR);
}

TEST_F(RunDirectoryTest, a_directory_that_others_own_or_may_write_is_refused) {
  fs::create_directory(shared());
  ASSERT_EQ(::chmod(shared().c_str(), 0770), 0);
  EXPECT_EQ(refusal(), EPERM);
  ASSERT_EQ(::chmod(shared().c_str(), 0700), 0);
  if (::chown(shared().c_str(), 12345, 12345) != 0) GTEST_SKIP() << "needs root";
  EXPECT_EQ(refusal(), EPERM);
  const auto made = make();
  EXPECT_NE(made.error().hint().find("12345"), std::string::npos);
}

// If the files of a dead run are links, the links are removed, not their targets.
TEST_F(RunDirectoryTest, links_in_a_dead_runs_directory_are_not_followed) {
  ASSERT_TRUE(make().ok());
  const std::string dead = shared() + "/run.0.1.0";
  fs::create_directory(dead);
  std::ofstream(given_.file("precious")) << "x";
  fs::create_symlink(given_.file("precious"), dead + "/tensors");
  fs::create_symlink(given_.file("precious"), dead + "/owner");
  ASSERT_TRUE(make().ok());
  EXPECT_TRUE(fs::exists(given_.file("precious")));
}

TEST_F(RunDirectoryTest, what_is_wrong_with_the_given_path_is_said) {
  const auto at = [](const std::string& path) {
    const auto made = RunDirectory::make(os::System::real(), path, "", 0);
    return made.ok() ? 0 : made.error().code();
  };
  EXPECT_EQ(at(given_.file("missing")), ENOENT);
  std::ofstream(given_.file("file")) << "x";
  EXPECT_EQ(at(given_.file("file")), ENOTDIR);
  EXPECT_EQ(at(""), EINVAL);
  const auto in_memory = RunDirectory::make(os::System::real(), "/dev/shm", "", 0);
  ASSERT_TRUE(in_memory.ok());
  ASSERT_FALSE(in_memory.value()->notes().empty());
  EXPECT_NE(in_memory.value()->notes()[0].find("in memory"), std::string::npos);
}

TEST_F(RunDirectoryTest, the_name_of_a_run_cannot_lead_elsewhere) {
  const auto made = make("../../etc/\n*");
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(fs::path(made.value()->path()).parent_path(), shared());
}

}  // namespace
}  // namespace tensorferry::swap
