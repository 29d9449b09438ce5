// Profiles are saved, found again, and refused if damaged.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/alignment.h"
#include "files/device.h"
#include "support/temp_dir.h"
#include "tensorferry/error.h"

namespace tensorferry::files {
namespace {

namespace fs = std::filesystem;

class ProfileTest : public testing::Test {
 protected:
  ProfileTest() {
    const char* before = getenv("TENSORFERRY_PROFILES");
    if (before != nullptr) before_ = before;
    setenv("TENSORFERRY_PROFILES", dir_.file("profiles").c_str(), 1);
    device_.name = "nvme9n9";
    device_.identity = "eui.0025/3852 11";
  }
  ~ProfileTest() override {
    if (before_.empty()) {
      unsetenv("TENSORFERRY_PROFILES");
    } else {
      setenv("TENSORFERRY_PROFILES", before_.c_str(), 1);
    }
  }

  const support::TempDir dir_;
  std::string before_;
  Device device_;
};

TEST_F(ProfileTest, a_saved_profile_is_taken) {
  const std::string path = save_profile(device_, {EngineKind::libaio, 256 * KiB, 16, 2});
  EXPECT_EQ(path, dir_.file("profiles/eui.0025_3852_11.profile"));
  take_profile(device_);
  ASSERT_TRUE(device_.profile.has_value());
  EXPECT_EQ(device_.profile->engine, EngineKind::libaio);
  EXPECT_EQ(device_.profile->block_bytes, 256 * KiB);
  EXPECT_EQ(preferred_block_bytes(device_), 256 * KiB);
  EXPECT_EQ(device_.profile->queue_depth, 16U);
  EXPECT_EQ(device_.profile->workers, 2U);
  EXPECT_EQ(device_.profile_problem, "");
}

TEST_F(ProfileTest, measured_speeds_are_kept_and_taken) {
  save_profile(device_, {EngineKind::libaio, 256 * KiB, 16, 2, 3'000'000'000, 2'000'000'000});
  take_profile(device_);
  ASSERT_TRUE(device_.profile.has_value());
  EXPECT_EQ(device_.profile->read_bytes_per_second, 3'000'000'000U);
  EXPECT_EQ(device_.profile->write_bytes_per_second, 2'000'000'000U);
}

TEST_F(ProfileTest, a_profile_without_speeds_is_sound) {
  save_profile(device_, {EngineKind::libaio, 256 * KiB, 16, 2});
  take_profile(device_);
  ASSERT_TRUE(device_.profile.has_value());
  EXPECT_EQ(device_.profile->read_bytes_per_second, 0U);
  EXPECT_EQ(device_.profile->write_bytes_per_second, 0U);
}

TEST_F(ProfileTest, the_newer_profile_replaces_the_older) {
  save_profile(device_, {EngineKind::libaio, 256 * KiB, 16, 2});
  save_profile(device_, {EngineKind::io_uring, 512 * KiB, 8, 1});
  take_profile(device_);
  EXPECT_EQ(device_.profile->queue_depth, 8U);
}

TEST_F(ProfileTest, what_lies_beside_a_profile_is_neither_written_nor_followed) {
  const std::string path = save_profile(device_, {EngineKind::libaio, 256 * KiB, 16, 2});
  std::ofstream(dir_.file("precious")) << "text";
  // An earlier version used this name for the unfinished file.
  fs::create_symlink(dir_.file("precious"), path + ".new");
  save_profile(device_, {EngineKind::io_uring, 512 * KiB, 8, 1});
  std::string text;
  std::getline(std::ifstream(dir_.file("precious")), text);
  EXPECT_EQ(text, "text");
  EXPECT_TRUE(fs::is_symlink(path + ".new"));
  take_profile(device_);
  EXPECT_EQ(device_.profile->queue_depth, 8U);
}

TEST_F(ProfileTest, a_link_in_the_place_of_a_profile_is_replaced_and_not_followed) {
  const std::string path = profile_path(device_);
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream(dir_.file("precious")) << "text";
  fs::create_symlink(dir_.file("precious"), path);
  save_profile(device_, {EngineKind::io_uring, 512 * KiB, 8, 1});
  EXPECT_FALSE(fs::is_symlink(path));
  EXPECT_EQ(fs::file_size(dir_.file("precious")), 4U);
}

TEST_F(ProfileTest, another_device_has_none) {
  save_profile(device_, {EngineKind::libaio, 256 * KiB, 16, 2});
  Device other = device_;
  other.identity = "eui.1";
  take_profile(other);
  EXPECT_FALSE(other.profile);
  EXPECT_EQ(other.profile_problem, "");
}

TEST_F(ProfileTest, an_empty_variable_switches_profiles_off) {
  save_profile(device_, {EngineKind::libaio, 256 * KiB, 16, 2});
  setenv("TENSORFERRY_PROFILES", "", 1);
  take_profile(device_);
  EXPECT_FALSE(device_.profile);
  EXPECT_EQ(profile_path(device_), "");
  EXPECT_THROW(save_profile(device_, {}), Error);
}

TEST_F(ProfileTest, a_path_without_a_device_has_no_profile) { EXPECT_EQ(profile_path({}), ""); }

TEST_F(ProfileTest, a_place_that_cannot_be_made_is_an_error) {
  std::ofstream(dir_.file("file")) << "x";
  setenv("TENSORFERRY_PROFILES", dir_.file("file/profiles").c_str(), 1);
  EXPECT_THROW(save_profile(device_, {EngineKind::libaio, 256 * KiB, 16, 2}), Error);
}

class DamagedProfile : public ProfileTest, public testing::WithParamInterface<const char*> {};

TEST_P(DamagedProfile, is_not_used_and_says_so) {
  const std::string path = save_profile(device_, {EngineKind::libaio, 256 * KiB, 16, 2});
  std::ofstream(path, std::ios::trunc) << GetParam();
  take_profile(device_);
  EXPECT_FALSE(device_.profile);
  EXPECT_NE(device_.profile_problem.find(path), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(
    all, DamagedProfile,
    testing::Values("engine io_uring\n", "block_bytes 0\nqueue_depth 1\nworkers 1\n",
                    "block_bytes 4096\nqueue_depth 1\nworkers 257\n",
                    "block_bytes 4096\nqueue_depth 5000\nworkers 1\n",
                    "block_bytes 99999999999999999999\nqueue_depth 1\nworkers 1\n",
                    "engine magic\nblock_bytes 4096\nqueue_depth 1\nworkers 1\n",
                    "block_bytes 4096\nqueue_depth 1\nworkers 1\nsurprise 1\n", "block_bytes\n",
                    "block_bytes 4096\nqueue_depth 1\nworkers 1\nread_bytes_per_second 0\n",
                    "block_bytes 4096\nqueue_depth 1\nworkers 1\nwrite_bytes_per_second -1\n",
                    "\x01\x02\x03"));

}  // namespace
}  // namespace tensorferry::files
