// F6: a full disk is an error that gives the bytes needed and free. Old data stays valid. The same
// handle and file work again once the disk has space.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>

#include "rig.h"
#include "support/child.h"
#include "support/loop_device.h"

namespace tensorferry::faults::no_space {
namespace {

using support::LoopDevice;
using support::Mount;
using support::pattern;
using support::read_whole_file;
using support::write_whole_file;

constexpr std::uint32_t old_seed = 61;
constexpr std::uint32_t new_seed = 62;
constexpr std::size_t save_bytes = 4 * MiB;
constexpr std::size_t old_bytes = 100'000;

// A file that takes up the space that a test asks for.
class Filler {
 public:
  explicit Filler(const std::string& path)
      : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {}
  ~Filler() { ::close(fd_); }
  Filler(const Filler&) = delete;
  Filler& operator=(const Filler&) = delete;

  // Leaves about `bytes` free and returns the exact number.
  std::uint64_t leave(std::uint64_t bytes) const {
    ::syncfs(fd_);  // ext4 gives blocks back only then
    struct stat facts{};
    EXPECT_EQ(::fstat(fd_, &facts), 0);
    const auto size = static_cast<std::uint64_t>(facts.st_size);
    const std::uint64_t free = free_bytes();
    if (free < bytes) {
      EXPECT_EQ(::ftruncate(fd_, static_cast<off_t>(size - std::min(size, bytes - free))), 0);
      ::syncfs(fd_);
      return free_bytes();
    }
    std::uint64_t taken = free - bytes;
    // The last few blocks may be needed for metadata.
    while (taken > 0 &&
           ::fallocate(fd_, 0, static_cast<off_t>(size), static_cast<off_t>(taken)) != 0) {
      taken = taken > 64 * KiB ? taken - 64 * KiB : 0;
    }
    return free_bytes();
  }

  [[nodiscard]] std::uint64_t free_bytes() const {
    struct statfs facts{};
    ::fstatfs(fd_, &facts);
    // With the blocks that ext4 keeps for root: the test is root.
    return static_cast<std::uint64_t>(facts.f_bfree) * static_cast<std::uint64_t>(facts.f_bsize);
  }

