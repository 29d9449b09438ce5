// Which directory holds an open file now, after renames too, with /proc and without.
#include "files/directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <string>
#include <thread>

#include "files/open_file_fixture.h"
#include "support/child.h"
#include "support/faulty_system.h"

namespace tensorferry::files {
namespace {

using support::Call;

class DirectoryTest : public OpenFileTest {
 protected:
  void SetUp() override {
    for (const char* name : {"old", "new"}) std::filesystem::create_directory(dir.file(name));
  }

  // The inode of the directory that is found; 0 if none is.
  static ino_t found(const File& file) {
    const auto directory = file.opened()->directory().or_throw();
    return directory == nullptr ? 0 : facts_of(directory->fd()).st_ino;
  }
  ino_t inode(const std::string& name) { return facts_of(dir.file(name)).st_ino; }
};

TEST_F(DirectoryTest, is_where_the_file_is_now_after_each_rename) {
  const File file = File::open(make_file("old/data"), Access::read_write);
  EXPECT_EQ(found(file), inode("old"));
  std::filesystem::rename(dir.file("old/data"), dir.file("new/data"));
  EXPECT_EQ(found(file), inode("new"));
  std::filesystem::rename(dir.file("new"), dir.file("newer"));
  EXPECT_EQ(found(file), inode("newer"));
  std::filesystem::rename(dir.file("newer/data"), dir.file("old/again"));
  EXPECT_EQ(found(file), inode("old"));
}

TEST_F(DirectoryTest, is_closed_with_the_object_and_knows_itself) {
  const File file = File::open(make_file("old/data"), Access::read);
  const File other = File::open(make_file("old/other"), Access::read);
  const std::size_t before = open_descriptors();
  {
    const auto one = file.opened()->directory().or_throw();
    const auto two = other.opened()->directory().or_throw();
    EXPECT_EQ(open_descriptors(), before + 2);
    EXPECT_EQ(one->identity(), two->identity());
    EXPECT_EQ(one->identity().inode, inode("old"));
    EXPECT_NE(::fcntl(one->fd(), F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_EQ(one->path(), std::filesystem::canonical(dir.file("old")));
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(DirectoryTest, is_that_of_the_file_not_of_the_link_to_it) {
  make_file("new/data");
  ASSERT_EQ(::symlink("../new/data", dir.file("old/link").c_str()), 0);
  EXPECT_EQ(found(File::open(dir.file("old/link"), Access::read)), inode("new"));
}

TEST_F(DirectoryTest, a_deleted_file_has_none) {
  const File file = File::open(make_file("old/data"), Access::read_write);
  ASSERT_EQ(::unlink(dir.file("old/data").c_str()), 0);
  EXPECT_EQ(found(file), 0U) << "it has no entry to make durable";
}

// Nobody knows where the other link is; most likely beside the one that was removed.
TEST_F(DirectoryTest, with_its_link_gone_and_another_left_it_is_where_the_link_was) {
  const File file = File::open(make_file("old/data"), Access::read_write);
  ASSERT_EQ(::link(dir.file("old/data").c_str(), dir.file("new/link").c_str()), 0);
  EXPECT_EQ(found(file), inode("old"));
  ASSERT_EQ(::unlink(dir.file("old/data").c_str()), 0);
  EXPECT_EQ(found(file), inode("old"));
  ASSERT_EQ(::rmdir(dir.file("old").c_str()), 0);
  EXPECT_EQ(found(file), 0U);
}

TEST_F(DirectoryTest, a_name_that_only_looks_deleted_has_one) {
  EXPECT_EQ(found(File::open(make_file("old/data (deleted)"), Access::read)), inode("old"));
}

TEST_F(DirectoryTest, a_relative_path_has_one_too) {
  const std::string name = std::filesystem::relative(make_file("old/data")).string();
  const File file = File::open(name, Access::read);
  EXPECT_EQ(file.path(), name);
  EXPECT_EQ(found(file), inode("old"));
}

TEST_F(DirectoryTest, is_found_while_the_file_is_renamed_all_the_time) {
  const File file = File::open(make_file("old/data"), Access::read_write);
  std::atomic<bool> over{false};
  std::thread mover([&] {
    while (!over) {
      std::filesystem::rename(dir.file("old/data"), dir.file("new/data"));
      std::filesystem::rename(dir.file("new/data"), dir.file("old/data"));
    }
  });
  int unlucky = 0;
  for (int round = 0; round < 500; ++round) {
    const auto directory = file.opened()->directory();
    if (directory.ok()) {
      const ino_t inode_found = facts_of(directory.value()->fd()).st_ino;
      EXPECT_TRUE(inode_found == inode("old") || inode_found == inode("new"));
    } else {
      ++unlucky;
      EXPECT_EQ(directory.error().code(), ENOENT) << directory.error().what();
    }
  }
  over = true;
  mover.join();
  EXPECT_LT(unlucky, 500);
}

TEST_F(DirectoryTest, that_cannot_be_opened_is_an_error_that_names_it) {
  support::FaultySystem system;
  const auto file = OpenFile::open(system, make_file("old/data"), Access::read).or_throw();
  for (const int code : {EACCES, EMFILE}) {
    system.add({.call = Call::open,
                .times = support::SystemRule::always,
                .open_flags = O_DIRECTORY,
                .error = code});
    const auto failed = file->directory();
    ASSERT_FALSE(failed.ok());
    EXPECT_EQ(failed.error().code(), code);
    EXPECT_EQ(failed.error().path(), std::filesystem::canonical(dir.file("old")));
    EXPECT_FALSE(failed.error().hint().empty());
    system.clear_rules();
  }
  EXPECT_NE(file->directory().or_throw(), nullptr);
}

TEST_F(DirectoryTest, without_proc_it_is_found_by_the_path_as_long_as_the_file_is_there) {
  if (::geteuid() != 0) GTEST_SKIP() << "hiding /proc needs root";
  make_file("old/data");
  ASSERT_EQ(::symlink("old/data", dir.file("link").c_str()), 0);
  const auto child = support::run_in_child([&]() -> std::string {
    if (auto fault = support::hide_proc(); !fault.empty()) return fault;
    const File file = File::open(dir.file("link"), Access::read_write);
    if (found(file) != inode("old")) return "not found through the link";
    std::filesystem::rename(dir.file("old/data"), dir.file("new/data"));
    for (const bool replaced : {false, true}) {
      if (replaced) make_file("old/data", 5);
      const auto lost = file.opened()->directory();
      if (lost.ok()) return "a directory that does not hold the file";
      if (lost.error().hint().find("/proc is not mounted") == std::string::npos ||
          lost.error().path() != dir.file("link")) {
        return lost.error().what();
      }
    }
    std::filesystem::rename(dir.file("new/data"), dir.file("old/data"));
    return found(file) == inode("old") ? "" : "not found again";
  });
  EXPECT_TRUE(child.passed()) << child;
}

}  // namespace
}  // namespace tensorferry::files
