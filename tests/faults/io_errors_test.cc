// F2 and F3: an I/O error fails only its own operation, with path and place. A failed sync is never
// repeated: the kernel has marked the lost pages clean.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <random>
#include <set>

#include "rig.h"
#include "support/loop_device.h"

namespace tensorferry::faults::io_errors {
namespace {

using engines::Request;
using engines::RequestKind;
using support::Call;
using support::Fault;
using support::LoopDevice;
using support::pattern;
using support::write_whole_file;

constexpr std::size_t scan_bytes = 100 * MiB;
constexpr std::uint32_t seed = 31;

// The errno of a call that fails at once or later; 0 after success.
template <class Act>
int failure_code(Act act) {
  const auto error = thrown_by(act);
  return error ? error->code() : 0;
}

bool is_sync(const Request& request) {
  return request.kind == RequestKind::sync_data || request.kind == RequestKind::sync_full;
}

class IoErrors : public ::testing::TestWithParam<EngineKind> {
 protected:
  static HandleOptions options() {
    return {.engine = GetParam(), .block_bytes = 256 * KiB, .queue_depth = 16};
  }

  support::TempDir dir_;
  std::string path_ = dir_.file("data");
};

INSTANTIATE_TEST_SUITE_P(Engines, IoErrors, all_engines, engine_name);

// The blocks of a file that plain pread() cannot read.
std::set<std::size_t> blocks_lost(const std::string& path, std::size_t block) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  const support::Memory memory(block);
  std::set<std::size_t> lost;
  for (std::size_t i = 0; i < scan_bytes / block; ++i) {
    const ssize_t got = ::pread(fd, memory.at(0), block, static_cast<off_t>(i * block));
    if (got != static_cast<ssize_t>(block)) lost.insert(i);
  }
  ::close(fd);
  return lost;
}

// Reads the file in operations of one block each, all in flight at once.
void expect_scan(Handle& handle, const File& file, std::size_t block,
                 const std::set<std::size_t>& bad) {
  GuardedMemory buffer(scan_bytes);
  std::vector<Operation> operations;
  for (std::size_t at = 0; at < scan_bytes; at += block) {
    operations.push_back(handle.read(buffer.bytes().subspan(at, block), file, at));
  }
  for (std::size_t i = 0; i < operations.size(); ++i) {
    const auto error = outcome(operations[i]);
    if (!bad.contains(i)) {
      ASSERT_FALSE(error.has_value()) << "a healthy block: " << error->what();
      ASSERT_EQ(pattern_fault(buffer.bytes().subspan(i * block, block), i * block, seed), "");
      continue;
    }
    ASSERT_TRUE(error.has_value()) << "the handle took bad block " << i << " for data";
    EXPECT_EQ(error->code(), EIO);
    EXPECT_EQ(error->operation(), "read");
    EXPECT_EQ(error->path(), file.path());
    ASSERT_TRUE(error->offset().has_value());
    EXPECT_GE(*error->offset(), i * block);
    EXPECT_LT(*error->offset(), (i + 1) * block);
    EXPECT_FALSE(error->hint().empty());
  }
}

TEST_P(IoErrors, a_scan_of_a_failing_drive_tells_good_blocks_from_bad) {
  if (const auto reason = LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  constexpr std::size_t block = 256 * KiB;
  LoopDevice device(scan_bytes + 40 * MiB);
  device.make_file_system("ext4", "^has_journal");
  device.mount();
  write_whole_file(device.file("weights"), pattern(scan_bytes, 0, seed));
  device.lose_everything_from(60 * MiB);
  const auto bad = blocks_lost(device.file("weights"), block);
  ASSERT_GT(bad.size(), 20U);
  ASSERT_LT(bad.size(), scan_bytes / block - 20);

  Handle handle(options());
  const File file = File::open(device.file("weights"), Access::read);
  expect_scan(handle, file, block, bad);
  const Stats stats = handle.stats();
  EXPECT_EQ(stats.failed_operations, bad.size());
  EXPECT_EQ(stats.operations, scan_bytes / block);

  GuardedMemory small(4096);
  handle.read_now(small.bytes(), file, 0);
  EXPECT_EQ(small.fault(0, seed), "") << "the handle no longer works";
  const auto inline_error =
      thrown_by([&] { handle.read_now(small.bytes(), file, *bad.rbegin() * block); });
  ASSERT_TRUE(inline_error.has_value());
  EXPECT_EQ(inline_error->code(), EIO);
}

TEST_P(IoErrors, a_scan_over_scattered_bad_blocks_reports_each_one) {
  constexpr std::size_t block = 1 * MiB;
  write_whole_file(path_, pattern(scan_bytes, 0, seed));
  Rig rig(options());
  std::mt19937_64 dice(9);
  std::set<std::size_t> bad;
  while (bad.size() < 13) bad.insert(dice() % (scan_bytes / block));
  // One sector of each bad block is unreadable.
  rig.engine.judge = [&bad](const Request& request, std::uint64_t) -> Fault {
    for (const std::size_t i : bad) {
      const std::uint64_t sector = i * block + i * 4096;
      if (request.offset <= sector && sector < request.offset + request.bytes) {
        return {Fault::Kind::fail, 0, EIO};
      }
    }
    return {};
  };
  const File file = rig.open_file(path_, Access::read);
  expect_scan(rig.handle, file, block, bad);
  rig.engine.judge = nullptr;
  expect_scan(rig.handle, file, block, {});
}

TEST_P(IoErrors, one_large_read_over_a_bad_block_fails_and_names_it) {
  write_whole_file(path_, pattern(8 * MiB, 0, seed));
  Rig rig(options());
  constexpr std::uint64_t sector = 5 * MiB + 4096;
  rig.engine.judge = [](const Request& request, std::uint64_t) -> Fault {
    const bool hit = request.offset <= sector && sector < request.offset + request.bytes;
    return hit ? Fault{Fault::Kind::fail, 0, EIO} : Fault{};
  };
  const File file = rig.open_file(path_, Access::read);
  for (const std::size_t skew : {0U, 24U}) {
    GuardedMemory buffer(8 * MiB, skew);
    const auto error = outcome(rig.handle.read(buffer.bytes(), file, 0));
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), EIO);
    ASSERT_TRUE(error->offset() && error->length());
    EXPECT_LE(*error->offset(), sector);
    EXPECT_GT(*error->offset() + *error->length(), sector);
    EXPECT_NE(std::string(error->what()).find(path_), std::string::npos);
  }
}

