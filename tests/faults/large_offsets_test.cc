// F15: offsets and lengths around 2 GiB, 4 GiB and 0x7ffff000 (the most that one system call
// moves).
#include <fcntl.h>
#include <unistd.h>

#include <fstream>

#include "rig.h"

namespace tensorferry::faults::large_offsets {
namespace {

using engines::Request;
using engines::RequestKind;
using support::Fault;

constexpr std::uint32_t seed = 111;
constexpr std::uint64_t call_max = 0x7ffff000;
constexpr std::uint64_t edges[] = {call_max, 2 * GiB, 4 * GiB};

class LargeOffsets : public ::testing::TestWithParam<EngineKind> {
 protected:
  // A sparse file with data at the places of the tests.
  void make_sparse(std::uint64_t bytes) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_EQ(::ftruncate(fd_, static_cast<off_t>(bytes)), 0);
  }
  void put(std::uint64_t offset, std::size_t bytes) const {
    const auto data = support::pattern(bytes, offset, seed);
    ASSERT_EQ(::pwrite(fd_, data.data(), bytes, static_cast<off_t>(offset)),
              static_cast<ssize_t>(bytes));
  }
  [[nodiscard]] std::vector<std::byte> get(std::uint64_t offset, std::size_t bytes) const {
    std::vector<std::byte> data(bytes);
    const ssize_t got = ::pread(fd_, data.data(), bytes, static_cast<off_t>(offset));
    data.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
    return data;
  }
  void TearDown() override {
    if (fd_ >= 0) ::close(fd_);
  }

