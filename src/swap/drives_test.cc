// Where tensors lie if drives differ: loop devices, and speeds that the test makes up.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/alignment.h"
#include "handle/handle_fixture.h"
#include "support/loop_device.h"
#include "support/pattern.h"
#include "support/temp_dir.h"
#include "swap/space.h"
#include "swap/swap_fixture.h"
#include "tensorferry/device.h"
#include "tensorferry/swap_space.h"

namespace tensorferry {
namespace {

namespace fs = std::filesystem;

using handle::error_of;
using handle::Memory;
using support::pattern_fault;

constexpr std::uint64_t drive_bytes = 512 * MiB;  // sparse

class SwapDrives : public ::testing::Test {
 protected:
  // Opens a space over drives of these speeds in bytes per second. `sizes` are those of the drives.
  void open(const std::vector<double>& speeds, std::vector<std::uint64_t> sizes = {},
            handle::Seams handle_seams = {}) {
    sizes.resize(speeds.size(), drive_bytes);
    SwapOptions options = swap::options_in(dir_, MiB);
    options.directories.clear();
    swap::Seams seams;
    seams.handle = std::move(handle_seams);
    std::vector<handle::DeviceUse> uses;
    for (std::size_t i = 0; i < speeds.size(); ++i) {
      auto& drive = *drives_.emplace_back(std::make_unique<support::LoopDevice>(sizes[i]));
      drive.make_file_system("ext4");
      drive.mount();
      options.directories.push_back(drive.mount_point());
      const auto moved = static_cast<std::uint64_t>(speeds[i]);
      uses.push_back({device_of(drive.mount_point()).number, moved, moved > 0 ? 1.0 : 0.0});
    }
    seams.device_uses = [uses] { return uses; };
    space_.emplace(options, seams);
    (void)space_->stats();  // learns
  }
  void TearDown() override {
    space_.reset();
    for (const auto& drive : drives_) drive->unmount();
  }

  void store(std::string_view key, std::size_t bytes, std::uint32_t seed = 1) {
    const Memory memory = Memory::with_pattern(bytes, 0, seed);
    space_->put(key, memory.bytes()).wait();
  }
  [[nodiscard]] std::string fault_in(std::string_view key, std::size_t bytes,
                                     std::uint32_t seed = 1) {
    Memory memory(bytes);
    space_->get(key, memory.bytes()).wait();
    return pattern_fault(memory.bytes(), 0, seed);
  }
  [[nodiscard]] std::vector<std::uint64_t> stored() {
    std::vector<std::uint64_t> bytes;
    for (const SwapDrive& drive : space_->stats().drives) bytes.push_back(drive.stored_bytes);
    return bytes;
  }