TEST_P(IoErrors, a_failed_write_fails_its_operation_only) {
  write_whole_file(path_, pattern(8 * MiB, 0, seed));
  for (const int code : {EIO, ENOSPC, EDQUOT, EROFS, ENXIO}) {
    Rig rig(options());
    rig.engine.judge = [code](const Request& request, std::uint64_t) -> Fault {
      const bool hit = request.kind == RequestKind::write && request.offset / MiB == 3;
      return hit ? Fault{Fault::Kind::fail, 0, code} : Fault{};
    };
    const File file = rig.open_file(path_);
    GuardedMemory buffer(8 * MiB);
    buffer.fill(0, seed);
    std::vector<Operation> operations;
    for (std::size_t at = 0; at < 8 * MiB; at += MiB) {
      operations.push_back(
          rig.handle.write(buffer.bytes().subspan(at, MiB), file, at,
                           at % (2 * MiB) == 0 ? Durability::none : Durability::data));
    }
    for (std::size_t i = 0; i < operations.size(); ++i) {
      const auto error = outcome(operations[i]);
      if (i != 3) {
        EXPECT_FALSE(error.has_value()) << error->what();
        continue;
      }
      ASSERT_TRUE(error.has_value()) << "acknowledged, though it failed";
      EXPECT_EQ(error->code(), code);
      EXPECT_EQ(error->operation(), "write");
      EXPECT_EQ(error->path(), path_);
      EXPECT_EQ(error->offset().value_or(0) / MiB, 3U);
    }
    rig.engine.judge = nullptr;
    ASSERT_ENDED_WELL(rig.handle.write(buffer.bytes(), file, 0, Durability::data));
  }
}

