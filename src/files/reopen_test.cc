// Files that change between the look at a path and its opening, and files that cannot be opened a
// second time: nobody waits for ever, no other file is opened, and partial blocks can be written.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "files/open_file.h"
#include "files/open_file_fixture.h"
#include "support/child.h"
#include "support/loop_device.h"
#include "support/sanitizers.h"

namespace tensorferry::files {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

int flags_of(int fd) { return ::fcntl(fd, F_GETFL); }

class ReopenTest : public OpenFileTest {
 protected:
  // Run `body` as an ordinary user, or without /proc. It can make files in `dir`.
  support::ChildResult as_nobody(const std::function<std::string()>& body) {
    EXPECT_EQ(::chmod(dir.path().c_str(), 0777), 0);
    return support::run_in_child([&]() -> std::string {
      if (auto fault = support::become_nobody(); !fault.empty()) return fault;
      return body();
    });
  }
  static support::ChildResult without_proc(const std::function<std::string()>& body) {
    return support::run_in_child([&]() -> std::string {
      if (auto fault = support::hide_proc(); !fault.empty()) return fault;
      return body();
    });
  }
};

// --- Between the look and the opening ----------------------------------------------------------

// Calls `swap` after the look at the kind of a file.
class Swapping : public os::System {
 public:
  explicit Swapping(std::function<void()> swap) : swap_(std::move(swap)) {}
  int stat_path(const char* path, unsigned mask, struct statx* facts) override {
    const int got = System::stat_path(path, mask, facts);
    swap_();
    return got;
  }

 private:
  std::function<void()> swap_;
};

TEST_F(ReopenTest, a_fifo_that_takes_the_files_place_is_refused_and_nobody_waits) {
  const std::string path = dir.file("data");
  for (const Access access : {Access::read, Access::write, Access::read_write}) {
    make_file("data");
    Swapping system([&] {
      ::unlink(path.c_str());
      ::mkfifo(path.c_str(), 0666);
    });
    const auto child = support::run_in_child(
        [&]() -> std::string {
          const auto opened = OpenFile::open(system, path, access);
          if (opened.ok()) return "a FIFO was opened";
          const Error& error = opened.error();
          const bool told = (error.code() == EINVAL || error.code() == ENXIO) &&
                            contains(error.hint(), "regular file") && error.path() == path;
          return told ? "" : error.what();
        },
        std::chrono::seconds(20));
    EXPECT_TRUE(child.passed()) << child;
    ::unlink(path.c_str());
  }
}

TEST_F(ReopenTest, a_device_that_takes_the_files_place_is_refused_and_closed) {
  const std::string path = make_file("data");
  Swapping system([&] {
    ::unlink(path.c_str());
    EXPECT_EQ(::symlink("/dev/zero", path.c_str()), 0);
  });
  const auto opened = OpenFile::open(system, path, Access::read);
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().code(), EINVAL);
}

// Else io_uring would fail instead of waiting.
TEST_F(ReopenTest, what_was_opened_without_waiting_waits) {
  const std::string path = make_file("data");
  for (const Access access : {Access::read, Access::write, Access::read_write}) {
    const File file = File::open(path, access);
    EXPECT_EQ(flags_of(file.opened()->main_fd()) & O_NONBLOCK, 0);
    EXPECT_EQ((flags_of(file.opened()->main_fd()) & O_DIRECT) != 0, file.direct());
    EXPECT_EQ(flags_of(file.opened()->buffered_fd().or_throw()) & (O_NONBLOCK | O_DIRECT), 0);
  }
}

// File servers hold leases.
TEST_F(ReopenTest, a_lease_of_another_program_is_waited_for) {
  const std::string path = make_file("data");
  const auto child = support::run_in_child([&]() -> std::string {
    ::signal(SIGIO, SIG_IGN);  // NOLINT(cert-err33-c): cannot fail
    const Descriptor holder(path, O_RDWR);
    if (::fcntl(holder.number(), F_SETLEASE, F_WRLCK) != 0) return "cannot take a lease";
    std::thread server([&] {
      while (::fcntl(holder.number(), F_GETLEASE) == F_WRLCK) std::this_thread::yield();
      ::fcntl(holder.number(), F_SETLEASE, F_UNLCK);
    });
    const Error error = opening(path, Access::write);
    server.join();
    return error.code() == 0 ? "" : error.what();
  });
  EXPECT_TRUE(child.passed()) << child;
}

