// Exact bytes on every file system and engine: any head and tail, neighbours in flight at once, and
// while another process appends to the same file.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <memory>
#include <random>

#include "rig.h"
#include "support/loop_device.h"

namespace tensorferry::faults::file_systems {
namespace {

using support::LoopDevice;
using support::Mount;
using support::read_whole_file;
using support::write_whole_file;

constexpr std::uint32_t seed = 121;

// A folder on the file system of that name; "here" is the working directory's own.
class Disk {
 public:
  explicit Disk(const std::string& type) {
    if (type == "here") {
      folder_ = here_.path();
    } else if (type == "tmpfs" || type == "ramfs" || type == "overlay") {
      mount_ = std::make_unique<Mount>(type);
      folder_ = mount_->path();
    } else {
      device_ = std::make_unique<LoopDevice>(type == "xfs" ? 400 * MiB : 160 * MiB);
      device_->make_file_system(type);
      device_->mount();
      folder_ = device_->mount_point();
    }
  }

  [[nodiscard]] static std::string unavailable_reason(const std::string& type) {
    if (type == "here") return {};
    if (type == "tmpfs" || type == "ramfs" || type == "overlay") {
      return support::mounts_unavailable_reason();
    }
    return LoopDevice::unavailable_reason(type);
  }

  [[nodiscard]] std::string file(const std::string& name) const { return folder_ + "/" + name; }

 private:
  support::TempDir here_;
  std::unique_ptr<Mount> mount_;
  std::unique_ptr<LoopDevice> device_;
  std::string folder_;
};

class FileSystems : public ::testing::TestWithParam<std::tuple<std::string, EngineKind>> {
 protected:
  void SetUp() override {
    const std::string& type = std::get<0>(GetParam());
    if (const auto reason = Disk::unavailable_reason(type); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
    disk_ = std::make_unique<Disk>(type);
  }

  static HandleOptions options() {
    return {.engine = std::get<1>(GetParam()), .block_bytes = 64 * KiB, .queue_depth = 8};
  }

  // The bytes on the drive: reads without the page cache if the file system can.
  static std::vector<std::byte> on_the_drive(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    ::fsync(fd);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
    return read_whole_file(path);
  }

  std::unique_ptr<Disk> disk_;
};

INSTANTIATE_TEST_SUITE_P(All, FileSystems,
                         ::testing::Combine(::testing::Values("here", "ext4", "xfs", "btrfs",
                                                              "tmpfs", "ramfs", "overlay"),
                                            all_engines),
                         [](const auto& tested) {
                           return std::get<0>(tested.param) + "_" +
                                  std::string(to_string(std::get<1>(tested.param)));
                         });

TEST_P(FileSystems, random_reads_and_writes_agree_with_a_byte_map) {
  constexpr std::size_t model_bytes = 1 * MiB;
  const std::string path = disk_->file("data");
  std::vector<std::byte> model(model_bytes);
  support::fill_pattern(model, 0, seed);
  write_whole_file(path, model);
  Handle handle(options());
  const File file = File::open(path, Access::read_write);
  std::mt19937_64 dice(7);
  for (std::uint32_t round = 0; round < 120; ++round) {
    // Small, near a block's edge, or large; the end of the file may move.
    const std::size_t bytes = dice() % 3 == 0 ? 1 + dice() % 9000 : 1 + dice() % 300'000;
    const std::size_t offset = dice() % model.size();
    GuardedMemory buffer(bytes, dice() % 2 * (dice() % 512));
    if (dice() % 2 == 0) {
      buffer.fill(offset, 200 + round);
      const auto durability = static_cast<Durability>(dice() % 3);
      if (dice() % 2 == 0) {
        ASSERT_ENDED_WELL(handle.write(buffer.bytes(), file, offset, durability));
      } else {
        handle.write_now(buffer.bytes(), file, offset, durability);
      }
      model.resize(std::max(model.size(), offset + bytes));
      std::copy(buffer.bytes().begin(), buffer.bytes().end(),
                model.begin() + static_cast<std::ptrdiff_t>(offset));
    } else {
      const std::size_t there = std::min(bytes, model.size() - offset);
      const auto memory = buffer.bytes().first(there);
      ASSERT_ENDED_WELL(handle.read(memory, file, offset));
      ASSERT_TRUE(std::equal(memory.begin(), memory.end(),
                             model.begin() + static_cast<std::ptrdiff_t>(offset)))
          << "round " << round << ", offset " << offset << ", bytes " << there;
    }
    ASSERT_TRUE(round % 20 != 0 || read_whole_file(path) == model) << "round " << round;
  }
  EXPECT_TRUE(on_the_drive(path) == model);
  EXPECT_EQ(file.size(), model.size());
}

// Two writes in flight share a page, an alignment unit or a block.
TEST_P(FileSystems, neighbouring_writes_in_flight_do_not_disturb_each_other) {
  constexpr std::size_t total = 600'000;
  const std::string path = disk_->file("data");
  Handle handle({.engine = std::get<1>(GetParam()),
                 .block_bytes = 64 * KiB,
                 .queue_depth = 16,
                 .workers = 2});
  std::mt19937_64 dice(8);
  for (std::uint32_t round = 0; round < 25; ++round) {
    write_whole_file(path, support::pattern(total, 0, seed));
    const File file = File::open(path, Access::read_write);
    GuardedMemory buffer(total, dice() % 2 * 8);
    buffer.fill(0, 300 + round);
    std::vector<std::size_t> seams{0, total};
    for (int i = 0; i < 40; ++i) seams.push_back(dice() % total);
    std::sort(seams.begin(), seams.end());
    std::vector<Operation> operations;
    for (std::size_t i = 0; i + 1 < seams.size(); ++i) {
      operations.push_back(
          handle.write(buffer.bytes().subspan(seams[i], seams[i + 1] - seams[i]), file, seams[i]));
    }
    std::shuffle(operations.begin(), operations.end(), dice);
    for (const Operation& operation : operations) ASSERT_ENDED_WELL(operation);
    ASSERT_EQ(pattern_fault(read_whole_file(path), 0, 300 + round), "") << "round " << round;
    ASSERT_EQ(pattern_fault(on_the_drive(path), 0, 300 + round), "") << "round " << round;
  }
}

// Appends lines until the test stops it. Each line has 101 bytes and holds its number.
class Appender {
 public:
  explicit Appender(const std::string& path) : child_(::fork()) {
    if (child_ != 0) return;
    const int fd = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
    for (std::uint64_t number = 0;; ++number) {
      const std::string text = line(number);
      if (::write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) ::_exit(1);
      ::usleep(20);
    }
  }
  ~Appender() { stop(); }
  Appender(const Appender&) = delete;
  Appender& operator=(const Appender&) = delete;

