#include "bench/run/scratch.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "bench/run/sizes.h"
#include "tensorferry/error.h"

namespace tensorferry::bench {
namespace {

namespace fs = std::filesystem;

class ScratchTest : public testing::Test {
 protected:
  ScratchTest() {
    std::string pattern = (fs::temp_directory_path() / "scratch_test.XXXXXX").string();
    directory_ = mkdtemp(pattern.data());
  }
  ~ScratchTest() override {
    std::error_code ignored;
    fs::remove_all(directory_, ignored);
  }
  fs::path directory_;
};

TEST_F(ScratchTest, removes_what_it_made_and_nothing_else) {
  std::ofstream(directory_ / "precious") << "data";
  std::string made;
  {
    const Scratch scratch(directory_, MiB);
    made = scratch.path();
    EXPECT_TRUE(fs::is_directory(made));
    std::ofstream(scratch.file("a")) << "x";
  }
  EXPECT_FALSE(fs::exists(made));
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1);
}

TEST_F(ScratchTest, two_at_once_do_not_meet) {
  const Scratch one(directory_, 0);
  const Scratch other(directory_, 0);
  EXPECT_NE(one.path(), other.path());
}

TEST_F(ScratchTest, says_what_is_missing) {
  const auto code_of = [](const std::string& directory, std::uint64_t bytes) {
    try {
      const Scratch scratch(directory, bytes);
    } catch (const Error& error) {
      return error.code();
    }
    return 0;
  };
  std::ofstream(directory_ / "file") << "x";
  EXPECT_EQ(code_of(directory_ / "nowhere", 0), ENOENT);
  EXPECT_EQ(code_of(directory_ / "file", 0), ENOTDIR);
  EXPECT_EQ(code_of(directory_, std::uint64_t{1} << 60), ENOSPC);
}

}  // namespace
}  // namespace tensorferry::bench
