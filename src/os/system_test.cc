// Every call returns what the kernel reported: a result or -errno, whatever errno was before.
#include "os/system.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "base/alignment.h"
#include "support/temp_dir.h"

namespace tensorferry::os {
namespace {

// The result of a call made while errno holds an old, unrelated error.
template <class Call>
auto with_stale_errno(Call call) {
  errno = EXDEV;
  return call();
}

class SystemTest : public testing::Test {
 public:
  SystemTest() {
    std::string pattern = testing::TempDir() + "system_test.XXXXXX";
    const int fd = mkstemp(pattern.data());
    EXPECT_GE(fd, 0);
    ::close(fd);
    path_ = pattern;
  }
  ~SystemTest() override { unlink(path_.c_str()); }
  SystemTest(const SystemTest&) = delete;
  SystemTest& operator=(const SystemTest&) = delete;

 protected:
  int open_file() { return system_.open(path_.c_str(), O_RDWR | O_CLOEXEC, 0); }

  System& system_ = System::real();
  std::string path_;
};

TEST_F(SystemTest, open_reports_a_missing_file) {
  const std::string missing = path_ + ".missing";
  EXPECT_EQ(with_stale_errno([&] { return system_.open(missing.c_str(), O_RDONLY, 0); }), -ENOENT);
  EXPECT_EQ(with_stale_errno([&] { return system_.open("/", O_WRONLY, 0); }), -EISDIR);
}

TEST_F(SystemTest, stat_path_knows_a_file_and_reports_a_missing_one) {
  const std::string missing = path_ + ".missing";
  struct statx facts{};
  EXPECT_EQ(
      with_stale_errno([&] { return system_.stat_path(missing.c_str(), STATX_TYPE, &facts); }),
      -ENOENT);
  EXPECT_EQ(with_stale_errno([&] { return system_.stat_path(path_.c_str(), STATX_TYPE, &facts); }),
            0);
  EXPECT_TRUE(S_ISREG(facts.stx_mode));
}

TEST_F(SystemTest, calls_on_a_bad_descriptor_return_EBADF) {
  std::array<std::byte, 16> memory{};
  struct statx facts{};
  struct statfs volume{};
  std::uint64_t bytes = 0;
  EXPECT_EQ(with_stale_errno([&] { return system_.close(-1); }), -EBADF);
  EXPECT_EQ(with_stale_errno([&] { return system_.duplicate(-1); }), -EBADF);
  EXPECT_EQ(with_stale_errno([&] { return system_.flags(-1); }), -EBADF);
  EXPECT_EQ(with_stale_errno([&] { return system_.pread(-1, memory.data(), 16, 0); }), -EBADF);
  EXPECT_EQ(with_stale_errno([&] { return system_.pwrite(-1, memory.data(), 16, 0); }), -EBADF);
  EXPECT_EQ(with_stale_errno([&] { return system_.fdatasync(-1); }), -EBADF);
  EXPECT_EQ(with_stale_errno([&] { return system_.fsync(-1); }), -EBADF);
  EXPECT_EQ(with_stale_errno([&] { return system_.fallocate(-1, 0, 0, 16); }), -EBADF);
  EXPECT_EQ(with_stale_errno([&] { return system_.statx(-1, STATX_SIZE, &facts); }), -EBADF);
  EXPECT_EQ(with_stale_errno([&] { return system_.statfs(-1, &volume); }), -EBADF);
  EXPECT_EQ(with_stale_errno([&] { return system_.block_device_bytes(-1, &bytes); }), -EBADF);
}

TEST_F(SystemTest, offsets_that_do_not_fit_are_refused) {
  const int fd = open_file();
  std::array<std::byte, 16> memory{};
  const std::uint64_t beyond = std::uint64_t{1} << 63;
  EXPECT_EQ(system_.pread(fd, memory.data(), 16, beyond), -EINVAL);
  EXPECT_EQ(system_.pwrite(fd, memory.data(), 16, beyond), -EINVAL);
  EXPECT_EQ(system_.fallocate(fd, 0, 0, 0), -EINVAL);
  EXPECT_EQ(system_.close(fd), 0);
}

TEST_F(SystemTest, memory_calls_report_their_failure) {
  const auto unmapped = [] { return reinterpret_cast<std::byte*>(page_bytes()); };
  EXPECT_EQ(with_stale_errno([&] { return system_.map(std::size_t{1} << 62); }), nullptr);
  EXPECT_EQ(with_stale_errno([&] { return system_.unmap(unmapped() + 1, page_bytes()); }), -EINVAL);
  if (::mlock(unmapped(), page_bytes()) != 0) {  // sanitizers make mlock do nothing
    EXPECT_EQ(with_stale_errno([&] { return system_.lock(unmapped(), page_bytes()); }), -ENOMEM);
  }
  EXPECT_EQ(
      with_stale_errno([&] { return system_.advise(unmapped(), page_bytes(), MADV_HUGEPAGE); }),
      -ENOMEM);
  EXPECT_EQ(with_stale_errno([&] { return system_.advise(unmapped(), page_bytes(), 12345); }),
            -EINVAL);
}

TEST_F(SystemTest, file_calls_do_what_they_are_named_for) {
  const int fd = with_stale_errno([&] { return open_file(); });
  ASSERT_GE(fd, 0);
  constexpr std::array<std::byte, 4> written{std::byte{1}, std::byte{2}, std::byte{3},
                                             std::byte{4}};
  std::array<std::byte, 16> read{};
  EXPECT_EQ(with_stale_errno([&] { return system_.fallocate(fd, 0, 0, page_bytes()); }), 0);
  EXPECT_EQ(with_stale_errno([&] { return system_.pwrite(fd, written.data(), 4, page_bytes()); }),
            4);
  EXPECT_EQ(with_stale_errno([&] { return system_.fdatasync(fd); }), 0);
  EXPECT_EQ(with_stale_errno([&] { return system_.fsync(fd); }), 0);
  EXPECT_EQ(with_stale_errno([&] { return system_.pread(fd, read.data(), 16, page_bytes()); }), 4);
  EXPECT_EQ(std::memcmp(read.data(), written.data(), 4), 0);
  EXPECT_EQ(with_stale_errno([&] { return system_.pread(fd, read.data(), 16, GiB); }), 0);

  struct statx facts{};
  EXPECT_EQ(with_stale_errno([&] { return system_.statx(fd, STATX_SIZE, &facts); }), 0);
  EXPECT_EQ(facts.stx_size, page_bytes() + 4);
  struct statfs volume{};
  EXPECT_EQ(with_stale_errno([&] { return system_.statfs(fd, &volume); }), 0);
  EXPECT_GT(volume.f_bsize, 0u);
  std::uint64_t bytes = 0;
  EXPECT_EQ(with_stale_errno([&] { return system_.block_device_bytes(fd, &bytes); }), -ENOTTY);
  EXPECT_EQ(system_.close(fd), 0);
}

TEST_F(SystemTest, duplicate_is_closed_on_exec_and_shares_the_flags) {
  const int fd = system_.open(path_.c_str(), O_WRONLY | O_APPEND, 0);
  const int copy = system_.duplicate(fd);
  ASSERT_GE(copy, 0);
  EXPECT_NE(copy, fd);
  EXPECT_EQ(system_.flags(copy), system_.flags(fd));
  EXPECT_EQ(system_.flags(copy) & (O_ACCMODE | O_APPEND), O_WRONLY | O_APPEND);
  EXPECT_EQ(fcntl(copy, F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(system_.close(fd), 0);
  EXPECT_EQ(system_.close(copy), 0);
}

TEST_F(SystemTest, mapped_memory_is_zeroed_and_can_be_locked_and_given_back) {
  std::byte* const memory = with_stale_errno([&] { return system_.map(4 * page_bytes()); });
  ASSERT_NE(memory, nullptr);
  EXPECT_TRUE(is_aligned(memory, page_bytes()));
  for (std::size_t at = 0; at < 4 * page_bytes(); ++at) ASSERT_EQ(memory[at], std::byte{0});
  EXPECT_EQ(with_stale_errno([&] { return system_.advise(memory, page_bytes(), MADV_DONTNEED); }),
            0);
  const int locked = system_.lock(memory, page_bytes());
  EXPECT_TRUE(locked == 0 || locked == -ENOMEM || locked == -EPERM) << locked;
  EXPECT_EQ(with_stale_errno([&] { return system_.unmap(memory, 4 * page_bytes()); }), 0);
}

TEST_F(SystemTest, a_replaced_call_is_reached_through_the_seam) {
  class Failing : public System {
   public:
    int fsync(int) override { return -EIO; }
  };
  Failing failing;
  System& system = failing;
  EXPECT_EQ(system.fsync(0), -EIO);
}

TEST(ReadText, of_a_missing_file_is_empty) {
  EXPECT_EQ(read_text("/nonexistent/file"), "");
  EXPECT_EQ(read_text(""), "");
}

TEST(LastLevelCache, is_the_largest_that_is_told) {
  const support::TempDir dir;
  const auto tell = [&](const std::string& index, const std::string& text) {
    std::filesystem::create_directory(dir.file(index));
    std::ofstream(dir.file(index + "/size")) << text;
  };
  EXPECT_EQ(last_level_cache_bytes(dir.path()), 32 * MiB) << "nothing is told";
  tell("index0", "48K\n");
  EXPECT_EQ(last_level_cache_bytes(dir.path()), 48 * KiB);
  tell("index3", "36864K\n");
  tell("index2", "1280K\n");
  EXPECT_EQ(last_level_cache_bytes(dir.path()), 36 * MiB);
  tell("index4", "nonsense");
  tell("index5", "-1K");
  tell("index6", "99999999999999999999K");
  tell("index7", "12");
  EXPECT_EQ(last_level_cache_bytes(dir.path()), 36 * MiB);
  EXPECT_GT(last_level_cache_bytes(), 0U) << "of this machine";
}

TEST(ReadText, of_a_directory_is_empty) { EXPECT_EQ(read_text("/"), ""); }

TEST(ReadText, reads_files_that_know_no_size_and_are_longer_than_a_chunk) {
  const std::string text = read_text("/proc/self/smaps");
  EXPECT_GT(text.size(), 8192u);
  EXPECT_NE(text.find("Size:"), std::string::npos);
}

// Whether `check` holds in a child.
template <class Check>
bool holds_in_child(Check check) {
  const pid_t child = fork();
  if (child == 0) _exit(check() ? 0 : 1);
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

TEST(ForkGeneration, increments_in_a_child_and_not_in_the_parent) {
  const std::uint64_t before = fork_generation();
  EXPECT_TRUE(holds_in_child([before] { return fork_generation() == before + 1; }));
  EXPECT_EQ(fork_generation(), before);
}

TEST(ForkGeneration, counts_every_fork_that_led_to_a_process) {
  const std::uint64_t before = fork_generation();
  EXPECT_TRUE(holds_in_child([before] {
    return holds_in_child([before] { return fork_generation() == before + 2; }) &&
           fork_generation() == before + 1;
  }));
}

TEST(ReadLink, gives_the_target_and_nothing_for_what_is_no_link) {
  EXPECT_EQ(read_link("/proc/self"), std::to_string(getpid()));
  EXPECT_EQ(read_link("/"), "");
  EXPECT_EQ(read_link("/nonexistent/link"), "");
}

TEST(MemlockLimit, is_the_soft_limit) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  EXPECT_EQ(memlock_limit_bytes(), limit.rlim_cur);
}

// A directory in which somebody else has made files.
class OwnFile : public testing::Test {
 protected:
  [[nodiscard]] static std::string text_of(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  [[nodiscard]] static mode_t mode_of(const std::string& path) {
    struct stat facts{};
    EXPECT_EQ(::stat(path.c_str(), &facts), 0);
    return facts.st_mode & 07777U;
  }
  [[nodiscard]] std::size_t entries() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(dir.path()),
                                                  std::filesystem::directory_iterator()));
  }

  support::TempDir dir;
  const std::string path = dir.file("file");
  const std::string other = dir.file("other");
};

TEST_F(OwnFile, is_made_for_its_owner_alone_and_begun_anew) {
  const mode_t before = ::umask(0);
  for (int round = 0; round < 2; ++round) {
    const int fd = open_own_file(path);
    ASSERT_GE(fd, 0);
    EXPECT_EQ(text_of(path), "");
    EXPECT_EQ(write_all(fd, "text", 0), 0);
    ::close(fd);
    EXPECT_EQ(mode_of(path), 0600U);
  }
  ::umask(before);
  EXPECT_EQ(text_of(path), "text");
}

TEST_F(OwnFile, is_for_nobody_elses_eyes_whatever_it_was_before) {
  std::ofstream(path) << "text";
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  const int fd = open_own_file(path);
  ASSERT_GE(fd, 0);
  ::close(fd);
  EXPECT_EQ(mode_of(path), 0600U);
}

TEST_F(OwnFile, is_no_link) {
  std::ofstream(other) << "text";
  ASSERT_EQ(::symlink(other.c_str(), path.c_str()), 0);
  EXPECT_EQ(open_own_file(path), -ELOOP);
  EXPECT_EQ(text_of(other), "text");
  ASSERT_EQ(::unlink(other.c_str()), 0);
  EXPECT_EQ(open_own_file(path), -ELOOP);
  EXPECT_FALSE(std::filesystem::exists(other)) << "made through a link";
}

TEST_F(OwnFile, has_one_name) {
  std::ofstream(other) << "text";
  ASSERT_EQ(::link(other.c_str(), path.c_str()), 0);
  EXPECT_EQ(open_own_file(path), -EMLINK);
  EXPECT_EQ(text_of(other), "text");
}

TEST_F(OwnFile, is_a_regular_file_that_nobody_is_waited_for) {
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(open_own_file(path), -ENXIO);
  EXPECT_EQ(open_own_file("/dev/null"), -EINVAL);
  EXPECT_EQ(open_own_file(dir.path()), -EISDIR);
}

TEST_F(OwnFile, belongs_to_this_user) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  std::ofstream(path) << "text";
  ASSERT_EQ(::chown(path.c_str(), 1234, 1234), 0);
  EXPECT_EQ(open_own_file(path), -EPERM);
  EXPECT_EQ(text_of(path), "text");
}

TEST_F(OwnFile, that_is_replaced_leaves_nothing_beside_it) {
  const mode_t before = ::umask(027);
  EXPECT_EQ(replace_file(path, "old", 0666), 0);
  EXPECT_EQ(replace_file(path, "text", 0666), 0);
  ::umask(before);
  EXPECT_EQ(text_of(path), "text");
  EXPECT_EQ(mode_of(path), 0640U);
  EXPECT_EQ(entries(), 1U);
}

TEST_F(OwnFile, that_cannot_be_replaced_stays_and_leaves_nothing_beside_it) {
  ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
  EXPECT_EQ(replace_file(path, "text", 0666), -EISDIR);
  EXPECT_EQ(entries(), 1U);
  EXPECT_EQ(replace_file(dir.file("missing/file"), "text", 0666), -ENOENT);
}

}  // namespace
}  // namespace tensorferry::os