  support::TempDir dir_;
  std::vector<std::unique_ptr<support::LoopDevice>> drives_;
  handle::Gate gate_;
  std::optional<SwapSpace> space_;
};

class SwapLoopDrives : public SwapDrives {
 protected:
  void SetUp() override {
    if (const auto reason = support::LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }
};

using Bytes = std::vector<std::uint64_t>;

TEST_F(SwapLoopDrives, get_bytes_by_their_speed) {
  open({3e9, 1e9});
  store("large", 32 * MiB);
  EXPECT_EQ(stored(), (Bytes{24 * MiB, 8 * MiB}));
  EXPECT_EQ(fault_in("large", 32 * MiB), "");
  space_->drop("large");
  EXPECT_EQ(stored(), (Bytes{0, 0}));
  for (int i = 0; i < 40; ++i) store(std::to_string(i), 100 * KiB);
  EXPECT_EQ(stored(), (Bytes{30 * 100 * KiB, 10 * 100 * KiB}));
  for (int i = 0; i < 40; ++i) EXPECT_EQ(fault_in(std::to_string(i), 100 * KiB), "");
}

TEST_F(SwapLoopDrives, are_told_in_the_stats) {
  open({3e9, 1e9});
  const std::vector<SwapDrive> drives = space_->stats().drives;
  ASSERT_EQ(drives.size(), 2U);
  EXPECT_EQ(drives[0].directory, space_->directories()[0]);
  EXPECT_EQ(drives[1].directory, space_->directories()[1]);
  EXPECT_NEAR(static_cast<double>(drives[0].bytes_per_second), 3e9, 10);
  EXPECT_NEAR(drives[0].share, 0.75, 1e-6);
  EXPECT_NEAR(drives[1].share, 0.25, 1e-6);
}

// Tensors below a stripe lie on one drive each, here in turn.
TEST_F(SwapLoopDrives, that_hang_hold_up_no_small_tensor_of_the_others) {
  handle::Seams seams = gate_.seams();
  bool first = true;  // of the drive that gets the first tensor
  seams.open_engine = [&first, held = seams.open_engine](EngineKind kind, unsigned depth,
                                                         os::System& system) {
    if (std::exchange(first, false)) return held(kind, depth, system);
    return engines::open_engine(EngineKind::threads, depth, system);
  };
  open({1e9, 1e9}, {}, seams);
  constexpr std::size_t bytes = 100 * KiB;
  const Memory memory = Memory::with_pattern(bytes, 0, 1);
  std::vector<Operation> puts;
  for (int i = 0; i < 8; ++i) puts.push_back(space_->put(std::to_string(i), memory.bytes()));
  for (std::size_t i = 1; i < puts.size(); i += 2) {
    EXPECT_EQ(handle::outcome_code(puts[i]), 0);
    EXPECT_EQ(fault_in(std::to_string(i), bytes), "");
  }
  for (std::size_t i = 0; i < puts.size(); i += 2) EXPECT_FALSE(puts[i].done());
  gate_.open();
  for (std::size_t i = 0; i < puts.size(); i += 2) {
    EXPECT_EQ(handle::outcome_code(puts[i]), 0);
    EXPECT_EQ(fault_in(std::to_string(i), bytes), "");
  }
}

TEST_F(SwapLoopDrives, of_unknown_speed_get_the_same) {
  open({0, 0, 0});
  store("t", 9 * MiB);
  EXPECT_EQ(stored(), (Bytes{3 * MiB, 3 * MiB, 3 * MiB}));
  EXPECT_EQ(space_->stats().drives[0].bytes_per_second, 0U);
}

TEST_F(SwapLoopDrives, that_are_fast_and_full_leave_the_rest_to_the_slow) {
  open({8e9, 2e9, 1e9}, {24 * MiB, drive_bytes, drive_bytes});
  for (std::uint32_t i = 0; i < 10; ++i) store(std::to_string(i), 11 * MiB, i);
  for (std::uint32_t i = 0; i < 10; ++i) {
    EXPECT_EQ(fault_in(std::to_string(i), 11 * MiB, i), "") << i;
  }
  // The full drive is left out, and the others share by their speed.
  const Bytes before = stored();
  store("last", 30 * MiB, 77);
  const Bytes after = stored();
  EXPECT_EQ(after[0], before[0]);
  const auto pages = 2 * static_cast<double>(page_bytes());
  EXPECT_NEAR(static_cast<double>(after[1] - before[1]), 20 * MiB, pages);
  EXPECT_NEAR(static_cast<double>(after[2] - before[2]), 10 * MiB, pages);
  EXPECT_EQ(fault_in("last", 30 * MiB, 77), "");
}

// The fast drive has some space left, but not for its share, and the slow one not for all of it.
TEST_F(SwapLoopDrives, are_used_up_before_space_is_lacking) {
  open({9e9, 1e9}, {128 * MiB, 128 * MiB});
  const std::uint64_t each = fs::space(drives_[1]->mount_point()).free;
  const std::uint64_t first = each / 100 * 80;
  const std::uint64_t second = each;
  store("first", first, 1);
  store("second", second, 2);
  EXPECT_EQ(fault_in("first", first, 1), "");
  EXPECT_EQ(fault_in("second", second, 2), "");
  EXPECT_EQ(error_of([&] { store("third", each / 4); }).code(), ENOSPC);
}

TEST_F(SwapLoopDrives, have_room_taken_ahead_by_their_speed_and_by_what_they_hold) {
  open({9e9, 1e9}, {32 * MiB, drive_bytes});
  space_->reserve(100 * MiB);
  EXPECT_GE(space_->stats().file_bytes, 100 * MiB);
  EXPECT_EQ(error_of([&] { space_->reserve(4 * drive_bytes); }).code(), ENOSPC);
}

TEST_F(SwapDrives, that_are_one_device_share_its_speed) {
  const support::TempDir second;
  SwapOptions options = swap::options_in(dir_, MiB);
  options.directories.push_back(second.path());
  const std::string number = device_of(dir_.path()).number;
  if (number.empty() || number != device_of(second.path()).number) {
    GTEST_SKIP() << "the directories for tests are not on one device";
  }
  swap::Seams seams;
  seams.device_uses = [number] {
    return std::vector<handle::DeviceUse>{{number, 4'000'000'000, 1.0}};
  };
  space_.emplace(options, seams);
  const std::vector<SwapDrive> drives = space_->stats().drives;
  for (const SwapDrive& drive : drives) {
    EXPECT_NEAR(static_cast<double>(drive.bytes_per_second), 2e9, 10);
    EXPECT_EQ(drive.share, 0.5);
  }
  store("t", 4 * MiB);
  EXPECT_EQ(stored(), (Bytes{2 * MiB, 2 * MiB}));
}

// It notices by itself, without a look at the stats.
TEST_F(SwapDrives, are_measured_while_tensors_are_put) {
  SwapOptions options = swap::options_in(dir_, MiB);
  const support::TempDir second;
  options.directories.push_back(second.path());
  int asked = 0;
  swap::Seams seams;
  seams.device_uses = [&asked] {
    ++asked;
    return std::vector<handle::DeviceUse>{};
  };
  space_.emplace(options, seams);
  for (int i = 0; i < 8; ++i) store("t", 6 * MiB);
  EXPECT_EQ(asked, 2) << "once for each 16 MiB";
}

}  // namespace
}  // namespace tensorferry
