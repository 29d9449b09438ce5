// F7: a file that ends early, or is cut during a read, gives an error with the place, never wrong
// data and never a hang.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <thread>

#include "rig.h"

namespace tensorferry::faults::truncation {
namespace {

using support::pattern;
using support::write_whole_file;

constexpr std::uint32_t seed = 71;

class Truncation : public ::testing::TestWithParam<EngineKind> {
 protected:
  static HandleOptions options() {
    return {.engine = GetParam(), .block_bytes = 64 * KiB, .queue_depth = 8};
  }

  support::TempDir dir_;
  std::string path_ = dir_.file("data");
};

INSTANTIATE_TEST_SUITE_P(Engines, Truncation, all_engines, engine_name);

void expect_ended_at(const std::optional<Error>& error, const std::string& path,
                     std::uint64_t begin, std::uint64_t file_end) {
  ASSERT_TRUE(error.has_value()) << "the handle took bytes beyond the end for data";
  EXPECT_EQ(error->code(), ENODATA) << error->what();
  EXPECT_EQ(error->operation(), "read");
  EXPECT_EQ(error->path(), path);
  ASSERT_TRUE(error->offset() && error->length());
  EXPECT_GE(*error->offset(), begin);
  EXPECT_GE(*error->offset() + *error->length(), file_end);
  EXPECT_NE(error->hint().find("end"), std::string::npos) << error->what();
}

TEST_P(Truncation, a_read_past_the_end_is_an_error_wherever_the_file_ends) {
  Handle handle(options());
  for (const std::size_t end :
       {0U, 1U, 511U, 512U, 513U, 4095U, 4096U, 4097U, 65'535U, 65'536U, 65'537U, 200'001U}) {
    write_whole_file(path_, pattern(end, 0, seed));
    const File file = File::open(path_, Access::read);
    for (const std::size_t skew : {0U, 3U}) {
      for (const std::size_t begin : {std::size_t{0}, end / 2, end}) {
        for (const std::size_t beyond : {1U, 512U, 300'000U}) {
          SCOPED_TRACE("file of " + std::to_string(end) + ", read from " + std::to_string(begin) +
                       " to " + std::to_string(beyond) + " past its end, skew " +
                       std::to_string(skew));
          GuardedMemory buffer(end - begin + beyond, skew);
          expect_ended_at(outcome(handle.read(buffer.bytes(), file, begin)), path_, begin, end);
          expect_ended_at(thrown_by([&] { handle.read_now(buffer.bytes(), file, begin); }), path_,
                          begin, end);
        }
        GuardedMemory whole(end - begin, skew);
        ASSERT_ENDED_WELL(handle.read(whole.bytes(), file, begin));
        ASSERT_EQ(whole.fault(begin, seed), "");
        whole.clear();
        handle.read_now(whole.bytes(), file, begin);
        ASSERT_EQ(whole.fault(begin, seed), "");
      }
    }
  }
}

TEST_P(Truncation, one_early_end_among_many_reads_fails_only_that_read) {
  write_whole_file(path_, pattern(1 * MiB, 0, seed));
  Handle handle(options());
  const File file = File::open(path_, Access::read);
  std::vector<GuardedMemory> buffers;
  for (int i = 0; i < 8; ++i) buffers.emplace_back(200'000, 1);
  std::vector<Operation> operations;
  for (std::size_t i = 0; i < 8; ++i) {
    operations.push_back(handle.read(buffers[i].bytes(), file, i * 150'000));
  }
  for (std::size_t i = 0; i < 8; ++i) {
    const auto error = outcome(operations[i]);
    if (i * 150'000 + 200'000 > 1 * MiB) {
      expect_ended_at(error, path_, i * 150'000, 1 * MiB);
    } else {
      ASSERT_FALSE(error.has_value()) << error->what();
      ASSERT_EQ(buffers[i].fault(i * 150'000, seed), "");
    }
  }
}

// 1,000 random truncations during reads: the right bytes, or an error with the place.
TEST_P(Truncation, a_file_cut_while_it_is_read_gives_its_bytes_or_an_error) {
  constexpr std::size_t file_bytes = 2 * MiB;
  const auto whole = pattern(file_bytes, 0, seed);
  write_whole_file(path_, whole);
  const int fd = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  Handle handle(options());
  const File file = File::open(path_, Access::read);
  GuardedMemory buffer(file_bytes);
  std::mt19937_64 dice(17);
  int complete = 0;
  int cut_short = 0;
  for (int round = 0; round < 1000; ++round) {
    const std::uint64_t cut = dice() % file_bytes;
    const auto pause = std::chrono::microseconds(dice() % 1500);
    const bool odd = dice() % 2 == 0;
    const std::uint64_t begin = odd ? 1 : 0;
    buffer.clear();
    const bool late = round % 50 == 0;  // on a slow drive all other cuts may come too early
    std::atomic<bool> go{false};
    std::atomic<bool> over{false};
    std::thread cutter([&] {
      while (!go) std::this_thread::yield();
      if (!late) std::this_thread::sleep_for(pause);
      while (late && !over) std::this_thread::yield();
      EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(cut)), 0);
    });
    const auto memory = buffer.bytes().subspan(begin);
    go = true;
    const auto error = outcome(handle.read(memory, file, begin), std::chrono::seconds(20));
    over = true;
    cutter.join();
    if (error) {
      ++cut_short;
      ASSERT_EQ(error->code(), ENODATA) << error->what();
      ASSERT_TRUE(error->offset().has_value());
      ASSERT_LE(*error->offset(), file_bytes);
      ASSERT_GE(*error->offset() + error->length().value_or(0), cut);
    } else {
      ++complete;
      ASSERT_EQ(pattern_fault(memory, begin, seed), "") << "round " << round << ", cut at " << cut;
    }
    const auto rest = std::span(whole).subspan(cut);
    ASSERT_EQ(::pwrite(fd, rest.data(), rest.size(), static_cast<off_t>(cut)),
              static_cast<ssize_t>(rest.size()));
    // Syncs, so that the next cut finds bytes on the drive.
    if (round % 8 == 0) {
      ASSERT_EQ(::fdatasync(fd), 0);
    }
  }
  ::close(fd);
  EXPECT_GT(complete, 0);
  EXPECT_GT(cut_short, 20) << "the cuts came too late";
}

TEST_P(Truncation, a_write_after_a_cut_extends_the_file_again) {
  write_whole_file(path_, pattern(1 * MiB, 0, seed));
  Handle handle(options());
  const File file = File::open(path_, Access::read_write);
  ASSERT_EQ(::truncate(path_.c_str(), 1000), 0);
  GuardedMemory buffer(300'000, 9);
  buffer.fill(500'001, seed);
  ASSERT_ENDED_WELL(handle.write(buffer.bytes(), file, 500'001));
  EXPECT_EQ(file.size(), 800'001U);
  const auto found = support::read_whole_file(path_);
  const std::span<const std::byte> all(found);
  EXPECT_EQ(pattern_fault(all.first(1000), 0, seed), "");
  EXPECT_EQ(support::constant_fault(all.subspan(1000, 499'001), 1000, std::byte{0}), "")
      << "a hole reads as zeros";
  EXPECT_EQ(pattern_fault(all.subspan(500'001), 500'001, seed), "");
}

}  // namespace
}  // namespace tensorferry::faults::truncation