// --- A second time -----------------------------------------------------------------------------

// Empty if a partial block can be written and arrives.
std::string part_fault(const File& file) {
  const auto fd = file.opened()->buffered_fd();
  if (!fd.ok()) return fd.error().what();
  if ((flags_of(fd.value()) & O_DIRECT) != 0) return "the buffered descriptor is direct";
  if (::pwrite(fd.value(), "part", 4, 5) != 4) return "cannot be written";
  return file.size() == 9 ? "" : "the part did not arrive";
}

TEST_F(ReopenTest, a_file_made_read_only_is_direct_until_a_part_of_a_block_is_written) {
  if (::geteuid() != 0) GTEST_SKIP() << "becoming another user needs root";
  const bool can_be_direct = File::open(dir.file("trial"), Access::write).direct();
  const auto child = as_nobody([&]() -> std::string {
    for (const Access access : {Access::write, Access::read_write}) {
      const std::string path = dir.file(access == Access::write ? "write" : "both");
      const File file = File::open(path, access, 0444);
      if (file.direct() != can_be_direct) return "not direct: " + file.direct_reason();
      if (auto fault = part_fault(file); !fault.empty()) return fault;
      if (file.direct_reason().empty()) return "no reason";
      if (file.direct() || file.offset_alignment() != 1) return "it is still direct";
      if (facts_of(path).st_mode % 01000 != 0444) return "the mode was changed";
      if (file.opened()->main_fd() != file.opened()->buffered_fd().or_throw()) return "two of them";
    }
    return {};
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(ReopenTest, a_file_made_read_only_in_memory_can_be_opened_and_written) {
  if (const auto reason = support::mounts_unavailable_reason(); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  const support::Mount mount("tmpfs");
  const std::string above = std::filesystem::path(mount.path()).parent_path();
  for (const std::string& path : {above, mount.path()}) ASSERT_EQ(::chmod(path.c_str(), 0777), 0);
  const auto child =
      as_nobody([&]() { return part_fault(File::open(mount.file("data"), Access::write, 0444)); });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(ReopenTest, what_lost_its_permission_after_it_was_opened_can_be_written) {
  if (::geteuid() != 0) GTEST_SKIP() << "becoming another user needs root";
  const auto child = as_nobody([&]() -> std::string {
    const File file = File::open(dir.file("data"), Access::read_write);
    if (::chmod(dir.file("data").c_str(), 0) != 0) return "chmod";
    return part_fault(file);
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(ReopenTest, without_proc_a_file_is_opened_again_by_its_path) {
  if (::geteuid() != 0) GTEST_SKIP() << "hiding /proc needs root";
  const auto child = without_proc([&]() -> std::string {
    const File file = File::open(dir.file("data"), Access::read_write);
    const bool was_direct = file.direct();
    if (auto fault = part_fault(file); !fault.empty()) return fault;
    return file.direct() == was_direct ? "" : "not direct any more: " + file.direct_reason();
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(ReopenTest, without_proc_and_with_another_file_at_its_path_a_file_can_be_written) {
  if (::geteuid() != 0) GTEST_SKIP() << "hiding /proc needs root";
  make_file("other", 77);
  const auto child = without_proc([&]() -> std::string {
    for (const bool replaced : {false, true}) {
      const File file = File::open(dir.file("data"), Access::read_write);
      std::filesystem::rename(dir.file("data"), dir.file("moved"));
      if (replaced) std::filesystem::copy_file(dir.file("other"), dir.file("data"));
      const bool was_direct = file.direct();
      if (auto fault = part_fault(file); !fault.empty()) return fault;
      if (was_direct && !contains(file.direct_reason(), "/proc")) return file.direct_reason();
      std::filesystem::remove(dir.file("moved"));
    }
    return facts_of(dir.file("data")).st_size == 77 ? "" : "the wrong file was written";
  });
  EXPECT_TRUE(child.passed()) << child;
}

// Opens no file a second time while `stuck`.
struct Slow final : os::System {
  int open(const char* path, int flags, mode_t mode) override {
    if (std::string(path).starts_with("/proc/self/fd/")) {
      begun = true;
      while (stuck) std::this_thread::yield();
    }
    return System::open(path, flags, mode);
  }
  std::atomic<bool> begun{false};
  std::atomic<bool> stuck{true};
};

TEST_F(ReopenTest, a_forked_child_does_not_wait_for_a_thread_of_the_parent_that_does_it) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  Slow system;
  const auto file = OpenFile::open(system, dir.file("data"), Access::read_write, 0600).or_throw();
  if (!file->direct()) GTEST_SKIP() << file->direct_reason();
  std::thread other([&] { EXPECT_TRUE(file->buffered_fd().ok()); });
  while (!system.begun) std::this_thread::yield();
  const auto child = support::run_in_child(
      [&]() -> std::string {
        system.stuck = false;
        return part_fault(File(file));
      },
      std::chrono::seconds(20));
  EXPECT_TRUE(child.passed()) << child;
  system.stuck = false;
  other.join();
}

// --- Borrowed ----------------------------------------------------------------------------------

// Empty if partial blocks are refused with an error that contains `word`, and nothing has changed.
std::string refusal_fault(int callers, const std::string& word) {
  const int flags = flags_of(callers);
  const File file = File::borrow(callers);
  const auto fd = file.opened()->buffered_fd();
  if (fd.ok()) return "there is a second descriptor";
  if (!contains(fd.error().hint(), word) || !contains(fd.error().hint(), "O_DIRECT")) {
    return fd.error().what();
  }
  if (!file.direct()) return "whole blocks are not direct any more";
  return flags_of(callers) == flags ? "" : "the caller's flags were changed";
}

TEST_F(ReopenTest, of_a_borrowed_direct_descriptor_the_flags_are_the_callers) {
  if (::geteuid() != 0) GTEST_SKIP() << "becoming another user needs root";
  if (!File::open(dir.file("trial"), Access::write).direct()) GTEST_SKIP() << "no O_DIRECT here";
  auto child = as_nobody([&]() -> std::string {
    const Descriptor callers(
        ::open(dir.file("data").c_str(), O_CREAT | O_WRONLY | O_DIRECT | O_CLOEXEC, 0444));
    return refusal_fault(callers.number(), "mode");
  });
  EXPECT_TRUE(child.passed()) << child;
  child = without_proc([&] {
    const Descriptor callers(dir.file("data"), O_CREAT | O_RDWR | O_DIRECT);
    return refusal_fault(callers.number(), "/proc");
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(ReopenTest, a_borrowed_buffered_descriptor_needs_no_second_one) {
  if (::geteuid() != 0) GTEST_SKIP() << "becoming another user needs root";
  auto child = as_nobody([&]() -> std::string {
    const Descriptor callers(::open(dir.file("one").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0444));
    const File file = File::borrow(callers.number());
    if (!contains(file.direct_reason(), "EACCES")) return file.direct_reason();
    return part_fault(file);
  });
  EXPECT_TRUE(child.passed()) << child;
  child = without_proc([&]() -> std::string {
    const Descriptor callers(dir.file("two"), O_CREAT | O_RDWR);
    const File file = File::borrow(callers.number());
    if (!contains(file.direct_reason(), "/proc is not mounted")) return file.direct_reason();
    return part_fault(file);
  });
  EXPECT_TRUE(child.passed()) << child;
}

// Else io_uring would fail with EAGAIN again and again.
TEST_F(ReopenTest, a_borrowed_descriptor_that_can_only_not_wait_is_refused) {
  if (::geteuid() != 0) GTEST_SKIP() << "hiding /proc needs root";
  const auto child = without_proc([&]() -> std::string {
    const Descriptor callers(dir.file("data"), O_CREAT | O_RDWR | O_NONBLOCK);
    const Error error = error_of([&] { (void)File::borrow(callers.number()); });
    return contains(error.hint(), "O_NONBLOCK") ? "" : std::string("it said: ") + error.what();
  });
  EXPECT_TRUE(child.passed()) << child;
}

}  // namespace
}  // namespace tensorferry::files
