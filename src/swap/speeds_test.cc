#include "swap/speeds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "base/alignment.h"
#include "handle/handle_fixture.h"
#include "swap/shares.h"

namespace tensorferry::swap {
namespace {

using handle::DeviceUse;
using handle::Dice;
using Figures = std::vector<double>;

Device device(const std::string& number, std::uint64_t read = 0, std::uint64_t write = 0) {
  Device made;
  made.number = number;
  if (read + write > 0) {
    made.profile = {.engine = EngineKind::automatic,
                    .block_bytes = MiB,
                    .queue_depth = 1,
                    .workers = 1,
                    .read_bytes_per_second = read,
                    .write_bytes_per_second = write};
  }
  return made;
}

Speeds speeds_of(const std::vector<Device>& devices) {
  Speeds speeds;
  for (const Device& one : devices) speeds.add(one);
  return speeds;
}

// What a handle reports of drives that do what they are told.
class Use {
 public:
  void add(const std::string& number, std::uint64_t bytes, double bytes_per_second) {
    auto found = std::ranges::find(uses_, number, &DeviceUse::number);
    if (found == uses_.end()) found = uses_.insert(uses_.end(), DeviceUse{number, 0, 0});
    found->bytes += bytes;
    found->busy_seconds += static_cast<double>(bytes) / bytes_per_second;
  }
  [[nodiscard]] const std::vector<DeviceUse>& list() const { return uses_; }