// Every way to ask for durability. Each call makes one or more sync calls, on the engine or inline.
struct SyncSite {
  const char* name;
  void (*act)(Rig& rig, const File& file, std::span<std::byte> memory);
};

const SyncSite sync_sites[] = {
    {"write data",
     [](Rig& rig, const File& file, std::span<std::byte> memory) {
       rig.handle.write(memory, file, 0, Durability::data).wait();
     }},
    {"write full",
     [](Rig& rig, const File& file, std::span<std::byte> memory) {
       rig.handle.write(memory, file, 0, Durability::full).wait();
     }},
    {"write unaligned full",
     [](Rig& rig, const File& file, std::span<std::byte> memory) {
       rig.handle.write(memory.subspan(1), file, 17, Durability::full).wait();
     }},
    {"write_many data",
     [](Rig& rig, const File& file, std::span<std::byte> memory) {
       const WriteTransfer parts[] = {{memory.first(5000), file, 0},
                                      {memory.subspan(9000), file, 9000}};
       rig.handle.write_many(parts, Durability::data).wait();
     }},
    {"write_many full",
     [](Rig& rig, const File& file, std::span<std::byte> memory) {
       const WriteTransfer parts[] = {{memory.first(5000), file, 0},
                                      {memory.subspan(9000), file, 9000}};
       rig.handle.write_many(parts, Durability::full).wait();
     }},
    {"sync data", [](Rig& rig, const File& file,
                     std::span<std::byte>) { rig.handle.sync(file, Durability::data).wait(); }},
    {"sync full", [](Rig& rig, const File& file,
                     std::span<std::byte>) { rig.handle.sync(file, Durability::full).wait(); }},
    {"write_now data",
     [](Rig& rig, const File& file, std::span<std::byte> memory) {
       rig.handle.write_now(memory.first(4096), file, 0, Durability::data);
     }},
    {"write_now full",
     [](Rig& rig, const File& file, std::span<std::byte> memory) {
       rig.handle.write_now(memory.first(4096), file, 0, Durability::full);
     }},
    {"write_now large full",
     [](Rig& rig, const File& file, std::span<std::byte> memory) {
       rig.handle.write_now(memory, file, 0, Durability::full);
     }},
};

// Counts the syncs of a rig and fails the chosen one, on the engine or inline.
class SyncWatch {
 public:
  explicit SyncWatch(Rig& rig) : rig_(rig) {}

  // The `index`-th sync from now fails with `error`; none if it is beyond the last.
  void arm(std::uint64_t index, int error) {
    rig_.engine.reset_counts();
    rig_.system.clear_rules();
    rig_.engine.judge = [index, error, seen = std::uint64_t{0}](const Request& request,
                                                                std::uint64_t) mutable -> Fault {
      if (!is_sync(request) || seen++ != index) return {};
      return {Fault::Kind::fail, 0, error};
    };
    datasyncs_ = rig_.system.calls(Call::fdatasync);
    fsyncs_ = rig_.system.calls(Call::fsync);
    for (const Call call : {Call::fdatasync, Call::fsync}) {
      rig_.system.add({.call = call, .first = rig_.system.calls(call) + index, .error = error});
    }
  }

  // The number of syncs since. The threads engine makes its syncs through the system.
  [[nodiscard]] std::uint64_t count() const {
    const std::uint64_t inline_syncs =
        rig_.system.calls(Call::fdatasync) - datasyncs_ + rig_.system.calls(Call::fsync) - fsyncs_;
    return std::max(rig_.engine.syncs(), inline_syncs);
  }

 private:
  Rig& rig_;
  std::uint64_t datasyncs_ = 0;
  std::uint64_t fsyncs_ = 0;
};

