// Thousands of small transfers in one call: exact bytes, merged neighbours, one end.
#include <gtest/gtest.h>

#include "handle/handle_fixture.h"

namespace tensorferry::handle {
namespace {

constexpr std::size_t tensor_count = 10'000;

// Neighbours of random sizes from 1 byte to 64 KiB.
struct Layout {
  explicit Layout(std::uint64_t seed, std::size_t count = tensor_count,
                  std::size_t bytes_max = 64 * KiB) {
    Dice dice(seed);
    for (std::size_t i = 0; i < count; ++i) {
      sizes.push_back(1 + dice.below(bytes_max));
      offsets.push_back(bytes);
      bytes += sizes.back();
      order.push_back(i);
    }
    dice.shuffle(order);
  }
  std::vector<std::size_t> sizes;
  std::vector<std::uint64_t> offsets;
  std::vector<std::size_t> order;
  std::size_t bytes = 0;
};

class Many : public HandleTest {};

TEST_P(Many, ten_thousand_neighbours_in_any_order_are_exact_and_share_requests) {
  const Layout layout(1);
  const std::string path = dir.file("data");
  Memory source = Memory::with_pattern(layout.bytes, 0, 1, 3);
  Memory target(layout.bytes, 5);
  {
    const File file = File::open(path, Access::write);
    std::vector<WriteTransfer> writes;
    for (const std::size_t i : layout.order) {
      writes.push_back(
          {source.bytes().subspan(layout.offsets[i], layout.sizes[i]), file, layout.offsets[i]});
    }
    Handle handle(options());
    const Operation operation = handle.write_many(writes);
    ASSERT_EQ(outcome_code(operation), 0);
    EXPECT_EQ(operation.bytes(), layout.bytes);
    const Stats stats = handle.stats();
    EXPECT_EQ(stats.operations, 1U);
    EXPECT_EQ(stats.written_bytes, layout.bytes);
    EXPECT_LT(stats.requests, tensor_count / 4);
  }
  ASSERT_EQ(support::pattern_fault(support::read_whole_file(path), 0, 1), "");
  {
    const File file = File::open(path, Access::read);
    std::vector<ReadTransfer> reads;
    for (const std::size_t i : layout.order) {
      reads.push_back(
          {target.bytes().subspan(layout.offsets[i], layout.sizes[i]), file, layout.offsets[i]});
    }
    Handle handle(options());
    ASSERT_EQ(outcome_code(handle.read_many(reads)), 0);
    EXPECT_EQ(support::pattern_fault(target.bytes(), 0, 1), "");
    EXPECT_LT(handle.stats().requests, tensor_count / 4);
    EXPECT_EQ(handle.stats().read_bytes, layout.bytes);
  }
}

TEST_P(Many, tensors_that_lie_apart_are_exact_and_leave_the_gaps_alone) {
  const Layout layout(2, 500);
  const std::string path = make_file("data", layout.bytes, 1);
  const File file = File::open(path, Access::read_write);
  Handle handle(options());
  Memory memory(layout.bytes, 1);
  std::vector<WriteTransfer> writes;
  std::vector<ReadTransfer> reads;
  for (const std::size_t i : layout.order) {
    const auto place = memory.bytes().subspan(layout.offsets[i], layout.sizes[i]);
    if (i % 2 == 0) {
      support::fill_pattern(place, layout.offsets[i], 2);
      writes.push_back({place, file, layout.offsets[i]});
    } else {
      reads.push_back({place, file, layout.offsets[i]});
    }
  }
  handle.write_many(writes, Durability::data).wait();
  handle.read_many(reads).wait();
  const std::vector<std::byte> found = support::read_whole_file(path);
  ASSERT_EQ(found.size(), layout.bytes);
  for (std::size_t i = 0; i < layout.sizes.size(); ++i) {
    const std::uint32_t seed = i % 2 == 0 ? 2 : 1;
    const std::span<const std::byte> place(found.data() + layout.offsets[i], layout.sizes[i]);
    ASSERT_EQ(support::pattern_fault(place, layout.offsets[i], seed), "") << i;
    const auto copy = memory.bytes().subspan(layout.offsets[i], layout.sizes[i]);
    ASSERT_EQ(support::pattern_fault(copy, layout.offsets[i], seed), "") << i;
  }
}

TEST_P(Many, small_and_large_neighbours_over_several_files_are_exact) {
  constexpr std::uint32_t file_count = 5;
  const Layout layout(3, 40, 600 * KiB);
  std::vector<File> files;
  for (std::uint32_t i = 0; i < file_count; ++i) {
    files.push_back(File::open(dir.file("data" + std::to_string(i)), Access::read_write));
  }
  Memory source(layout.bytes * file_count, 1);
  Memory target(layout.bytes * file_count);
  std::vector<WriteTransfer> writes;
  std::vector<ReadTransfer> reads;
  for (const std::size_t i : layout.order) {
    for (std::uint32_t f = 0; f < file_count; ++f) {
      const std::size_t at = f * layout.bytes + layout.offsets[i];
      support::fill_pattern(source.bytes().subspan(at, layout.sizes[i]), layout.offsets[i], f + 1);
      writes.push_back({source.bytes().subspan(at, layout.sizes[i]), files[f], layout.offsets[i]});
      reads.push_back({target.bytes().subspan(at, layout.sizes[i]), files[f], layout.offsets[i]});
    }
  }
  Handle handle({.engine = GetParam(), .workers = 2});
  const Operation written = handle.write_many(writes, Durability::full);
  ASSERT_EQ(outcome_code(written), 0);
  ASSERT_EQ(outcome_code(handle.read_many(reads)), 0);
  for (std::uint32_t f = 0; f < file_count; ++f) {
    const auto whole = target.bytes().subspan(f * layout.bytes, layout.bytes);
    EXPECT_EQ(support::pattern_fault(whole, 0, f + 1), "");
    EXPECT_EQ(support::pattern_fault(support::read_whole_file(files[f].path()), 0, f + 1), "");
  }
  EXPECT_EQ(handle.stats().operations, 2U);
}

// Memory that does not follow itself: the tensors lie in it in reverse order.
TEST_P(Many, neighbours_whose_memory_lies_apart_are_exact_and_share_requests) {
  for (const std::size_t bytes_max : {64 * KiB, 700 * KiB}) {
    const Layout layout(7, 200, bytes_max);
    const auto place = [&](const Memory& memory, std::size_t i) {
      const std::size_t at = layout.bytes - layout.offsets[i] - layout.sizes[i];
      return memory.bytes().subspan(at, layout.sizes[i]);
    };
    const std::string path = dir.file("data");
    const File file = File::open(path, Access::read_write);
    Memory source(layout.bytes, 3);
    Memory target(layout.bytes, 5);
    std::vector<WriteTransfer> writes;
    std::vector<ReadTransfer> reads;
    for (const std::size_t i : layout.order) {
      support::fill_pattern(place(source, i), layout.offsets[i], 1);
      writes.push_back({place(source, i), file, layout.offsets[i]});
      reads.push_back({place(target, i), file, layout.offsets[i]});
    }
    Handle handle(options());
    ASSERT_EQ(outcome_code(handle.write_many(writes)), 0);
    const std::uint64_t written = handle.stats().requests;
    ASSERT_EQ(support::pattern_fault(support::read_whole_file(path), 0, 1), "");
    ASSERT_EQ(outcome_code(handle.read_many(reads)), 0);
    const std::uint64_t read = handle.stats().requests - written;
    for (const ReadTransfer& one : reads) {
      ASSERT_EQ(support::pattern_fault(one.memory, one.offset, 1), "");
    }
    if (!file.direct()) continue;
    const std::uint64_t shared =
        layout.bytes / (128 * KiB) + 3;  // no request is shorter but the ends
    EXPECT_LE(written, shared) << bytes_max;
    EXPECT_LE(read, shared) << bytes_max;
  }
}

TEST_P(Many, neighbours_in_the_file_and_in_memory_go_in_place) {
  const Layout layout(8, 300, 200 * KiB);
  const std::string path = make_file("data", layout.bytes, 1);
  const File file = File::open(path, Access::read);
  Handle handle(options());
  const PinnedBuffer target(layout.bytes);
  std::vector<ReadTransfer> reads;
  for (const std::size_t i : layout.order) {
    reads.push_back(
        {target.bytes().subspan(layout.offsets[i], layout.sizes[i]), file, layout.offsets[i]});
  }
  ASSERT_EQ(outcome_code(handle.read_many(reads)), 0);
  EXPECT_EQ(support::pattern_fault(target.bytes(), 0, 1), "");
  EXPECT_LT(handle.stats().bounced_bytes, 4096U) << "only the end";
}

TEST_P(Many, small_gaps_are_read_over_and_dropped) {
  constexpr std::size_t count = 1000, bytes = 2000, step = 6000;
  const std::string path = make_file("data", count * step, 1);
  const File file = File::open(path, Access::read);
  Handle handle(options());
  Memory target(count * bytes, 1);
  std::vector<ReadTransfer> reads;
  for (std::size_t i = 0; i < count; ++i) {
    reads.push_back({target.bytes().subspan(i * bytes, bytes), file, i * step});
  }
  const Operation read = handle.read_many(reads);
  ASSERT_EQ(outcome_code(read), 0);
  for (const ReadTransfer& one : reads) {
    ASSERT_EQ(support::pattern_fault(one.memory, one.offset, 1), "");
  }
  EXPECT_EQ(read.bytes(), count * bytes) << "gaps do not count";
  EXPECT_EQ(handle.stats().read_bytes, count * bytes);
  EXPECT_LT(handle.stats().requests, count / 10);
}

TEST_P(Many, reads_may_overlap_and_repeat) {
  const File file = File::open(make_file("data", MiB, 1), Access::read);
  Handle handle(options());
  Memory memory(1000 * KiB);
  Dice dice(4);
  std::vector<ReadTransfer> reads;
  for (std::size_t i = 0; i < 1000; ++i) {
    const std::size_t bytes = dice.between(0, KiB);
    reads.push_back({memory.bytes().subspan(i * KiB, bytes), file, dice.below(1000 * KiB)});
  }
  handle.read_many(reads).wait();
  for (const ReadTransfer& one : reads) {
    ASSERT_EQ(support::pattern_fault(one.memory, one.offset, 1), "");
  }
}

TEST_P(Many, overlapping_writes_are_refused_before_anything_is_written) {
  const std::string path = make_file("data", 64 * KiB, 1);
  const std::string other_path = make_file("other", 64 * KiB, 1);
  const File file = File::open(path, Access::write);
  const File other = File::open(other_path, Access::write);
  Handle handle(options());
  Memory memory(64 * KiB);
  const auto bytes = memory.bytes();
  const std::vector<std::vector<WriteTransfer>> wrong{
      {{bytes.first(100), file, 0}, {bytes.first(100), file, 99}},
      {{bytes.first(100), file, 0}, {bytes.first(100), file, 0}},
      {{bytes.first(1), file, 50}, {bytes.first(100), file, 0}},
      {{bytes.first(10), other, 0}, {bytes.first(32 * KiB), file, 0}, {bytes.first(10), file, 9}},
      {{bytes.first(10), file, 0}, {{}, file, 5}, {bytes.first(10), file, 9}},
  };
  for (const auto& writes : wrong) {
    const Error error = error_of([&] { (void)handle.write_many(writes); });
    EXPECT_EQ(error.code(), EINVAL);
    EXPECT_EQ(error.path(), path);
    EXPECT_NE(error.hint().find("overlap"), std::string::npos) << error.what();
  }
  Memory large(2 * MiB);
  const std::vector<WriteTransfer> late{{large.bytes(), file, 0},
                                        {bytes.first(100), file, 10 * MiB},
                                        {bytes.first(100), file, 10 * MiB + 50}};
  EXPECT_EQ(error_of([&] { (void)handle.write_many(late); }).code(), EINVAL);
  EXPECT_EQ(handle.stats().requests, 0U);
  EXPECT_EQ(file.size(), 64 * KiB) << "a file is not even extended";
  EXPECT_EQ(support::pattern_fault(support::read_whole_file(path), 0, 1), "");
  EXPECT_EQ(support::pattern_fault(support::read_whole_file(other_path), 0, 1), "");
  const std::vector<WriteTransfer> fine{{bytes.first(100), file, 0},
                                        {{}, file, 50},
                                        {bytes.first(100), file, 100},
                                        {bytes.first(100), other, 0}};
  EXPECT_EQ(outcome_code(handle.write_many(fine)), 0);
}

TEST_P(Many, nothing_to_do_is_done_at_once) {
  const File file = File::open(make_file("data", 100, 1), Access::read_write);
  Handle handle(options());
  EXPECT_TRUE(handle.read_many({}).done());
  EXPECT_TRUE(handle.write_many({}).done());
  const std::vector<ReadTransfer> empty_reads(3, ReadTransfer{{}, file, 1 << 20});
  EXPECT_TRUE(handle.read_many(empty_reads).done());
  const std::vector<WriteTransfer> empty_writes(3, WriteTransfer{{}, file, 1 << 20});
  EXPECT_TRUE(handle.write_many(empty_writes).done());
  EXPECT_EQ(outcome_code(handle.write_many(empty_writes, Durability::full)), 0);
  EXPECT_EQ(file.size(), 100U);
  EXPECT_EQ(handle.stats().operations, 5U);
}

TEST_P(Many, one_part_that_cannot_be_read_fails_the_operation_with_its_place) {
  const File file = File::open(make_file("data", MiB, 1), Access::read);
  const File other = File::open(make_file("short", 1000, 1), Access::read);
  Handle handle(options());
  Memory memory(64 * KiB);
  std::vector<ReadTransfer> reads;
  for (std::size_t i = 0; i < 16; ++i) {
    reads.push_back({memory.bytes().subspan(i * 4 * KiB, 4 * KiB), i == 7 ? other : file, 0});
  }
  const std::optional<Error> error = outcome(handle.read_many(reads));
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ENODATA);
  EXPECT_EQ(error->path(), other.path());
  EXPECT_EQ(handle.stats().failed_operations, 1U);
}

TEST_P(Many, one_part_with_the_wrong_access_is_refused_at_the_call) {
  const std::string path = make_file("data", MiB, 1);
  const File reader = File::open(path, Access::read);
  const File writer = File::open(path, Access::write);
  Handle handle(options());
  Memory memory(KiB);
  const std::vector<ReadTransfer> reads{{memory.bytes(), reader, 0}, {memory.bytes(), writer, 0}};
  EXPECT_EQ(error_of([&] { (void)handle.read_many(reads); }).code(), EBADF);
  const std::vector<WriteTransfer> writes{{memory.bytes(), writer, 0}, {memory.bytes(), reader, 0}};
  EXPECT_EQ(error_of([&] { (void)handle.write_many(writes); }).code(), EBADF);
}

TEST_P(Many, page_locked_and_ordinary_memory_mix) {
  const Layout layout(5, 400, 256 * KiB);
  const File file = File::open(make_file("data", layout.bytes, 1), Access::read);
  PinnedBuffer first(layout.bytes);
  PinnedBuffer second(layout.bytes);
  Memory ordinary(layout.bytes);
  const std::span<std::byte> homes[] = {first.bytes(), second.bytes(), ordinary.bytes()};
  std::vector<ReadTransfer> reads;
  for (const std::size_t i : layout.order) {
    reads.push_back(
        {homes[i % 3].subspan(layout.offsets[i], layout.sizes[i]), file, layout.offsets[i]});
  }
  Handle handle(options());
  ASSERT_EQ(outcome_code(handle.read_many(reads)), 0);
  for (const ReadTransfer& one : reads) {
    ASSERT_EQ(support::pattern_fault(one.memory, one.offset, 1), "");
  }
}

// A piece that begins in a PinnedBuffer and ends outside is ordinary memory.
TEST_P(Many, a_piece_across_the_border_of_a_page_locked_buffer_is_exact) {
  constexpr std::size_t bytes = 256 * KiB;
  std::vector<PinnedBuffer> buffers;
  for (int i = 0; i < 8; ++i) buffers.emplace_back(bytes);
  std::sort(buffers.begin(), buffers.end(),
            [](const auto& a, const auto& b) { return a.data() < b.data(); });
  std::size_t at = 0;
  while (at + 1 < buffers.size() && buffers[at].data() + bytes != buffers[at + 1].data()) ++at;
  if (at + 1 == buffers.size()) GTEST_SKIP() << "no two buffers were mapped side by side";
  const std::span<std::byte> both(buffers[at].data(), 2 * bytes);
  const File file = File::open(make_file("data", MiB, 1), Access::read);
  Handle handle(options());
  const std::vector<ReadTransfer> reads{{both.first(bytes / 2), file, 0},
                                        {both.subspan(bytes / 2, bytes), file, MiB / 2}};
  ASSERT_EQ(outcome_code(handle.read_many(reads)), 0);
  for (const ReadTransfer& one : reads) {
    EXPECT_EQ(support::pattern_fault(one.memory, one.offset, 1), "");
  }
}

TENSORFERRY_ON_EVERY_ENGINE(Many);

}  // namespace
}  // namespace tensorferry::handle