 private:
  std::vector<DeviceUse> uses_;
};

TEST(speeds, come_from_profiles_first) {
  const Speeds speeds = speeds_of({device("1:0", 6'000'000, 3'000'000), device("2:0", 5'000'000, 0),
                                   device("3:0", 0, 2'000'000)});
  EXPECT_DOUBLE_EQ(speeds.known()[0], 4e6) << "for as many reads as writes";
  EXPECT_DOUBLE_EQ(speeds.known()[1], 5e6);
  EXPECT_DOUBLE_EQ(speeds.known()[2], 2e6);
}

TEST(speeds, that_are_unknown_count_as_the_mean) {
  const Speeds speeds =
      speeds_of({device("1:0", 6'000'000), device("2:0"), device("3:0", 2'000'000), device("")});
  EXPECT_EQ(speeds.known(), (Figures{6e6, 0, 2e6, 0}));
  EXPECT_EQ(speeds.assumed(), (Figures{6e6, 4e6, 2e6, 4e6}));
}

TEST(speeds, are_equal_if_all_are_unknown) {
  const Figures assumed = speeds_of({device("1:0"), device(""), device("")}).assumed();
  EXPECT_GT(assumed[0], 0);
  EXPECT_EQ(assumed, Figures(3, assumed[0]));
}

TEST(speeds, of_one_device_are_shared_evenly_by_its_drives) {
  Speeds speeds = speeds_of({device("1:0", 6'000'000), device("2:0", 1'000'000), device("1:0")});
  EXPECT_EQ(speeds.known(), (Figures{3e6, 1e6, 3e6}));
  Use use;
  use.add("1:0", 64 * MiB, 8e9);
  use.add("2:0", 64 * MiB, 2e9);
  speeds.learn(use.list());
  EXPECT_NEAR(speeds.known()[0], 4e9, 1e3);
  EXPECT_NEAR(speeds.known()[1], 2e9, 1e3);
  EXPECT_NEAR(speeds.known()[2], 4e9, 1e3);
}

TEST(speeds, that_are_measured_replace_those_of_profiles) {
  Speeds speeds = speeds_of({device("1:0", 1'000'000), device("2:0", 1'000'000)});
  Use use;
  use.add("1:0", 4 * GiB, 3e9);
  use.add("2:0", MiB, 9e9);      // too little
  use.add("9:9", 4 * GiB, 9e9);  // of no drive
  use.add("", 4 * GiB, 9e9);
  speeds.learn(use.list());
  EXPECT_NEAR(speeds.known()[0], 3e9, 1e3);
  EXPECT_EQ(speeds.known()[1], 1e6);
}

TEST(speeds, are_not_measured_by_a_few_bytes_in_a_short_time) {
  Speeds speeds = speeds_of({device("1:0")});
  Use use;
  for (int i = 0; i < 63; ++i) {
    use.add("1:0", MiB, 1e9);
    speeds.learn(use.list());
    EXPECT_EQ(speeds.known()[0], 0);
  }
  use.add("1:0", MiB, 1e9);
  speeds.learn(use.list());
  EXPECT_NEAR(speeds.known()[0], 1e9, 1e3);
}

TEST(speeds, of_a_drive_that_crawls_are_known_after_a_second) {
  Speeds speeds = speeds_of({device("1:0", 4'000'000'000)});
  Use use;
  use.add("1:0", 1'100'000, 1e6);
  speeds.learn(use.list());
  EXPECT_NEAR(speeds.known()[0], 1e6, 1);
}

// Otherwise the fast drive would be known by its last writes and the slow one by reads before.
TEST(speeds, are_measured_at_the_same_time) {
  Speeds speeds = speeds_of({device("1:0"), device("2:0")});
  Use use;
  for (int i = 0; i < 8; ++i) {
    use.add("1:0", 80 * MiB, i < 4 ? 8e9 : 2e9);
    use.add("2:0", 8 * MiB, i < 4 ? 0.8e9 : 0.2e9);
    speeds.learn(use.list());
  }
  EXPECT_NEAR(speeds.known()[0] / speeds.known()[1], 10, 0.01);
}

TEST(speeds, are_not_changed_by_an_older_report) {
  Speeds speeds = speeds_of({device("1:0")});
  Use use;
  use.add("1:0", 100 * MiB, 1e9);
  const std::vector<DeviceUse> older = use.list();
  use.add("1:0", 100 * MiB, 2e9);
  speeds.learn(use.list());
  const Figures before = speeds.known();
  speeds.learn(older);
  speeds.learn(use.list());
  EXPECT_EQ(speeds.known(), before);
}

TEST(speeds, are_the_mean_of_a_drive_that_varies) {
  Dice dice(3);
  Speeds speeds = speeds_of({device("1:0")});
  Use use;
  for (int i = 0; i < 100; ++i) {
    use.add("1:0", 64 * MiB, 0.8e9 + static_cast<double>(dice.below(400)) * 1e6);
    speeds.learn(use.list());
    if (i < 8) continue;
    EXPECT_NEAR(speeds.known()[0], 1e9, 0.15e9) << i;
  }
}

TEST(speeds, of_a_drive_that_mostly_waited_for_another_count_less) {
  Speeds speeds = speeds_of({device("1:0"), device("2:0")});
  Use use;
  for (int i = 0; i < 9; ++i) {
    use.add("1:0", 64 * MiB, i < 8 ? 1e9 : 4e9);
    use.add("2:0", 64 * MiB, 1e9);
    speeds.learn(use.list());
  }
  EXPECT_GT(speeds.known()[0], 1.02e9);
  EXPECT_LT(speeds.known()[0], 1.1e9);
}

TEST(speeds, follow_a_drive_that_becomes_slower) {
  Speeds speeds = speeds_of({device("1:0")});
  Use use;
  use.add("1:0", 100 * GiB, 4e9);
  speeds.learn(use.list());
  for (int i = 0; i < 24; ++i) {
    use.add("1:0", 64 * MiB, 1e9);
    speeds.learn(use.list());
  }
  EXPECT_NEAR(speeds.known()[0], 1e9, 0.05e9);
}

// Drives of known speeds, tensors that are cut over them, and what a handle reports of that.
class Simulation {
 public:
  explicit Simulation(std::vector<double> real)
      : real_(std::move(real)), rested_seconds_(real_.size(), 0), shares_(real_.size()) {
    for (std::size_t i = 0; i < real_.size(); ++i) speeds_.add(device(number(i)));
  }

  // Moves a tensor. Returns its speed as a part of the sum of all speeds.
  double move(std::uint64_t bytes) {
    std::vector<std::size_t> drives(real_.size());
    std::iota(drives.begin(), drives.end(), std::size_t{0});
    std::vector<double> needed(real_.size(), 0);
    for (const Share& share : shares_.cut(bytes, drives)) {
      const std::size_t i = share.drive;
      needed[i] = static_cast<double>(share.bytes) / real_[i];
      const double burst = bursts_ ? 0.9 * std::min(rested_seconds_[i], needed[i]) : 0;
      use_.add(number(i), share.bytes, static_cast<double>(share.bytes) / (needed[i] - burst));
    }
    const double seconds = std::ranges::max(needed);
    for (const std::size_t i : drives) {
      const double left = std::max(rested_seconds_[i] - needed[i], 0.0);
      rested_seconds_[i] = std::min(left + seconds - needed[i], rest_seconds_max);
    }
    speeds_.learn(use_.list());
    shares_.set_speeds(speeds_.assumed());
    return static_cast<double>(bytes) / seconds / std::accumulate(real_.begin(), real_.end(), 0.0);
  }

  void change(std::vector<double> real) { real_ = std::move(real); }
  // From now on a drive makes up for a rest before: ten times as fast, as one with a limit does.
  void let_burst() { bursts_ = true; }

 private:
  static std::string number(std::size_t drive) { return "7:" + std::to_string(drive); }

  static constexpr double rest_seconds_max = 1;

  std::vector<double> real_;
  std::vector<double> rested_seconds_;  // before the next tensor
  bool bursts_ = false;
  Use use_;
  Speeds speeds_;
  Shares shares_;
};

TEST(speeds, that_are_measured_let_all_drives_finish_together) {
  for (const auto& real : {Figures{2e9, 2e9}, Figures{6e9, 1e9}, Figures{7e9, 3e9, 0.5e9, 3e9},
                           Figures{0.2e9, 0.05e9}}) {
    Simulation run(real);
    for (int i = 0; i < 4; ++i) (void)run.move(256 * MiB);  // measures
    for (int i = 0; i < 100; ++i) EXPECT_GE(run.move(256 * MiB), 0.98) << real.size() << ", " << i;
  }
}

TEST(speeds, settle_again_after_a_change) {
  Simulation run({4e9, 1e9});
  for (int i = 0; i < 20; ++i) (void)run.move(256 * MiB);
  for (const Figures& real : {Figures{0.5e9, 1e9}, Figures{4e9, 1e9}}) {
    run.change(real);
    for (int i = 0; i < 80; ++i) (void)run.move(256 * MiB);  // 20 GiB
    for (int i = 0; i < 40; ++i) EXPECT_GE(run.move(256 * MiB), 0.95) << i;
  }
}

TEST(speeds, of_drives_that_burst_after_a_rest_settle_too) {
  for (const Figures& real : {Figures{0.2e9, 0.05e9}, Figures{2e9, 2e9}, Figures{7e9, 0.5e9}}) {
    Simulation run(real);
    run.let_burst();
    for (int i = 0; i < 80; ++i) (void)run.move(64 * MiB);
    for (int i = 0; i < 200; ++i) EXPECT_GE(run.move(64 * MiB), 0.95) << real[0] << ", " << i;
  }
}

// Its small share is enough to see that it is fast again.
TEST(speeds, of_a_drive_that_hung_for_a_while_recover) {
  Simulation run({1e9, 1e9});
  run.change({1e9, 1e4});
  for (int i = 0; i < 20; ++i) (void)run.move(256 * MiB);
  run.change({1e9, 1e9});
  for (int i = 0; i < 1000; ++i) (void)run.move(256 * MiB);
  for (int i = 0; i < 20; ++i) EXPECT_GE(run.move(256 * MiB), 0.95) << i;
}

}  // namespace
}  // namespace tensorferry::swap
