// Space and alignment: reserve(), and devices with blocks of 512 and 4096 bytes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "base/alignment.h"
#include "files/open_file.h"
#include "support/faulty_system.h"
#include "support/loop_device.h"
#include "support/memory.h"
#include "support/pattern.h"
#include "support/temp_dir.h"

namespace tensorferry::files {
namespace {

using support::Call;
using support::LoopDevice;

void reserve(OpenFile& file, std::uint64_t offset, std::uint64_t bytes) {
  file.reserve(offset, bytes, file.size().or_throw());
}

class Reserve : public ::testing::Test {
 protected:
  Reserve() : file(OpenFile::open(system, dir.file("data"), Access::read_write).or_throw()) {}
  void SetUp() override {
    if (!file->direct()) GTEST_SKIP() << file->direct_reason();
  }

  [[nodiscard]] std::uint64_t allocated_bytes() const {
    struct stat facts{};
    EXPECT_EQ(::stat(file->path().c_str(), &facts), 0);
    return static_cast<std::uint64_t>(facts.st_blocks) * 512;
  }

  support::FaultySystem system;
  support::TempDir dir;
  std::shared_ptr<OpenFile> file;
};

TEST_F(Reserve, takes_the_space_and_moves_the_end) {
  reserve(*file, 0, 4 * MiB);
  EXPECT_EQ(file->size().or_throw(), 4 * MiB);
  EXPECT_GE(allocated_bytes(), 4 * MiB);
  EXPECT_EQ(support::constant_fault(support::read_whole_file(file->path()), 0, std::byte{0}), "");
}

TEST_F(Reserve, never_truncates_and_keeps_what_is_there) {
  const auto bytes = support::pattern(8 * MiB, 0, 1);
  support::write_whole_file(file->path(), bytes);
  for (const std::uint64_t offset :
       {std::uint64_t{0}, std::uint64_t{MiB}, std::uint64_t{7 * MiB}}) {
    reserve(*file, offset, MiB);
    EXPECT_EQ(file->size().or_throw(), 8 * MiB);
  }
  EXPECT_EQ(system.calls(Call::fallocate), 0U) << "nothing to extend";
  reserve(*file, 7 * MiB, 3 * MiB);
  EXPECT_EQ(file->size().or_throw(), 10 * MiB);
  const auto found = support::read_whole_file(file->path());
  const std::span<const std::byte> all(found);
  EXPECT_EQ(support::pattern_fault(all.first(8 * MiB), 0, 1), "");
  EXPECT_EQ(support::constant_fault(all.subspan(8 * MiB), 0, std::byte{0}), "");
}

TEST_F(Reserve, leaves_small_writes_alone) {
  reserve(*file, 0, MiB - 1);
  reserve(*file, 10 * MiB, 4 * KiB);
  EXPECT_EQ(file->size().or_throw(), 0U);
  EXPECT_EQ(system.calls(Call::fallocate), 0U);
}

TEST_F(Reserve, takes_no_space_for_the_gap_before_it) {
  reserve(*file, 64 * MiB, MiB);
  EXPECT_EQ(file->size().or_throw(), 65 * MiB);
  EXPECT_LT(allocated_bytes(), 8 * MiB);
}

TEST_F(Reserve, does_not_move_the_end_where_the_space_was_refused) {
  for (const int code : {ENOSPC, EOPNOTSUPP, EFBIG, EINTR}) {
    system.add({.call = Call::fallocate, .first = system.calls(Call::fallocate), .error = code});
    reserve(*file, 0, 4 * MiB);
    EXPECT_EQ(file->size().or_throw(), 0U) << code;
  }
}

TEST_F(Reserve, does_not_fill_the_disk_for_a_write_that_cannot_fit) {
  reserve(*file, 0, file->free_bytes() + GiB);
  EXPECT_EQ(file->size().or_throw(), 0U);
  EXPECT_EQ(allocated_bytes(), 0U);
  reserve(*file, 0, std::uint64_t{1} << 62);
  EXPECT_EQ(file->size().or_throw(), 0U);
}

// --- Devices ---------------------------------------------------------------------------------

class SectorSize : public ::testing::TestWithParam<unsigned> {
 protected:
  void SetUp() override {
    if (const auto reason = LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }
};

TEST_P(SectorSize, is_the_alignment_of_the_files_on_the_device) {
  LoopDevice loop(64 * MiB, GetParam());
  loop.make_file_system("ext4");
  loop.mount();
  {
    const File file = File::open(loop.file("data"), Access::read_write);
    ASSERT_TRUE(file.direct()) << file.direct_reason();
    EXPECT_EQ(file.offset_alignment(), GetParam());
    EXPECT_LE(file.memory_alignment(), GetParam());
    const auto pages = support::Memory::with_pattern(2 * 4096, 0, 1);
    const int fd = file.opened()->direct_fd();
    ASSERT_EQ(::pwrite(fd, pages.at(0), pages.bytes().size(), 0), 2 * 4096);
    EXPECT_EQ(::pread(fd, pages.at(0), GetParam(), GetParam()), ssize_t{GetParam()});
    // A smaller alignment is refused.
    EXPECT_EQ(::pread(fd, pages.at(0), GetParam() / 2, 0), -1);
    EXPECT_EQ(errno, EINVAL);
  }
  loop.unmount();
}

TEST_P(SectorSize, the_device_itself_is_a_file) {
  const LoopDevice loop(16 * MiB, GetParam());
  const File file = File::open(loop.device(), Access::read_write);
  EXPECT_EQ(file.size(), 16 * MiB);
  ASSERT_TRUE(file.direct()) << file.direct_reason();
  EXPECT_EQ(file.offset_alignment(), GetParam());
  EXPECT_EQ(file.opened()->directory().or_throw(), nullptr);
  const auto pages = support::Memory::with_pattern(2 * 4096, 0, 1);
  const int direct = file.opened()->direct_fd();
  ASSERT_EQ(::pwrite(direct, pages.at(0), pages.bytes().size(), 8 * MiB), 2 * 4096);
  ASSERT_EQ(::fdatasync(direct), 0);
  std::vector<std::byte> back(100);
  const int buffered = file.opened()->buffered_fd().or_throw();
  ASSERT_EQ(::pread(buffered, back.data(), back.size(), 8 * MiB + 3), 100);
  EXPECT_EQ(support::pattern_fault(back, 3, 1), "");
  reserve(*file.opened(), 8 * MiB, 16 * MiB);
  EXPECT_EQ(file.size(), 16 * MiB) << "a device has no end to move";
  EXPECT_EQ(file.opened()->free_bytes(), 0U);
}

TEST_P(SectorSize, the_device_can_be_borrowed) {
  const LoopDevice loop(16 * MiB, GetParam());
  const int callers = ::open(loop.device().c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(callers, 0);
  const File file = File::borrow(callers);
  ::close(callers);
  EXPECT_EQ(file.size(), 16 * MiB);
  EXPECT_EQ(file.offset_alignment(), GetParam());
  EXPECT_FALSE(file.opened()->writable());
}

INSTANTIATE_TEST_SUITE_P(loop, SectorSize, ::testing::Values(512U, 4096U),
                         [](const auto& size) { return std::to_string(size.param); });

}  // namespace
}  // namespace tensorferry::files