 private:
  int fd_;
};

class NoSpace : public ::testing::TestWithParam<EngineKind> {
 protected:
  void SetUp() override {
    if (const auto reason = support::mounts_unavailable_reason(); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }

  static HandleOptions options() {
    return {.engine = GetParam(), .block_bytes = 256 * KiB, .queue_depth = 8};
  }

  // Saves 4 MiB behind the old bytes of `path`, with about `wanted` bytes left on the disk.
  static void save_with(Handle& handle, const std::string& path, Filler& filler,
                        std::uint64_t wanted, std::span<const std::byte> memory) {
    if (filler.free_bytes() < MiB) filler.leave(MiB);
    write_whole_file(path, pattern(old_bytes, 0, old_seed));
    const std::uint64_t free = filler.leave(wanted);
    const File file = File::open(path, Access::read_write);
    const auto error = outcome(handle.write(memory, file, old_bytes));
    const auto found = read_whole_file(path);
    const std::span<const std::byte> all(found);
    ASSERT_GE(found.size(), old_bytes);
    ASSERT_EQ(pattern_fault(all.first(old_bytes), 0, old_seed), "") << "old data, free " << free;
    if (!error) {
      ASSERT_EQ(found.size(), old_bytes + save_bytes)
          << "the write was acknowledged, but bytes are missing";
      ASSERT_EQ(pattern_fault(all.subspan(old_bytes), old_bytes, new_seed), "");
      ASSERT_GE(free + 64 * KiB, save_bytes) << "more bytes were saved than the disk had free";
      return;
    }
    ASSERT_EQ(error->code(), ENOSPC) << error->what();
    ASSERT_EQ(error->operation(), "write");
    ASSERT_EQ(error->path(), path);
    ASSERT_TRUE(error->offset() && error->length());
    ASSERT_NE(error->hint().find("free"), std::string::npos) << error->what();
    ASSERT_NE(error->hint().find("need"), std::string::npos) << error->what();
  }
};

INSTANTIATE_TEST_SUITE_P(Engines, NoSpace, all_engines, engine_name);

// tmpfs gives short writes first.
TEST_P(NoSpace, a_tmpfs_full_at_every_4_kib_of_a_save_is_an_error_and_old_data_stays) {
  const Mount disk("tmpfs", "size=8m");
  Handle handle(options());
  GuardedMemory buffer(save_bytes);
  buffer.fill(old_bytes, new_seed);
  Filler filler(disk.file("filler"));
  for (std::uint64_t free = 0; free <= save_bytes; free += 4096) {
    save_with(handle, disk.file("data"), filler, free, buffer.bytes());
    if (HasFatalFailure()) return;
    ::unlink(disk.file("data").c_str());
  }
  save_with(handle, disk.file("data"), filler, 7 * MiB, buffer.bytes());
  EXPECT_EQ(std::filesystem::file_size(disk.file("data")), old_bytes + save_bytes)
      << "the disk has space again";
}

// ext4 refuses whole requests.
TEST_P(NoSpace, an_ext4_full_at_any_point_of_a_save_is_an_error_and_old_data_stays) {
  if (const auto reason = LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  LoopDevice disk(64 * MiB);
  disk.make_file_system("ext4");
  disk.mount();
  Handle handle(options());
  GuardedMemory buffer(save_bytes);
  buffer.fill(old_bytes, new_seed);
  Filler filler(disk.file("filler"));
  const std::uint64_t step = soaking() ? 4096 : 32 * KiB;
  for (std::uint64_t free = 0; free <= save_bytes + 512 * KiB; free += step) {
    save_with(handle, disk.file("data"), filler, free, buffer.bytes());
    if (HasFatalFailure()) return;
    ::unlink(disk.file("data").c_str());
  }
}

TEST_P(NoSpace, the_same_handle_and_file_work_again_once_there_is_space) {
  const Mount disk("tmpfs", "size=8m");
  Handle handle(options());
  GuardedMemory buffer(save_bytes);
  buffer.fill(0, new_seed);
  Filler filler(disk.file("filler"));
  const File file = File::open(disk.file("data"), Access::read_write);
  for (int round = 0; round < 5; ++round) {
    ASSERT_EQ(::truncate(disk.file("data").c_str(), 0), 0);
    filler.leave(1 * MiB);
    ASSERT_EQ(outcome_code(handle.write(buffer.bytes(), file, 0)), ENOSPC);
    filler.leave(0);
    const auto small =
        thrown_by([&] { handle.write_now(buffer.bytes().first(8192), file, 6 * MiB); });
    ASSERT_TRUE(small.has_value()) << "inline";
    EXPECT_EQ(small->code(), ENOSPC);
    ASSERT_EQ(::truncate(disk.file("data").c_str(), 0), 0);
    filler.leave(7 * MiB);
    ASSERT_ENDED_WELL(handle.write(buffer.bytes(), file, 0));
    EXPECT_EQ(pattern_fault(read_whole_file(disk.file("data")), 0, new_seed), "");
  }
}

TEST_P(NoSpace, writing_over_old_data_needs_no_space) {
  if (const auto reason = LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  LoopDevice disk(64 * MiB);
  disk.make_file_system("ext4");
  disk.mount();
  write_whole_file(disk.file("data"), pattern(save_bytes, 0, old_seed));
  Filler filler(disk.file("filler"));
  filler.leave(0);
  Handle handle(options());
  const File file = File::open(disk.file("data"), Access::read_write);
  GuardedMemory buffer(save_bytes - 3000, 3);
  buffer.fill(1001, new_seed);
  ASSERT_ENDED_WELL(handle.write(buffer.bytes(), file, 1001, Durability::data));
  const auto found = read_whole_file(disk.file("data"));
  const std::span<const std::byte> all(found);
  const std::size_t end = 1001 + save_bytes - 3000;
  EXPECT_EQ(pattern_fault(all.first(1001), 0, old_seed), "");
  EXPECT_EQ(pattern_fault(all.subspan(1001, save_bytes - 3000), 1001, new_seed), "");
  EXPECT_EQ(pattern_fault(all.subspan(end), end, old_seed), "");
}

// RLIMIT_FSIZE gives a short write and then EFBIG.
TEST_P(NoSpace, a_file_size_limit_is_an_error_and_the_process_lives) {
  const support::TempDir dir;
  const auto child = support::run_in_child([&]() -> std::string {
    ::signal(SIGXFSZ, SIG_IGN);
    const struct rlimit limit{1 * MiB + 4096, 1 * MiB + 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    Handle handle(options());
    const File file = File::open(dir.file("data"), Access::read_write);
    GuardedMemory buffer(save_bytes);
    buffer.fill(0, new_seed);
    const auto error = outcome(handle.write(buffer.bytes(), file, 0));
    if (!error) return "acknowledged over the limit";
    if (error->code() != EFBIG) return error->what();
    if (error->hint().empty()) return "no hint";
    handle.write(buffer.bytes().first(1 * MiB), file, 0).wait();
    GuardedMemory in(1 * MiB);
    handle.read(in.bytes(), file, 0).wait();
    return in.fault(0, new_seed);
  });
  EXPECT_TRUE(child.passed()) << child;
}

}  // namespace
}  // namespace tensorferry::faults::no_space
