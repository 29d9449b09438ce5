// A new file is there as a whole or not at all, whatever fails.
#include "checkpoint/hidden_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>

#include "base/alignment.h"
#include "os/system.h"
#include "support/pattern.h"
#include "support/temp_dir.h"
#include "support/thrown.h"
#include "tensorferry/checkpoint.h"
#include "tensorferry/handle.h"

namespace tensorferry::checkpoint {
namespace {

using support::error_of;

class HiddenFileTest : public ::testing::Test {
 protected:
  void write(const NewFile& target, std::string_view text) {
    handle.write_now(std::as_bytes(std::span(text)), target.file());
  }
  [[nodiscard]] static std::string text_of(const std::string& file) {
    const auto bytes = support::read_whole_file(file);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(dir.path())) {
      found.push_back(entry.path().filename());
    }
    std::ranges::sort(found);
    return found;
  }
  static void make(const std::string& file, std::string_view text) {
    support::write_whole_file(file, std::as_bytes(std::span(text)));
  }

  support::TempDir dir;
  Handle handle;
  const std::string path = dir.file("model");
};

TEST_F(HiddenFileTest, takes_its_name_when_it_is_committed) {
  NewFile target = NewFile::create(path);
  EXPECT_EQ(target.path(), path);
  write(target, "new");
  EXPECT_FALSE(std::filesystem::exists(path));
  target.commit();
  EXPECT_EQ(text_of(path), "new");
  EXPECT_EQ(names(), std::vector<std::string>{"model"});
  EXPECT_EQ(error_of([&] { target.commit(); }).code(), EINVAL);
}

TEST_F(HiddenFileTest, leaves_the_old_file_alone_until_then) {
  make(path, "old and longer");
  {
    const NewFile target = NewFile::create(path);
    write(target, "new");
    EXPECT_EQ(text_of(path), "old and longer");
  }
  EXPECT_EQ(text_of(path), "old and longer");
  EXPECT_EQ(names(), std::vector<std::string>{"model"}) << "nothing is left of one that ends early";
  NewFile target = NewFile::create(path);
  write(target, "new");
  target.commit();
  EXPECT_EQ(text_of(path), "new");
}

TEST_F(HiddenFileTest, has_its_space_before_its_bytes_if_that_is_reserved) {
  constexpr std::uint64_t bytes = 3 * MiB;
  NewFile target = NewFile::create(path);
  if (!target.file().direct()) GTEST_SKIP() << "the file system has no direct I/O";
  target.reserve(bytes);
  EXPECT_EQ(target.file().size(), bytes);
  EXPECT_EQ(std::filesystem::file_size(target.file().path()), bytes);
  write(target, "new");
  target.commit();
  EXPECT_EQ(std::filesystem::file_size(path), bytes);
  NewFile too_long = NewFile::create(path);
  too_long.reserve(std::uint64_t{1} << 60);
  EXPECT_EQ(too_long.file().size(), 0U) << "writes tell that there is no space";
}

TEST_F(HiddenFileTest, passes_on_the_mode_of_the_file_it_replaces) {
  for (const mode_t mode : {0600U, 0644U, 0666U, 0444U, 0400U}) {
    make(path, "old");
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    NewFile target = NewFile::create(path);
    write(target, "new");
    target.commit();
    struct stat facts{};
    ASSERT_EQ(::stat(path.c_str(), &facts), 0);
    EXPECT_EQ(facts.st_mode & 07777U, mode);
    EXPECT_EQ(text_of(path), "new");
    ASSERT_EQ(::unlink(path.c_str()), 0);
  }
  const mode_t before = ::umask(027);
  NewFile::create(path).commit();
  ::umask(before);
  struct stat facts{};
  ASSERT_EQ(::stat(path.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 07777U, 0640U) << "a new one follows the umask";
}

TEST_F(HiddenFileTest, a_link_stays_and_its_target_is_replaced) {
  std::filesystem::create_directory(dir.file("folder"));
  make(dir.file("folder/target"), "old");
  std::filesystem::create_symlink("folder/target", path);
  NewFile target = NewFile::create(path);
  write(target, "new");
  target.commit();
  EXPECT_TRUE(std::filesystem::is_symlink(path));
  EXPECT_EQ(text_of(dir.file("folder/target")), "new");
  const std::string broken = dir.file("broken");
  std::filesystem::create_symlink("nowhere", broken);
  EXPECT_EQ(error_of([&] { (void)NewFile::create(broken); }).code(), ENOENT);
}

TEST_F(HiddenFileTest, what_cannot_be_replaced_is_refused) {
  const auto code = [](const std::string& wrong) {
    const Error error = error_of([&] { (void)NewFile::create(wrong); });
    EXPECT_NE(error.hint(), "") << error.what();
    return error.code();
  };
  EXPECT_EQ(code(""), ENOENT);
  EXPECT_EQ(code(dir.path()), EISDIR);
  EXPECT_EQ(code(std::string(dir.path()) + "/"), EISDIR);
  EXPECT_EQ(code(dir.file("no/such/folder")), ENOENT);
  EXPECT_EQ(code("/dev/null"), EINVAL);
  ASSERT_EQ(::mkfifo(dir.file("fifo").c_str(), 0600), 0);
  EXPECT_EQ(code(dir.file("fifo")), EINVAL);
}

TEST_F(HiddenFileTest, files_that_killed_processes_left_are_removed_by_the_next_one) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const NewFile left = NewFile::create(path);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_EQ(names().size(), 1U);
  make(dir.file("other.tensorferry"), "somebody else's");
  const NewFile living = NewFile::create(path);
  ASSERT_EQ(names().size(), 2U) << "the abandoned one is gone";
  const NewFile second = NewFile::create(path);
  EXPECT_EQ(names().size(), 3U) << "one whose maker lives stays";
  const NewFile longer = NewFile::create(path + ".index");
  EXPECT_EQ(names().size(), 4U);
}

TEST_F(HiddenFileTest, a_forked_child_removes_nothing) {
  NewFile target = NewFile::create(path);
  write(target, "new");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    {
      const NewFile inherited = std::move(target);
    }
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  target.commit();
  EXPECT_EQ(text_of(path), "new");
}

TEST_F(HiddenFileTest, the_longest_name_works) {
  const std::string longest = dir.file(std::string(255, 'x'));
  NewFile target = NewFile::create(longest);
  write(target, "new");
  target.commit();
  EXPECT_EQ(text_of(longest), "new");
}

// Fails one kind of call.
class FaultySystem final : public os::System {
 public:
  enum class Fault { none, sync_file, sync_directory, rename, open, create };
  int fsync(int fd) override {
    struct stat facts{};
    (void)::fstat(fd, &facts);
    const bool directory = S_ISDIR(facts.st_mode);
    ++(directory ? directory_syncs : file_syncs);
    if (fault == (directory ? Fault::sync_directory : Fault::sync_file)) return -EIO;
    return System::fsync(fd);
  }
  int rename_at(int directory, const char* name, const char* new_name) override {
    if (fault == Fault::rename) return -EIO;
    EXPECT_EQ(file_syncs, 1) << "the bytes are on the drive before the name";
    return System::rename_at(directory, name, new_name);
  }
  int open_at(int directory, const char* name, int flags, mode_t mode) override {
    if (fault == Fault::create && (flags & O_CREAT) != 0) return -ENOSPC;
    return System::open_at(directory, name, flags, mode);
  }
  Fault fault = Fault::none;
  int file_syncs = 0;
  int directory_syncs = 0;
};

TEST_F(HiddenFileTest, a_failure_is_reported_once_and_leaves_the_old_file_and_nothing_else) {
  using Fault = FaultySystem::Fault;
  for (const Fault fault : {Fault::sync_file, Fault::rename, Fault::create}) {
    make(path, "old");
    FaultySystem system;
    system.fault = fault;
    {
      auto made = HiddenFile::create(system, path, 0666);
      if (fault == Fault::create) {
        ASSERT_FALSE(made.ok());
        EXPECT_EQ(made.error().code(), ENOSPC);
      } else {
        ASSERT_TRUE(made.ok());
        const Status done = made.value()->commit();
        ASSERT_FALSE(done.ok());
        EXPECT_EQ(done.error().code(), EIO);
        EXPECT_EQ(done.error().path(), path);
        EXPECT_LE(system.file_syncs, 1) << "a failed sync is never repeated";
      }
    }
    EXPECT_EQ(text_of(path), "old");
    EXPECT_EQ(names(), std::vector<std::string>{"model"});
  }
}

TEST_F(HiddenFileTest, a_directory_that_cannot_be_synced_is_an_error) {
  FaultySystem system;
  system.fault = FaultySystem::Fault::sync_directory;
  auto made = HiddenFile::create(system, path, 0666);
  ASSERT_TRUE(made.ok());
  const Status done = made.value()->commit();
  ASSERT_FALSE(done.ok());
  EXPECT_EQ(done.error().code(), EIO);
  EXPECT_EQ(system.directory_syncs, 1);
}

}  // namespace
}  // namespace tensorferry::checkpoint