  support::TempDir dir_;
  std::string path_ = dir_.file("data");
  int fd_ = -1;
};

INSTANTIATE_TEST_SUITE_P(Engines, LargeOffsets, all_engines, engine_name);

std::uint64_t available_memory() {
  std::ifstream facts("/proc/meminfo");
  std::string word;
  while (facts >> word) {
    std::uint64_t kib = 0;
    if (word == "MemAvailable:" && facts >> kib) return kib * KiB;
  }
  return 0;
}

TEST_P(LargeOffsets, transfers_across_every_edge_are_exact) {
  make_sparse(4 * GiB + 1 * MiB);
  Handle handle({.engine = GetParam(), .block_bytes = 64 * KiB});
  const File file = File::open(path_, Access::read_write);
  for (const std::uint64_t edge : edges) {
    put(edge - 300'000, 600'000);
    for (const std::uint64_t at : {edge - 1, edge, edge + 1}) {
      for (const std::uint64_t begin : {at - 200'000, at - 1, at}) {
        SCOPED_TRACE("from " + std::to_string(begin) + " over " + std::to_string(at));
        for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{250'001}}) {
          GuardedMemory buffer(bytes, begin % 8);
          ASSERT_ENDED_WELL(handle.read(buffer.bytes(), file, begin));
          ASSERT_EQ(buffer.fault(begin, seed), "");
          buffer.clear();
          handle.read_now(buffer.bytes(), file, begin);
          ASSERT_EQ(buffer.fault(begin, seed), "");
          buffer.fill(begin, seed + 1);
          ASSERT_ENDED_WELL(handle.write(buffer.bytes(), file, begin));
          ASSERT_EQ(pattern_fault(get(begin, bytes), begin, seed + 1), "");
          ASSERT_EQ(pattern_fault(get(begin - 16, 16), begin - 16, seed), "");
          ASSERT_EQ(pattern_fault(get(begin + bytes, 16), begin + bytes, seed), "");
          buffer.fill(begin, seed);
          handle.write_now(buffer.bytes(), file, begin);
          ASSERT_EQ(pattern_fault(get(begin, bytes), begin, seed), "");
        }
      }
    }
  }
  EXPECT_EQ(get(0, 4096), std::vector<std::byte>(4096)) << "an offset wrapped round";
  EXPECT_EQ(file.size(), 4 * GiB + 1 * MiB);
}

// Pretends the requests and checks only the split: no gap, no overlap, no request too long.
void expect_split(Rig& rig, const File& file, RequestKind kind, std::span<std::byte> memory,
                  std::uint64_t offset) {
  SCOPED_TRACE(std::to_string(memory.size()) + " bytes at " + std::to_string(offset));
  rig.engine.reset_counts();
  ASSERT_ENDED_WELL(kind == RequestKind::read ? rig.handle.read(memory, file, offset)
                                              : rig.handle.write(memory, file, offset));
  auto log = rig.engine.log();
  std::sort(log.begin(), log.end(), [](const auto& a, const auto& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  ASSERT_FALSE(log.empty());
  // A read may cover more at both ends, up to the alignment.
  ASSERT_LE(log.front().offset, offset);
  ASSERT_TRUE(kind == RequestKind::read || log.front().offset == offset);
  std::uint64_t at = log.front().offset;
  for (const auto& taken : log) {
    ASSERT_EQ(taken.kind, kind);
    ASSERT_EQ(taken.offset, at) << "a gap or an overlap";
    ASSERT_LE(taken.bytes, GiB);
    ASSERT_GT(taken.bytes, 0U);
    at += taken.bytes;
  }
  ASSERT_GE(at, offset + memory.size());
  ASSERT_LE(at, kind == RequestKind::read ? align_up(offset + memory.size(), page_bytes())
                                          : offset + memory.size());
}

TEST_P(LargeOffsets, every_length_around_every_edge_is_split_without_gap_or_overlap) {
  const support::UntouchedMemory memory(4 * GiB + 2 * MiB);
  for (const std::size_t block : {std::size_t{0}, 16 * MiB, GiB}) {
    Rig rig({.engine = GetParam(), .block_bytes = block});
    rig.engine.log_requests = true;
    rig.engine.judge = [](const Request&, std::uint64_t) -> Fault {
      return {Fault::Kind::pretend, 0, 0};
    };
    rig.system.all_memory_is_huge = true;  // nothing is copied
    rig.system.add({.call = support::Call::fallocate,
                    .times = support::SystemRule::always,
                    .error = EOPNOTSUPP});
    const File file = rig.open_file(path_);
    for (const std::uint64_t edge : edges) {
      for (const std::uint64_t length : {edge - 1, edge, edge + 1}) {
        for (const std::uint64_t offset : {std::uint64_t{0}, edge - 1, edge, edge + 1}) {
          // Memory that suits direct I/O.
          const auto part = memory.bytes().subspan(offset % page_bytes(), length);
          expect_split(rig, file, RequestKind::read, part, offset);
          expect_split(rig, file, RequestKind::write, part, offset);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(LargeOffsets, a_read_longer_than_one_system_call_is_exact) {
  if (available_memory() < 9 * GiB) GTEST_SKIP() << "needs 9 GiB of free memory";
  make_sparse(4 * GiB + 1 * MiB);
  for (const std::uint64_t edge : edges) put(edge - 64 * KiB, 128 * KiB);
  put(0, 64 * KiB);
  Handle handle({.engine = GetParam()});
  const File file = File::open(path_, Access::read);
  const support::UntouchedMemory memory(4 * GiB + 2 * MiB);
  for (const std::uint64_t length : {call_max + 1, 4 * GiB + 1}) {
    SCOPED_TRACE("length " + std::to_string(length));
    const auto all = memory.bytes().first(length + 64);
    std::fill(all.end() - 64, all.end(), std::byte{0x33});
    const Operation operation = handle.read(all.first(length), file, 0);
    ASSERT_ENDED_WELL(operation);
    EXPECT_EQ(operation.bytes(), length);
    EXPECT_EQ(pattern_fault(all.first(64 * KiB), 0, seed), "");
    for (const std::uint64_t edge : edges) {
      if (edge > length) break;
      const std::uint64_t begin = edge - 64 * KiB;
      const std::size_t bytes = std::min<std::uint64_t>(128 * KiB, length - begin);
      EXPECT_EQ(pattern_fault(all.subspan(begin, bytes), begin, seed), "");
    }
    EXPECT_EQ(support::constant_fault(all.subspan(length), length, std::byte{0x33}), "")
        << "written beyond the end of the buffer";
  }
}

TEST_P(LargeOffsets, a_write_longer_than_one_system_call_reaches_the_file) {
  constexpr std::uint64_t length = 2 * GiB + 4097;
  const support::UntouchedMemory memory(length + 8);
  for (const std::uint64_t edge : {std::uint64_t{0}, call_max, 2 * GiB}) {
    support::fill_pattern(memory.bytes().subspan(edge, 4097), edge + 1, seed);
  }
  Handle handle({.engine = GetParam()});
  const File file = File::open(path_, Access::read_write);
  ASSERT_ENDED_WELL(handle.write(memory.bytes().first(length), file, 1));
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(file.size(), length + 1);
  for (const std::uint64_t edge : {std::uint64_t{0}, call_max, 2 * GiB}) {
    EXPECT_EQ(pattern_fault(get(edge + 1, 4097), edge + 1, seed), "");
  }
  EXPECT_EQ(get(1 * GiB, 4096), std::vector<std::byte>(4096));
}

TEST_P(LargeOffsets, offsets_that_no_file_can_have_are_refused_at_once) {
  make_sparse(4096);
  Handle handle({.engine = GetParam()});
  const File file = File::open(path_, Access::read_write);
  GuardedMemory buffer(4096);
  for (const std::uint64_t offset :
       {~std::uint64_t{0}, std::uint64_t{1} << 63, (std::uint64_t{1} << 63) - 4095}) {
    const auto read = thrown_by([&] { (void)handle.read(buffer.bytes(), file, offset); });
    ASSERT_TRUE(read.has_value());
    EXPECT_EQ(read->code(), EINVAL);
    const auto write = thrown_by([&] { (void)handle.write(buffer.bytes(), file, offset); });
    ASSERT_TRUE(write.has_value());
    EXPECT_EQ(write->code(), EINVAL);
  }
  // A valid number, but too large for ext4: the file system refuses it.
  const std::uint64_t far = (std::uint64_t{1} << 62);
  EXPECT_EQ(outcome_code(handle.write(buffer.bytes(), file, far)), EFBIG);
  EXPECT_EQ(outcome_code(handle.read(buffer.bytes(), file, far)), ENODATA);
}

}  // namespace
}  // namespace tensorferry::faults::large_offsets
