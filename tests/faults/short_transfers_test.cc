// F1: a short read or write goes on where it stopped. Each test strikes every request of an
// operation once with every short length, on every engine; all bytes must be right.
#include <random>

#include "rig.h"

namespace tensorferry::faults::short_transfers {
namespace {

using engines::Request;
using support::Call;
using support::Fault;
using support::pattern;
using support::read_whole_file;
using support::strike_one;
using support::write_whole_file;

constexpr std::size_t block = 64 * KiB;
constexpr std::size_t file_bytes = 8 * block;
constexpr std::uint32_t old_seed = 21;
constexpr std::uint32_t new_seed = 22;

// Where an operation lies in the file and in memory.
struct Shape {
  const char* name;
  std::uint64_t offset;
  std::size_t bytes;
  std::size_t skew;
};

constexpr Shape shapes[] = {
    {"aligned", block, 5 * block, 0},
    {"memory unaligned", block, 5 * block, 24},
    {"edges unaligned", block + 1000, 5 * block + 777, 0},
    {"all unaligned", block + 1001, 4 * block + 13, 7},
};

std::vector<std::uint32_t> lengths_of(std::uint32_t bytes) {
  return {1, 511, bytes / 2, bytes - 1};
}

class ShortTransfers : public ::testing::TestWithParam<EngineKind> {
 protected:
  ShortTransfers() { write_whole_file(path_, pattern(file_bytes, 0, old_seed)); }

  static HandleOptions options() {
    return {.engine = GetParam(), .block_bytes = block, .queue_depth = 4};
  }

  // Checks the file after `shape` was written over the old bytes.
  void expect_written(const Shape& shape) const {
    const auto bytes = read_whole_file(path_);
    ASSERT_EQ(bytes.size(), file_bytes);
    const std::span<const std::byte> all(bytes);
    const std::uint64_t end = shape.offset + shape.bytes;
    EXPECT_EQ(pattern_fault(all.first(shape.offset), 0, old_seed), "") << "before it";
    EXPECT_EQ(pattern_fault(all.subspan(shape.offset, shape.bytes), shape.offset, new_seed), "");
    EXPECT_EQ(pattern_fault(all.subspan(end), end, old_seed), "") << "behind it";
  }

