// What happens between looking at a path and having it open: nobody waits for ever, and nothing
// else is opened.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <functional>
#include <string>
#include <thread>

#include "files/open_file.h"
#include "files/open_file_fixture.h"
#include "support/child.h"

namespace tensorferry::files {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

int flags_of(int fd) { return ::fcntl(fd, F_GETFL); }

using ReopenTest = OpenFileTest;

// --- Between the look and the opening ----------------------------------------------------------

// Something else takes the file's place once its kind has been looked at.
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

// io_uring would fail where it has to wait.
TEST_F(ReopenTest, what_was_opened_without_waiting_waits) {
  const std::string path = make_file("data");
  for (const Access access : {Access::read, Access::write, Access::read_write}) {
    const File file = File::open(path, access);
    EXPECT_EQ(flags_of(file.opened()->main_fd()) & O_NONBLOCK, 0);
    EXPECT_EQ((flags_of(file.opened()->main_fd()) & O_DIRECT) != 0, file.direct());
    EXPECT_EQ(flags_of(file.opened()->buffered_fd().or_throw()) & (O_NONBLOCK | O_DIRECT), 0);
  }
}

// As file servers hold them.
TEST_F(ReopenTest, a_lease_of_another_program_is_waited_for) {
  const std::string path = make_file("data");
  const auto child = support::run_in_child([&]() -> std::string {
    ::signal(SIGIO, SIG_IGN);  // NOLINT(cert-err33-c): cannot fail
    const Descriptor holder(path, O_RDWR);
    if (::fcntl(holder.number(), F_SETLEASE, F_WRLCK) != 0) return "no lease to be had";
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

}  // namespace
}  // namespace tensorferry::files
