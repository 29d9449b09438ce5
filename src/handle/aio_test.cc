// The one-off functions and what they say when a file does not fit.
#include "tensorferry/aio.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>

#include "handle/handle_fixture.h"

namespace tensorferry::handle {
namespace {

class AioTest : public ::testing::Test {
 protected:
  support::TempDir dir;
  std::string path = dir.file("data");
};

TEST_F(AioTest, what_is_written_is_read_in_every_mode) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, 4097 * KiB}) {
    for (const bool single : {false, true}) {
      for (const bool overlap : {false, true}) {
        const auto source = support::pattern(size, 0, 3);
        std::vector<std::byte> target(size);
        AioElapsed elapsed;
        EXPECT_EQ(aio_write(source, path, 64 * KiB, 4, single, overlap, true, &elapsed), 0);
        EXPECT_GT(elapsed.transfer_us, 0);
        EXPECT_GE(elapsed.call_us, elapsed.transfer_us);
        EXPECT_EQ(aio_read(target, path, 64 * KiB, 4, single, overlap, true), 0);
        EXPECT_EQ(source, target);
        EXPECT_EQ(File::open(path, Access::read).size(), size);
      }
    }
  }
}

TEST_F(AioTest, a_longer_file_is_cut) {
  aio_write(support::pattern(2 * MiB, 0, 1), path);
  aio_write(support::pattern(1000, 0, 2), path);
  EXPECT_EQ(support::read_whole_file(path), support::pattern(1000, 0, 2));
}

TEST_F(AioTest, a_new_file_is_the_users_alone_and_an_old_one_stays_what_it_was) {
  const auto mode = [this] {
    struct stat facts{};
    EXPECT_EQ(::stat(path.c_str(), &facts), 0);
    return facts.st_mode & 07777U;
  };
  const mode_t before = ::umask(0022);
  aio_write(support::pattern(1000, 0, 1), path);
  EXPECT_EQ(mode(), 0600U);
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  aio_write(support::pattern(1000, 0, 2), path);
  EXPECT_EQ(mode(), 0644U);
  ::umask(before);
}

TEST_F(AioTest, a_file_of_another_size_is_an_error_that_names_both) {
  aio_write(support::pattern(1000, 0, 1), path);
  for (const std::size_t size : {std::size_t{0}, std::size_t{999}, std::size_t{1001}}) {
    std::vector<std::byte> target(size);
    try {
      aio_read(target, path);
      ADD_FAILURE() << "no error for " << size;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), EINVAL);
      EXPECT_EQ(error.path(), path);
      EXPECT_NE(error.hint().find("1000 bytes"), std::string::npos);
      EXPECT_NE(error.hint().find("buffer " + std::to_string(size)), std::string::npos);
    }
  }
}

TEST_F(AioTest, zero_settings_are_refused_before_anything_is_made) {
  const auto source = support::pattern(10, 0, 1);
  EXPECT_THROW(aio_write(source, path, 0), Error);
  EXPECT_THROW(aio_write(source, path, 4096, 0), Error);
  struct stat facts{};
  EXPECT_EQ(::stat(path.c_str(), &facts), -1);
}

TEST_F(AioTest, validation_finds_the_first_byte_that_differs) {
  const auto source = support::pattern(3 * MiB, 0, 1);
  aio_write(source, path);
  EXPECT_NO_THROW(validate(source, path));
  EXPECT_NO_THROW(validate(std::span(source).subspan(17, MiB), path, 17));
  for (const std::size_t at : {std::size_t{0}, MiB - 1, MiB, 3 * MiB - 1}) {
    auto changed = source;
    changed[at] ^= std::byte{1};
    try {
      validate(changed, path);
      ADD_FAILURE() << "no error at " << at;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), EBADMSG);
      EXPECT_EQ(error.offset(), at);
    }
  }
  try {
    validate(source, path, 1);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), EBADMSG);
  }
}

TEST_F(AioTest, a_file_that_ends_early_does_not_pass_for_valid) {
  const auto source = support::pattern(1000, 0, 1);
  aio_write(std::span(source).first(990), path);
  try {
    validate(source, path);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.offset(), 990U);
    EXPECT_NE(error.hint().find("ends here"), std::string::npos);
  }
}

}  // namespace
}  // namespace tensorferry::handle
