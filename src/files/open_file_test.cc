// Files by path and by descriptor: how they open, which ones are refused and with which words, and
// that no descriptor stays open. Runs on the disk of the working directory.
#include "files/open_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/alignment.h"
#include "files/open_file_fixture.h"
#include "support/child.h"
#include "support/faulty_system.h"
#include "support/loop_device.h"
#include "support/pattern.h"
#include "support/temp_dir.h"
#include "tensorferry/error.h"

namespace tensorferry::files {
namespace {

using support::Call;

// --- By path ---------------------------------------------------------------------------------

TEST_F(OpenFileTest, an_existing_file_keeps_its_bytes) {
  const std::string path = make_file("data");
  for (const Access access : {Access::read, Access::write, Access::read_write}) {
    const File file = File::open(path, access);
    EXPECT_EQ(file.path(), path);
    EXPECT_EQ(file.size(), 10'000U);
    EXPECT_EQ(file.opened()->readable(), access != Access::write);
    EXPECT_EQ(file.opened()->writable(), access != Access::read);
  }
  EXPECT_EQ(support::pattern_fault(support::read_whole_file(path), 0, 1), "");
}

TEST_F(OpenFileTest, the_size_is_that_of_now) {
  const std::string path = make_file("data");
  const File file = File::open(path, Access::read);
  ASSERT_EQ(::truncate(path.c_str(), 77), 0);
  EXPECT_EQ(file.size(), 77U);
}

TEST_F(OpenFileTest, a_new_file_has_the_mode_that_the_umask_leaves) {
  for (const mode_t mask : {0000U, 0022U, 0027U, 0077U}) {
    const std::string path = dir.file("new" + std::to_string(mask));
    const mode_t before = ::umask(mask);
    (void)File::open(path, mask == 0027 ? Access::write : Access::read_write);
    ::umask(before);
    EXPECT_EQ(facts_of(path).st_mode & 07777U, 0666U & ~mask);
    EXPECT_EQ(facts_of(path).st_size, 0);
  }
}

TEST_F(OpenFileTest, reading_never_creates) {
  EXPECT_EQ(opening(dir.file("missing"), Access::read).code(), ENOENT);
  EXPECT_FALSE(std::filesystem::exists(dir.file("missing")));
}

TEST_F(OpenFileTest, a_link_is_followed) {
  make_file("data");
  ASSERT_EQ(::symlink("data", dir.file("link").c_str()), 0);
  EXPECT_EQ(File::open(dir.file("link"), Access::read).size(), 10'000U);
}

TEST_F(OpenFileTest, alignment_is_what_the_kernel_says) {
  const std::string path = make_file("data");
  const File file = File::open(path, Access::read);
  struct statx facts{};
  ASSERT_EQ(::statx(AT_FDCWD, path.c_str(), 0, STATX_DIOALIGN, &facts), 0);
  if ((facts.stx_mask & STATX_DIOALIGN) == 0 || facts.stx_dio_offset_align == 0) {
    GTEST_SKIP() << "the kernel does not say for this file system";
  }
  EXPECT_TRUE(file.direct());
  EXPECT_EQ(file.direct_reason(), "");
  EXPECT_EQ(file.memory_alignment(), facts.stx_dio_mem_align);
  EXPECT_EQ(file.offset_alignment(), facts.stx_dio_offset_align);
  EXPECT_GE(file.block_bytes(), 256 * KiB);
  EXPECT_LE(file.block_bytes(), MiB);
}

TEST_F(OpenFileTest, a_file_system_in_memory_is_buffered_and_says_so) {
  if (const auto reason = support::mounts_unavailable_reason(); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  const support::Mount mount("tmpfs");
  const File file = File::open(mount.file("data"), Access::read_write);
  EXPECT_FALSE(file.direct());
  EXPECT_NE(file.direct_reason(), "");
  EXPECT_EQ(file.memory_alignment(), 1U);
  EXPECT_EQ(file.offset_alignment(), 1U);
  EXPECT_EQ(file.opened()->direct_fd(), -1);
  EXPECT_EQ(file.opened()->buffered_fd().or_throw(), file.opened()->main_fd());
}

// --- Refused by path -------------------------------------------------------------------------

TEST_F(OpenFileTest, what_is_no_file_is_refused_with_a_hint) {
  make_file("data");
  ASSERT_EQ(::symlink("self", dir.file("self").c_str()), 0);
  ASSERT_EQ(::symlink("nowhere", dir.file("dangling").c_str()), 0);
  struct Wrong {
    std::string path;
    int code;
    const char* hint;
  };
  const std::vector<Wrong> all{
      {dir.path(), EISDIR, "directory"},
      {dir.file("missing"), ENOENT, "no such file"},
      {dir.file("dangling"), ENOENT, "no such file"},
      {dir.file("self"), ELOOP, "symbolic links"},
      {dir.file("data/below"), ENOTDIR, "not a directory"},
      {dir.file(std::string(300, 'x')), ENAMETOOLONG, "too long"},
      {dir.file(std::string("a\0b", 3)), EINVAL, "NUL"},
      {"/dev/null", EINVAL, "neither a regular file nor a block device"},
      {"/dev/zero", EINVAL, "neither a regular file nor a block device"},
      {"", ENOENT, "no such file"},
  };
  for (const Wrong& wrong : all) {
    const Error error = opening(wrong.path, Access::read);
    EXPECT_EQ(error.code(), wrong.code) << error.what();
    EXPECT_EQ(error.operation(), "open");
    EXPECT_EQ(error.path(), wrong.path);
    EXPECT_NE(error.hint().find(wrong.hint), std::string::npos) << error.what();
  }
}

TEST_F(OpenFileTest, what_cannot_be_written_is_refused_with_a_hint) {
  make_file("data");
  for (const Access access : {Access::write, Access::read_write}) {
    EXPECT_EQ(opening(dir.path(), access).code(), EISDIR);
    EXPECT_EQ(opening("/dev/null", access).code(), EINVAL);
    EXPECT_EQ(opening(dir.file("data/below"), access).code(), ENOTDIR);
    const Error error = opening(dir.file("missing/data"), access);
    EXPECT_EQ(error.code(), ENOENT);
    EXPECT_NE(error.hint().find("the directory does not exist"), std::string::npos);
  }
}

TEST_F(OpenFileTest, a_fifo_and_a_socket_are_refused_and_nobody_waits) {
  ASSERT_EQ(::mkfifo(dir.file("fifo").c_str(), 0666), 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  std::snprintf(address.sun_path, sizeof address.sun_path, "socket-%d", ::getpid());
  const Descriptor socket(::socket(AF_UNIX, SOCK_STREAM, 0));
  ASSERT_EQ(::bind(socket.number(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const auto result = support::run_in_child(
      [&]() -> std::string {
        for (const std::string& path : {dir.file("fifo"), std::string(address.sun_path)}) {
          for (const Access access : {Access::read, Access::write, Access::read_write}) {
            const Error error = opening(path, access);
            if (error.code() != EINVAL || error.hint().empty() || error.path() != path) {
              return error.what();
            }
          }
        }
        return {};
      },
      std::chrono::seconds(30));
  ::unlink(address.sun_path);
  EXPECT_TRUE(result.passed()) << result;
}

TEST_F(OpenFileTest, lack_of_permission_is_named_with_a_hint) {
  if (::geteuid() != 0) GTEST_SKIP() << "becoming another user needs root";
  make_file("private");
  make_file("readable");
  ASSERT_EQ(::chmod(dir.path().c_str(), 0755), 0);
  ASSERT_EQ(::chmod(dir.file("private").c_str(), 0600), 0);
  ASSERT_EQ(::chmod(dir.file("readable").c_str(), 0644), 0);
  const auto result = support::run_in_child([&]() -> std::string {
    if (::chdir(dir.path().c_str()) != 0) return "could not go there";
    if (auto fault = support::become_nobody(); !fault.empty()) return fault;
    const std::size_t before = open_descriptors();
    struct Wrong {
      const char* path;
      Access access;
      const char* hint;
    };
    for (const Wrong& wrong : {Wrong{"private", Access::read, "permission to read"},
                               Wrong{"private", Access::read_write, "permission to write"},
                               Wrong{"readable", Access::write, "permission to write"},
                               Wrong{"new", Access::write, "permission to write"}}) {
      const Error error = opening(wrong.path, wrong.access);
      if (error.code() != EACCES || error.path() != wrong.path || error.operation() != "open" ||
          error.hint().find(wrong.hint) == std::string::npos) {
        return std::string(wrong.path) + ": " + error.what();
      }
    }
    if (File::open("readable", Access::read).size() != 10'000) return "cannot be read";
    return open_descriptors() == before ? "" : "a descriptor was left open";
  });
  EXPECT_TRUE(result.passed()) << result;
}

TEST_F(OpenFileTest, a_read_only_file_system_is_named_with_a_hint) {
  if (const auto reason = support::mounts_unavailable_reason(); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  const support::Mount mount("tmpfs");
  support::write_whole_file(mount.file("data"), support::pattern(100, 0, 1));
  ASSERT_EQ(::mount("tmpfs", mount.path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr), 0);
  for (const char* name : {"data", "new"}) {
    const Error error = opening(mount.file(name), Access::write);
    EXPECT_EQ(error.code(), EROFS) << error.what();
    EXPECT_NE(error.hint().find("read-only"), std::string::npos);
  }
  EXPECT_EQ(File::open(mount.file("data"), Access::read).size(), 100U);
}

// --- By descriptor ---------------------------------------------------------------------------

TEST_F(OpenFileTest, a_borrowed_descriptor_may_be_of_any_kind) {
  const std::string path = make_file("data");
  for (const int access : {O_RDONLY, O_WRONLY, O_RDWR}) {
    for (const int extra : {0, O_DIRECT, O_SYNC, O_NONBLOCK}) {
      Descriptor callers(path, access | extra);
      const File file = File::borrow(callers.number());
      callers.close();
      EXPECT_EQ(file.path(), path);
      EXPECT_EQ(file.size(), 10'000U);
      EXPECT_EQ(file.opened()->readable(), access != O_WRONLY);
      EXPECT_EQ(file.opened()->writable(), access != O_RDONLY);
      EXPECT_EQ(file.direct(), File::open(path, Access::read).direct());
      EXPECT_EQ(file.offset_alignment(), File::open(path, Access::read).offset_alignment());
      EXPECT_EQ(facts_of(file.opened()->buffered_fd().or_throw()).st_ino, facts_of(path).st_ino);
      EXPECT_EQ(::fcntl(file.opened()->buffered_fd().or_throw(), F_GETFL) & O_DIRECT, 0);
    }
  }
  EXPECT_EQ(support::pattern_fault(support::read_whole_file(path), 0, 1), "");
}

TEST_F(OpenFileTest, the_callers_descriptor_stays_open_and_unchanged) {
  const std::string path = make_file("data");
  const Descriptor callers(path, O_RDWR);
  ASSERT_EQ(::lseek(callers.number(), 5, SEEK_SET), 5);
  const int flags = ::fcntl(callers.number(), F_GETFL);
  {
    const File file = File::borrow(callers.number());
  }
  EXPECT_EQ(::lseek(callers.number(), 0, SEEK_CUR), 5);
  EXPECT_EQ(::fcntl(callers.number(), F_GETFL), flags);
}

// Else io_uring would fail with EAGAIN instead of waiting.
TEST_F(OpenFileTest, a_borrowed_descriptor_that_does_not_wait_stays_so_and_ours_waits) {
  const std::string path = make_file("data");
  const std::size_t before = open_descriptors();
  for (const int direct : {0, O_DIRECT}) {
    const Descriptor callers(path, O_RDWR | O_NONBLOCK | direct);
    const File file = File::borrow(callers.number());
    EXPECT_EQ(::fcntl(file.opened()->main_fd(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_EQ(::fcntl(file.opened()->buffered_fd().or_throw(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(callers.number(), F_GETFL) & O_NONBLOCK, 0);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(OpenFileTest, a_file_without_a_name_can_be_borrowed) {
  const Descriptor callers(::memfd_create("nameless", 0));
  ASSERT_EQ(::ftruncate(callers.number(), 100), 0);
  const File file = File::borrow(callers.number());
  EXPECT_EQ(file.size(), 100U);
  EXPECT_FALSE(file.path().empty());
  EXPECT_EQ(file.opened()->directory().or_throw(), nullptr);
}

TEST_F(OpenFileTest, an_unusable_descriptor_is_refused_with_a_hint) {
  const std::string path = make_file("data");
  constexpr int closed = 500;  // a number that no descriptor has here
  int pipe_ends[2] = {-1, -1};
  ASSERT_EQ(::pipe(pipe_ends), 0);
  const Descriptor pipe_read(pipe_ends[0]);
  const Descriptor pipe_write(pipe_ends[1]);
  const Descriptor appending(path, O_WRONLY | O_APPEND);
  const Descriptor handle_only(path, O_PATH);
  const Descriptor directory(dir.path(), O_RDONLY | O_DIRECTORY);
  const Descriptor socket(::socket(AF_UNIX, SOCK_STREAM, 0));
  const Descriptor null("/dev/null", O_RDWR);
  struct Wrong {
    const char* what;
    int fd;
    int code;
    const char* hint;
  };
  for (const Wrong& wrong :
       {Wrong{"append", appending.number(), EINVAL, "O_APPEND"},
        Wrong{"path", handle_only.number(), EBADF, "O_PATH"},
        Wrong{"closed", closed, EBADF, "not open"}, Wrong{"minus one", -1, EBADF, "not open"},
        Wrong{"huge", 1 << 30, EBADF, "not open"},
        Wrong{"directory", directory.number(), EISDIR, "directory"},
        Wrong{"pipe", pipe_read.number(), EINVAL, "neither"},
        Wrong{"pipe end", pipe_write.number(), EINVAL, "neither"},
        Wrong{"socket", socket.number(), EINVAL, "neither"},
        Wrong{"null", null.number(), EINVAL, "neither"}}) {
    const Error error = error_of([&] { (void)File::borrow(wrong.fd); });
    EXPECT_EQ(error.code(), wrong.code) << wrong.what << ": " << error.what();
    EXPECT_NE(error.hint().find(wrong.hint), std::string::npos)
        << wrong.what << ": " << error.what();
    EXPECT_FALSE(error.operation().empty());
    EXPECT_FALSE(error.path().empty());
  }
}

// --- Descriptors -----------------------------------------------------------------------------

TEST_F(OpenFileTest, a_second_descriptor_is_opened_when_asked_for_and_once) {
  const std::string path = make_file("data");
  const std::size_t before = open_descriptors();
  const File file = File::open(path, Access::read_write);
  if (!file.direct()) GTEST_SKIP() << file.direct_reason();
  EXPECT_EQ(open_descriptors(), before + 1);
  const int buffered = file.opened()->buffered_fd().or_throw();
  EXPECT_EQ(open_descriptors(), before + 2);
  EXPECT_EQ(file.opened()->buffered_fd().or_throw(), buffered);
  EXPECT_EQ(open_descriptors(), before + 2);
  EXPECT_NE(::fcntl(file.opened()->direct_fd(), F_GETFL) & O_DIRECT, 0);
  EXPECT_EQ(::fcntl(buffered, F_GETFL) & O_DIRECT, 0);
  EXPECT_EQ(::fcntl(buffered, F_GETFL) & O_ACCMODE, O_RDWR);
  for (const int fd : {file.opened()->direct_fd(), buffered}) {
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0) << "programs started meanwhile inherit nothing";
  }
}

TEST_F(OpenFileTest, copies_share_one_open_file) {
  const std::string path = make_file("data");
  const std::size_t before = open_descriptors();
  auto file = std::make_unique<File>(File::open(path, Access::read));
  const File copy(*file);
  EXPECT_EQ(open_descriptors(), before + 1);
  file.reset();
  EXPECT_EQ(copy.size(), 10'000U);
}

TEST_F(OpenFileTest, many_threads_get_the_same_descriptor) {
  const std::string path = make_file("data");
  for (int round = 0; round < 50; ++round) {
    const std::size_t before = open_descriptors();
    const File file = File::open(path, Access::read);
    std::vector<int> got(8);
    std::vector<std::thread> threads;
    for (auto& mine : got) {
      threads.emplace_back([&mine, &file] { mine = file.opened()->buffered_fd().or_throw(); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const int one : got) ASSERT_EQ(one, got.front());
    ASSERT_LE(open_descriptors(), before + 2);
  }
}

TEST_F(OpenFileTest, is_cut_and_extended) {
  const std::string path = make_file("data");
  tensorferry::File file = tensorferry::File::open(path, Access::write);
  file.resize(100);
  EXPECT_EQ(support::read_whole_file(path), support::pattern(100, 0, 1));
  file.resize(5000);
  EXPECT_EQ(file.size(), 5000U);
  tensorferry::File reading = tensorferry::File::open(path, Access::read);
  try {
    reading.resize(0);
    ADD_FAILURE() << "cut through a descriptor for reading";
  } catch (const Error& error) {
    EXPECT_EQ(error.operation(), "resize");
    EXPECT_EQ(error.path(), path);
  }
  EXPECT_EQ(file.size(), 5000U);
}

TEST_F(OpenFileTest, a_deleted_file_still_works) {
  const std::string path = make_file("data");
  const File file = File::open(path, Access::read_write);
  ASSERT_EQ(::unlink(path.c_str()), 0);
  EXPECT_EQ(file.size(), 10'000U);
  std::byte first{};
  EXPECT_EQ(::pread(file.opened()->buffered_fd().or_throw(), &first, 1, 8), 1);
  EXPECT_EQ(first, support::pattern(1, 8, 1).front());
  EXPECT_FALSE(std::filesystem::exists(path)) << "and is not made anew";
}

TEST_F(OpenFileTest, a_renamed_file_still_works) {
  const std::string path = make_file("data");
  const File file = File::open(path, Access::read_write);
  std::filesystem::create_directory(dir.file("elsewhere"));
  std::filesystem::rename(path, dir.file("elsewhere/new"));
  make_file("data", 5);
  EXPECT_EQ(file.size(), 10'000U);
  const int buffered = file.opened()->buffered_fd().or_throw();
  EXPECT_EQ(facts_of(buffered).st_ino, facts_of(dir.file("elsewhere/new")).st_ino);
}

// --- Faults ----------------------------------------------------------------------------------

// If the Nth call of a kind fails, the result is an error or a fallback, and nothing stays open.
TEST_F(OpenFileTest, a_system_call_that_fails_leaves_nothing_open) {
  const std::string path = make_file("data");
  const Descriptor callers(path, O_RDWR);
  for (const Call call : {Call::open, Call::duplicate, Call::set_flags, Call::statx,
                          Call::stat_path, Call::stat_at, Call::statfs}) {
    for (std::uint64_t nth = 0; nth < 4; ++nth) {
      for (const int code : {EMFILE, EINVAL}) {
        const std::size_t before = open_descriptors();
        for (const bool borrowed : {false, true}) {
          support::FaultySystem system;
          system.add({.call = call, .first = nth, .error = code});
          auto opened = borrowed ? OpenFile::borrow(system, callers.number())
                                 : OpenFile::open(system, path, Access::read_write);
          if (opened.ok()) {
            EXPECT_EQ(opened.value()->direct(), opened.value()->direct_reason().empty())
                << "a fallback has a reason";
            (void)opened.value()->buffered_fd();
            (void)opened.value()->directory();
            (void)opened.value()->size();
          } else {
            EXPECT_EQ(opened.error().code(), code);
            EXPECT_EQ(opened.error().path(), path);
            EXPECT_FALSE(opened.error().operation().empty());
          }
          opened = Error({});
          ASSERT_EQ(open_descriptors(), before) << opened.error().what();
        }
      }
    }
  }
}

TEST_F(OpenFileTest, without_o_direct_the_file_is_buffered_with_a_reason) {
  const std::string path = make_file("data");
  support::FaultySystem system;
  system.add({.call = Call::open,
              .times = support::SystemRule::always,
              .open_flags = O_DIRECT,
              .error = EINVAL});
  const Descriptor callers(path, O_RDWR);
  for (const bool borrowed : {false, true}) {
    auto opened = borrowed ? OpenFile::borrow(system, callers.number())
                           : OpenFile::open(system, path, Access::read_write);
    ASSERT_TRUE(opened.ok());
    EXPECT_FALSE(opened.value()->direct());
    EXPECT_NE(opened.value()->direct_reason().find("O_DIRECT"), std::string::npos);
    EXPECT_EQ(opened.value()->offset_alignment(), 1U);
    EXPECT_EQ(opened.value()->size().or_throw(), 10'000U);
  }
}

// A system whose files need this alignment for O_DIRECT; 0: they do not support it.
class Aligned : public support::FaultySystem {
 public:
  explicit Aligned(unsigned alignment) : alignment_(alignment) {}
  int statx(int fd, unsigned mask, struct statx* facts) override {
    const int got = FaultySystem::statx(fd, mask, facts);
    facts->stx_mask |= STATX_DIOALIGN;
    facts->stx_dio_mem_align = facts->stx_dio_offset_align = alignment_;
    return got;
  }

 private:
  unsigned alignment_;
};

TEST_F(OpenFileTest, blocks_larger_than_a_slot_are_not_direct) {
  Aligned small(64 * KiB), large(128 * KiB);
  EXPECT_TRUE(OpenFile::open(small, make_file("data"), Access::read).or_throw()->direct());
  const auto file = OpenFile::open(large, make_file("data"), Access::read).or_throw();
  EXPECT_NE(file->direct_reason().find("131072"), std::string::npos) << file->direct_reason();
}

TEST_F(OpenFileTest, direct_in_name_only_is_buffered_or_an_error_and_never_direct) {
  const std::string path = make_file("data");
  Aligned system(0);
  const auto buffered = OpenFile::open(system, path, Access::read).or_throw();
  EXPECT_FALSE(buffered->direct());
  EXPECT_FALSE(buffered->direct_reason().empty());
  EXPECT_EQ(::fcntl(buffered->main_fd(), F_GETFL) & (O_DIRECT | O_NONBLOCK), 0);
  const std::size_t before = open_descriptors();
  system.add({.call = Call::set_flags, .first = system.calls(Call::set_flags), .error = EMFILE});
  const auto failed = OpenFile::open(system, path, Access::read);
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code(), EMFILE);
  EXPECT_EQ(open_descriptors(), before);
}

// The flags of a borrowed descriptor are the caller's.
TEST_F(OpenFileTest, borrowed_and_direct_in_name_only_it_is_opened_again_or_an_error) {
  const std::string path = make_file("data");
  const Descriptor callers(path, O_RDWR | O_DIRECT);
  if (callers.number() < 0) GTEST_SKIP() << "there is no O_DIRECT here";
  Aligned system(0);
  EXPECT_FALSE(OpenFile::borrow(system, callers.number()).or_throw()->direct());
  EXPECT_NE(::fcntl(callers.number(), F_GETFL) & O_DIRECT, 0);
  const std::size_t before = open_descriptors();
  system.add({.call = Call::open, .first = system.calls(Call::open), .error = EMFILE});
  const auto failed = OpenFile::borrow(system, callers.number());
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code(), EMFILE);
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(OpenFileTest, a_second_descriptor_that_failed_can_be_had_later) {
  support::FaultySystem system;
  const auto file = OpenFile::open(system, make_file("data"), Access::read).or_throw();
  const std::uint64_t opened = system.calls(Call::open);
  system.add({.call = Call::open, .first = opened, .error = EMFILE});
  const auto failed = file->buffered_fd();
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code(), EMFILE);
  EXPECT_FALSE(failed.error().hint().empty());
  EXPECT_TRUE(file->buffered_fd().ok());
  EXPECT_TRUE(file->direct()) << "it was not for good";
}

}  // namespace
}  // namespace tensorferry::files