  void stop() {
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
    child_ = -1;
  }

  static std::string line(std::uint64_t number) {
    std::string text = std::to_string(number) + " ";
    text.resize(100, static_cast<char>('a' + number % 26));
    return text + "\n";
  }

 private:
  pid_t child_;
};

TEST_P(FileSystems, writing_part_of_a_file_changes_nothing_else_while_another_process_appends) {
  constexpr std::size_t begin = 1001;
  constexpr std::size_t end = 300'003 - 5;  // in the block that the appender goes on with
  constexpr std::size_t first_bytes = 300'003;
  const std::string path = disk_->file("log");
  write_whole_file(path, support::pattern(first_bytes, 0, seed));
  Handle handle(options());
  const File file = File::open(path, Access::read_write);
  GuardedMemory buffer(end - begin, 3);
  Appender appender(path);
  std::uint32_t version = seed;
  const auto grown = [&] { return file.size() > first_bytes + 101 * 50; };
  const auto deadline = Operation::Clock::now() + hang_limit;
  for (int round = 0; round < 150 || !grown(); ++round) {
    ASSERT_LT(Operation::Clock::now(), deadline) << "the appender does not run";
    version = 400 + static_cast<std::uint32_t>(round % 1000);
    buffer.fill(begin, version);
    if (round % 2 == 0) {
      ASSERT_ENDED_WELL(handle.write(buffer.bytes(), file, begin));
    } else {
      // Only the last few bytes, inline.
      handle.write_now(buffer.bytes().first(end - begin - 3000), file, begin);
      handle.write_now(buffer.bytes().last(3000), file, end - 3000);
    }
  }
  appender.stop();
  for (const auto& found : {read_whole_file(path), on_the_drive(path)}) {
    const std::span<const std::byte> all(found);
    EXPECT_EQ(pattern_fault(all.first(begin), 0, seed), "") << "before the part";
    EXPECT_EQ(pattern_fault(all.subspan(begin, end - begin), begin, version), "") << "the part";
    EXPECT_EQ(pattern_fault(all.subspan(end, 5), end, seed), "") << "behind the part";
    const auto tail = all.subspan(first_bytes);
    ASSERT_EQ(tail.size() % 101, 0U) << "the file was cut, or padded";
    for (std::uint64_t i = 0; i < tail.size() / 101; ++i) {
      const auto text = tail.subspan(i * 101, 101);
      ASSERT_EQ(std::string(reinterpret_cast<const char*>(text.data()), 101), Appender::line(i))
          << "an appended line was lost";
    }
  }
}

}  // namespace
}  // namespace tensorferry::faults::file_systems
