// An acknowledged write is durable at the requested level. ext4 on a loop device loses power (its
// shutdown ioctl) right after writes and in the middle of them; after the next mount every
// acknowledged byte must be on it. 300 cuts in all: 50 for each engine and level.
#include <fcntl.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "rig.h"
#include "support/loop_device.h"

namespace tensorferry::faults::power_cut {
namespace {

using support::LoopDevice;
using support::PowerCut;

constexpr std::size_t piece_bytes = 60'000;  // unaligned seams
constexpr std::size_t piece_count = 8;

int cuts(int count) { return soaking() ? 4 * count : count; }

// The pieces that a trial wrote, and which of them were acknowledged.
struct Trial {
  std::string name;
  std::uint32_t seed = 0;
  std::vector<std::size_t> acknowledged;
};

// A disk that loses power once per trial.
class Victim {
 public:
  Victim() : device_(64 * MiB) { device_.make_file_system("ext4"); }

  // Writes pieces of one file, waits for a random part of them, and cuts the power with the rest in
  // flight. `fresh`: the file is new; else it exists, durable and full of old bytes.
  Trial run(Handle& handle, Durability durability, int number, bool fresh) {
    device_.mount();
    Trial trial{"trial-" + std::to_string(number), static_cast<std::uint32_t>(number + 1000), {}};
    if (!fresh) {
      support::write_whole_file(device_.file(trial.name),
                                support::pattern(piece_count * piece_bytes, 0, 1));
      sync_folder();
    }
    std::vector<Operation> operations;
    std::vector<GuardedMemory> buffers;
    for (std::size_t i = 0; i < piece_count; ++i) {
      buffers.emplace_back(piece_bytes, i % 3);
      buffers.back().fill(i * piece_bytes, trial.seed);
    }
    {
      const File file = File::open(device_.file(trial.name), Access::read_write);
      for (std::size_t i = 0; i < piece_count; ++i) {
        operations.push_back(start(handle, buffers[i].bytes(), file, i, durability, number));
      }
      const std::size_t awaited = dice_() % (piece_count + 1);
      for (std::size_t i = 0; i < awaited; ++i) (void)outcome(operations[i]);
      if (dice_() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(dice_() % 3000));
      device_.cut_power(number % 3 == 0 ? PowerCut::journal_flushed : PowerCut::journal_lost);
      for (std::size_t i = 0; i < piece_count; ++i) {
        if (!outcome(operations[i])) trial.acknowledged.push_back(i);
      }
    }
    device_.unmount();
    return trial;
  }

  // The number of acknowledged pieces that are missing after the next mount.
  std::size_t lost(const Trial& trial) {
    device_.mount();
    std::vector<std::byte> found;
    try {
      found = support::read_whole_file(device_.file(trial.name));
    } catch (const std::system_error&) {
      found.clear();  // even the directory entry is missing
    }
    std::size_t count = 0;
    for (const std::size_t i : trial.acknowledged) {
      const std::size_t begin = i * piece_bytes;
      const bool there =
          found.size() >= begin + piece_bytes &&
          pattern_fault(std::span(found).subspan(begin, piece_bytes), begin, trial.seed).empty();
      if (!there) ++count;
    }
    ::unlink(device_.file(trial.name).c_str());
    sync_folder();
    device_.unmount();
    return count;
  }

 private:
  // In turn: durable write, plain write and sync, write_now.
  static Operation start(Handle& handle, std::span<const std::byte> memory, const File& file,
                         std::size_t piece, Durability durability, int number) {
    const std::uint64_t offset = piece * piece_bytes;
    if (durability == Durability::none || number % 3 == 0) {
      return handle.write(memory, file, offset, durability);
    }
    if (number % 3 == 1) {
      const WriteTransfer halves[] = {{memory.first(20'001), file, offset},
                                      {memory.subspan(20'001), file, offset + 20'001}};
      return handle.write_many(halves, durability);
    }
    handle.write(memory, file, offset).wait();
    return handle.sync(file, durability);
  }

  void sync_folder() {
    const int fd = ::open(device_.mount_point().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ::fsync(fd);
    ::close(fd);
  }

  LoopDevice device_;
  std::mt19937_64 dice_{4};
};

class PowerCuts : public ::testing::TestWithParam<EngineKind> {
 protected:
  void SetUp() override {
    if (const auto reason = LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }

  static HandleOptions options() { return {.engine = GetParam(), .block_bytes = 32 * KiB}; }

  // Cuts the power and counts the pieces acknowledged and those of them lost.
  static std::pair<std::size_t, std::size_t> cut(Durability durability, int count, bool fresh) {
    Victim victim;
    Handle handle(options());
    std::size_t acknowledged = 0;
    std::size_t lost = 0;
    for (int number = 0; number < count; ++number) {
      const Trial trial = victim.run(handle, durability, number, fresh);
      acknowledged += trial.acknowledged.size();
      lost += victim.lost(trial);
    }
    return {acknowledged, lost};
  }
};

INSTANTIATE_TEST_SUITE_P(Engines, PowerCuts, all_engines, engine_name);

TEST_P(PowerCuts, no_write_acknowledged_with_durability_data_is_lost) {
  const auto [acknowledged, lost] = cut(Durability::data, cuts(50), false);
  EXPECT_GT(acknowledged, 50U) << "too few writes were tested";
  EXPECT_EQ(lost, 0U) << "of " << acknowledged;
}

TEST_P(PowerCuts, no_new_file_acknowledged_with_durability_full_is_lost) {
  const auto [acknowledged, lost] = cut(Durability::full, cuts(50), true);
  EXPECT_GT(acknowledged, 50U) << "too few writes were tested";
  EXPECT_EQ(lost, 0U) << "of " << acknowledged;
}

// Proves that the two tests above would see a loss.
TEST_P(PowerCuts, without_durability_the_same_cuts_do_lose_acknowledged_writes) {
  const auto [acknowledged, lost] = cut(Durability::none, 10, true);
  EXPECT_GT(acknowledged, 10U);
  EXPECT_GT(lost, 0U) << "this test cannot see a loss";
}

// Small synchronous writes take another path.
TEST_P(PowerCuts, no_inline_write_acknowledged_with_durability_is_lost) {
  LoopDevice device(64 * MiB);
  device.make_file_system("ext4");
  Handle handle(options());
  for (int number = 0; number < cuts(10); ++number) {
    device.mount();
    const std::string name = "small-" + std::to_string(number);
    GuardedMemory buffer(5000, 1);
    buffer.fill(3, 9);
    handle.write_now(buffer.bytes(), device.file(name), 3, Durability::full);
    device.cut_power(PowerCut::journal_lost);
    device.unmount();
    device.mount();
    const auto found = support::read_whole_file(device.file(name));
    ASSERT_EQ(found.size(), 5003U);
    ASSERT_EQ(pattern_fault(std::span(found).subspan(3), 3, 9), "");
    device.unmount();
  }
}

}  // namespace
}  // namespace tensorferry::faults::power_cut