TEST_P(IoErrors, a_failed_sync_fails_the_operation_and_is_never_repeated) {
  write_whole_file(path_, pattern(2 * MiB, 0, seed));
  Rig rig(options());
  const File file = rig.open_file(path_);
  SyncWatch watch(rig);
  GuardedMemory buffer(2 * MiB);
  for (const SyncSite& site : sync_sites) {
    SCOPED_TRACE(site.name);
    watch.arm(1000, EIO);
    site.act(rig, file, buffer.bytes());
    const std::uint64_t syncs = watch.count();
    const bool full = std::string(site.name).find("full") != std::string::npos;
    ASSERT_EQ(syncs, full ? 2U : 1U) << "full syncs the file and its directory";
    for (std::uint64_t i = 0; i < syncs; ++i) {
      for (const int code : {EIO, ENOSPC, EAGAIN, EINTR}) {
        watch.arm(i, code);
        const auto error = thrown_by([&] { site.act(rig, file, buffer.bytes()); });
        ASSERT_TRUE(error.has_value()) << "sync " << i << " failed and was acknowledged";
        EXPECT_EQ(error->code(), code);
        EXPECT_EQ(error->path(), path_);
        EXPECT_EQ(watch.count(), i + 1) << "a failed sync was repeated, or others came after it";
      }
    }
    watch.arm(1000, EIO);
    site.act(rig, file, buffer.bytes());
  }
}

TEST_P(IoErrors, nothing_is_synced_after_a_failed_write) {
  write_whole_file(path_, pattern(2 * MiB, 0, seed));
  Rig rig(options());
  const File file = rig.open_file(path_);
  GuardedMemory buffer(2 * MiB);
  rig.engine.judge = [](const Request& request, std::uint64_t index) -> Fault {
    const bool hit = request.kind == RequestKind::write && index == 2;
    return hit ? Fault{Fault::Kind::fail, 0, EIO} : Fault{};
  };
  EXPECT_EQ(outcome_code(rig.handle.write(buffer.bytes(), file, 0, Durability::full)), EIO);
  EXPECT_EQ(rig.engine.syncs(), 0U);
}

// A real drive that dies: ext4 shuts down under the file. Writes and syncs fail with EIO.
TEST_P(IoErrors, a_drive_that_dies_fails_every_write_and_sync_and_the_handle_lives_on) {
  if (const auto reason = LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  LoopDevice device(64 * MiB);
  device.make_file_system("ext4");
  device.mount();
  Handle handle(options());
  GuardedMemory buffer(2 * MiB);
  buffer.fill(0, seed);
  {
    const File file = File::open(device.file("a"), Access::read_write);
    ASSERT_ENDED_WELL(handle.write(buffer.bytes(), file, 0, Durability::full));
    device.cut_power(support::PowerCut::journal_lost);
    const auto memory = buffer.bytes();
    for (const Durability durability : {Durability::none, Durability::data, Durability::full}) {
      EXPECT_EQ(failure_code([&] { handle.write(memory, file, 0, durability).wait(); }), EIO);
      EXPECT_EQ(failure_code([&] { handle.write(memory.subspan(1), file, 3, durability).wait(); }),
                EIO);
      EXPECT_EQ(failure_code([&] { handle.write_now(memory.first(4096), file, 0, durability); }),
                EIO);
    }
    EXPECT_EQ(failure_code([&] { handle.sync(file, Durability::data).wait(); }), EIO);
    EXPECT_EQ(failure_code([&] { handle.sync(file, Durability::full).wait(); }), EIO);
  }
  write_whole_file(path_, buffer.bytes());
  const File other = File::open(path_, Access::read);
  GuardedMemory in(2 * MiB);
  ASSERT_ENDED_WELL(handle.read(in.bytes(), other, 0));
  EXPECT_EQ(in.fault(0, seed), "");
}

}  // namespace
}  // namespace tensorferry::faults::io_errors