  support::TempDir dir_;
  std::string path_ = dir_.file("data");
};

INSTANTIATE_TEST_SUITE_P(Engines, ShortTransfers, all_engines, engine_name);

TEST_P(ShortTransfers, short_read_is_continued) {
  Rig rig(options());
  const File file = rig.open_file(path_, Access::read);
  rig.engine.log_requests = true;
  for (const Shape& shape : shapes) {
    GuardedMemory buffer(shape.bytes, shape.skew);
    rig.engine.judge = nullptr;
    rig.engine.reset_counts();
    ASSERT_ENDED_WELL(rig.handle.read(buffer.bytes(), file, shape.offset));
    const auto requests = rig.engine.log();
    ASSERT_GE(requests.size(), 5U);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      for (const std::uint32_t length : lengths_of(requests[i].bytes)) {
        SCOPED_TRACE(std::string(shape.name) + ", request " + std::to_string(i) + " of " +
                     std::to_string(requests[i].bytes) + " bytes cut to " + std::to_string(length));
        rig.engine.judge = strike_one(i, {Fault::Kind::shorten, length, 0});
        rig.engine.reset_counts();
        const std::uint64_t before = rig.handle.stats().short_transfers;
        buffer.clear();
        ASSERT_ENDED_WELL(rig.handle.read(buffer.bytes(), file, shape.offset));
        ASSERT_EQ(buffer.fault(shape.offset, old_seed), "");
        ASSERT_EQ(rig.engine.struck(), 1U);
        // A read that covers more than its bytes may be short without loss.
        if (rig.engine.requests() > requests.size()) {
          ASSERT_GT(rig.handle.stats().short_transfers, before) << "not counted";
        }
      }
    }
  }
}

TEST_P(ShortTransfers, short_write_is_continued) {
  Rig rig(options());
  const File file = rig.open_file(path_);
  rig.engine.log_requests = true;
  for (const Shape& shape : shapes) {
    GuardedMemory buffer(shape.bytes, shape.skew);
    buffer.fill(shape.offset, new_seed);
    rig.engine.judge = nullptr;
    rig.engine.reset_counts();
    ASSERT_ENDED_WELL(rig.handle.write(buffer.bytes(), file, shape.offset));
    const auto requests = rig.engine.log();
    ASSERT_GE(requests.size(), 4U);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      for (const std::uint32_t length : lengths_of(requests[i].bytes)) {
        if (length >= requests[i].bytes) continue;  // a small edge
        SCOPED_TRACE(std::string(shape.name) + ", request " + std::to_string(i) + " of " +
                     std::to_string(requests[i].bytes) + " bytes cut to " + std::to_string(length));
        write_whole_file(path_, pattern(file_bytes, 0, old_seed));
        rig.engine.judge = strike_one(i, {Fault::Kind::shorten, length, 0});
        rig.engine.reset_counts();
        const std::uint64_t before = rig.handle.stats().short_transfers;
        ASSERT_ENDED_WELL(rig.handle.write(buffer.bytes(), file, shape.offset));
        expect_written(shape);
        ASSERT_EQ(rig.engine.struck(), 1U);
        ASSERT_GT(rig.handle.stats().short_transfers, before) << "not counted";
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(ShortTransfers, many_transfers_in_one_call_are_continued_too) {
  Rig rig(options());
  const File file = rig.open_file(path_);
  rig.engine.log_requests = true;
  GuardedMemory buffer(file_bytes);
  std::vector<ReadTransfer> reads;
  for (std::uint64_t at = 0; at + 5000 <= file_bytes; at += 5000) {
    reads.push_back({buffer.bytes().subspan(at, 5000), file, at});
  }
  const std::size_t covered = reads.size() * 5000;
  ASSERT_ENDED_WELL(rig.handle.read_many(reads));
  const auto requests = rig.engine.log();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    for (const std::uint32_t length : lengths_of(requests[i].bytes)) {
      rig.engine.judge = strike_one(i, {Fault::Kind::shorten, length, 0});
      rig.engine.reset_counts();
      buffer.clear();
      ASSERT_ENDED_WELL(rig.handle.read_many(reads));
      ASSERT_EQ(pattern_fault(buffer.bytes().first(covered), 0, old_seed), "")
          << "request " << i << " cut to " << length;
    }
  }
}

TEST_P(ShortTransfers, a_storm_of_short_transfers_moves_every_byte) {
  Rig rig(options());
  const File file = rig.open_file(path_);
  std::mt19937_64 dice(5);
  rig.engine.judge = [dice](const Request& request, std::uint64_t) mutable -> Fault {
    if (dice() % 2 == 0) return {};
    return {Fault::Kind::shorten, static_cast<std::uint32_t>(1 + dice() % request.bytes), 0};
  };
  std::mt19937_64 places(6);
  for (int round = 0; round < 60; ++round) {
    const std::uint64_t offset = places() % (file_bytes / 2);
    const std::size_t bytes = 1 + places() % (file_bytes / 2);
    GuardedMemory out(bytes, places() % 64);
    out.fill(offset, old_seed);
    ASSERT_ENDED_WELL(rig.handle.write(out.bytes(), file, offset));
    GuardedMemory in(bytes, places() % 64);
    ASSERT_ENDED_WELL(rig.handle.read(in.bytes(), file, offset));
    ASSERT_EQ(in.fault(offset, old_seed), "");
  }
  EXPECT_EQ(pattern_fault(read_whole_file(path_), 0, old_seed), "");
  EXPECT_GT(rig.engine.struck(), 100U);
}

// The caller makes small synchronous transfers itself, through the system seam.
TEST_P(ShortTransfers, short_inline_transfers_are_continued) {
  Rig rig(options());
  const File file = rig.open_file(path_);
  for (const std::size_t bytes : {std::size_t{4096}, std::size_t{5000}, std::size_t{8192}}) {
    for (const std::uint64_t offset : {0U, 4096U, 4099U}) {
      for (const std::size_t length : {std::size_t{1}, std::size_t{511}, bytes / 2, bytes - 1}) {
        SCOPED_TRACE(std::to_string(bytes) + " bytes at " + std::to_string(offset) + " cut to " +
                     std::to_string(length));
        GuardedMemory buffer(bytes);
        rig.system.clear_rules();
        rig.system.add(
            {.call = Call::pread, .first = rig.system.calls(Call::pread), .short_bytes = length});
        rig.handle.read_now(buffer.bytes(), file, offset);
        ASSERT_EQ(buffer.fault(offset, old_seed), "");
        buffer.fill(offset, old_seed);
        rig.system.add({.call = Call::pwrite,
                        .first = rig.system.calls(Call::pwrite),
                        .short_bytes = align_down(length, 512)});
        rig.handle.write_now(buffer.bytes(), file, offset);
        ASSERT_EQ(pattern_fault(read_whole_file(path_), 0, old_seed), "");
      }
    }
  }
  EXPECT_GT(rig.handle.stats().inline_operations, 0U);
}

TEST_P(ShortTransfers, a_write_that_never_moves_a_byte_is_an_error) {
  Rig rig(options());
  const File file = rig.open_file(path_);
  GuardedMemory buffer(4 * block);
  rig.engine.judge = [](const Request&, std::uint64_t) -> Fault {
    return {Fault::Kind::shorten, 0, 0};
  };
  const auto error = outcome(rig.handle.write(buffer.bytes(), file, 0));
  ASSERT_TRUE(error.has_value()) << "acknowledged, though nothing was written";
  EXPECT_NE(error->code(), ETIMEDOUT);
  EXPECT_EQ(error->path(), path_);
  rig.engine.judge = nullptr;
  buffer.fill(0, new_seed);
  ASSERT_ENDED_WELL(rig.handle.write(buffer.bytes(), file, 0));
}

}  // namespace
}  // namespace tensorferry::faults::short_transfers
