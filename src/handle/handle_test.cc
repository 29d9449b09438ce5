// The handle through its public API, on every engine: options, exact bytes, ends of files, many
// operations at once, the inline path and its statistics.
#include "tensorferry/handle.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "handle/handle_fixture.h"

namespace tensorferry::handle {
namespace {

constexpr std::uint64_t largest_offset = std::numeric_limits<std::int64_t>::max();

// --- Opening ---------------------------------------------------------------------------------

TEST(HandleOptions, a_value_out_of_range_is_named_with_its_range) {
  struct Wrong {
    const char* name;
    std::string value;
    std::string bound;
    HandleOptions options;
  };
  const std::size_t over = (std::size_t{1} << 30) + 1;
  const std::vector<Wrong> all{
      {"queue_depth", "4097", "4096", {.queue_depth = 4097}},
      {"workers", "257", "256", {.workers = 257, .slot_bytes = std::size_t{16} << 30}},
      {"block_bytes", std::to_string(over), "1073741824", {.block_bytes = over}},
      {"slot_bytes", "1", "4194304", {.slot_bytes = 1}},
      {"slot_bytes", "4194303", "4194304", {.slot_bytes = 4 * MiB - 1}},
      {"slot_bytes", "67108864", "268435456", {.workers = 256, .slot_bytes = 64 * MiB}},
  };
  for (const Wrong& wrong : all) {
    const Error error = error_of([&] { const Handle handle(wrong.options); });
    EXPECT_EQ(error.code(), EINVAL) << wrong.name << " " << wrong.value;
    for (const std::string& word : {std::string(wrong.name), wrong.value, wrong.bound}) {
      EXPECT_NE(error.hint().find(word), std::string::npos) << word << " in: " << error.what();
    }
  }
}

TEST(HandleOptions, the_ends_of_the_ranges_are_allowed) {
  const support::TempDir dir;
  Memory memory = Memory::with_pattern(300 * KiB, 0, 1, 3);
  for (const HandleOptions& options :
       {HandleOptions{.queue_depth = 1}, HandleOptions{.queue_depth = 4096},
        HandleOptions{.engine = EngineKind::threads, .workers = 256},
        HandleOptions{.block_bytes = 1}, HandleOptions{.block_bytes = GiB},
        HandleOptions{.slot_bytes = 4 * MiB}}) {
    Handle handle(options);
    handle.write(memory.bytes(), dir.file("data"), 5).wait();
    Memory back(300 * KiB, 7);
    handle.read(back.bytes(), dir.file("data"), 5).wait();
    EXPECT_EQ(support::pattern_fault(back.bytes(), 0, 1), "");
    EXPECT_EQ(handle.options().queue_depth, options.queue_depth);
    EXPECT_EQ(handle.options().block_bytes, options.block_bytes) << "as given";
    EXPECT_EQ(handle.options().slot_bytes, options.slot_bytes) << "as given";
  }
}

class HandleOnEngine : public HandleTest {};

TEST_P(HandleOnEngine, says_which_engine_and_why) {
  Handle handle(options());
  EXPECT_EQ(handle.engine(), to_string(GetParam()));
  EXPECT_EQ(handle.engine_reason(), "chosen by the caller");
  Memory memory(KiB);
  const Operation operation = handle.read(memory.bytes(), make_file("data", KiB, 1));
  EXPECT_EQ(operation.engine(), to_string(GetParam()));
  EXPECT_EQ(operation.engine_reason(), "chosen by the caller");
  operation.wait();
}

TEST(Handle, auto_says_why_it_took_the_engine) {
  Handle handle;
  EXPECT_TRUE(handle.engine_reason().starts_with("auto: ")) << handle.engine_reason();
  EXPECT_NE(handle.engine_reason().find(handle.engine()), std::string::npos);
}

TEST_P(HandleOnEngine, can_be_moved) {
  const std::string path = make_file("data", MiB, 1);
  Memory memory(MiB);
  Handle first(options());
  const Operation early = first.read(memory.bytes(), path);
  Handle second(std::move(first));
  EXPECT_EQ(outcome_code(early), 0);
  EXPECT_EQ(second.stats().operations, 1U);
  Handle third(options());
  const Operation dropped = third.read(memory.bytes(), path);
  third = std::move(second);
  EXPECT_TRUE(dropped.done()) << "the handle it belonged to has ended";
  EXPECT_EQ(third.stats().operations, 1U);
  third.read(memory.bytes(), path).wait();
  EXPECT_EQ(support::pattern_fault(memory.bytes(), 0, 1), "");
}

// --- Exact bytes -----------------------------------------------------------------------------

// Lengths and offsets at, beside and between all alignments that matter.
std::uint64_t draw_size(Dice& dice, std::uint64_t limit) {
  const std::uint64_t scale = std::uint64_t{1} << dice.below(21);
  std::uint64_t size = dice.between(0, 4) * scale + dice.between(0, 2);
  if (size > 0 && dice.coin()) --size;
  return std::min(size, limit);
}

TEST_P(HandleOnEngine, reads_exactly_what_is_asked_for) {
  constexpr std::size_t file_bytes = 5 * MiB + 1234;
  const File file = File::open(make_file("data", file_bytes, 1), Access::read);
  Handle handle({.engine = GetParam(), .block_bytes = 64 * KiB});
  Dice dice(1);
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t offset = draw_size(dice, file_bytes);
    const std::uint64_t bytes = draw_size(dice, file_bytes - offset);
    const std::size_t skew = dice.coin() ? 0 : dice.below(page_bytes());
    Memory memory(bytes + 128, skew);
    std::fill(memory.bytes().begin(), memory.bytes().end(), std::byte{0x5e});
    const auto wanted = memory.bytes().subspan(64, bytes);
    if (dice.coin()) {
      handle.read(wanted, file, offset).wait();
    } else {
      handle.read_now(wanted, file, offset);
    }
    ASSERT_EQ(support::pattern_fault(wanted, offset, 1), "") << bytes << " at " << offset;
    ASSERT_EQ(support::constant_fault(memory.bytes().first(64), 0, std::byte{0x5e}), "");
    ASSERT_EQ(support::constant_fault(memory.bytes().last(64), 0, std::byte{0x5e}), "");
  }
}

TEST_P(HandleOnEngine, writes_exactly_what_is_asked_for_and_nothing_else) {
  constexpr std::size_t file_bytes = 3 * MiB + 777;
  const std::string path = make_file("data", file_bytes, 1);
  std::vector<std::byte> model = support::pattern(file_bytes, 0, 1);
  const File file = File::open(path, Access::read_write);
  Handle handle({.engine = GetParam(), .block_bytes = 64 * KiB});
  Dice dice(2);
  for (std::uint32_t round = 0; round < 150; ++round) {
    const std::uint64_t offset = draw_size(dice, model.size() + 10'000);
    const std::uint64_t bytes = draw_size(dice, 4 * MiB);
    Memory memory =
        Memory::with_pattern(bytes, offset, round + 2, dice.coin() ? 0 : dice.below(page_bytes()));
    const Durability durability = round % 10 == 0 ? Durability::data : Durability::none;
    if (dice.coin()) {
      handle.write(memory.bytes(), file, offset, durability).wait();
    } else {
      handle.write_now(memory.bytes(), file, offset, durability);
    }
    if (bytes > 0) model.resize(std::max<std::size_t>(model.size(), offset + bytes));
    std::copy_n(memory.bytes().begin(), bytes,
                model.begin() + static_cast<std::ptrdiff_t>(bytes > 0 ? offset : 0));
    if (round % 10 != 9) continue;
    const std::vector<std::byte> found = support::read_whole_file(path);
    ASSERT_EQ(found.size(), model.size()) << "round " << round;
    ASSERT_EQ(std::memcmp(found.data(), model.data(), model.size()), 0) << "round " << round;
  }
}

TEST_P(HandleOnEngine, a_write_extends_a_file_and_what_lies_between_is_zero) {
  const std::string path = make_file("data", 1000, 1);
  Handle handle(options());
  Memory memory = Memory::with_pattern(3 * MiB, 0, 2);
  handle.write(memory.bytes(), path, 10'000).wait();
  const std::vector<std::byte> found = support::read_whole_file(path);
  ASSERT_EQ(found.size(), 10'000 + 3 * MiB);
  const std::span<const std::byte> all(found);
  EXPECT_EQ(support::pattern_fault(all.first(1000), 0, 1), "");
  EXPECT_EQ(support::constant_fault(all.subspan(1000, 9000), 0, std::byte{0}), "");
  EXPECT_EQ(support::pattern_fault(all.subspan(10'000), 0, 2), "");
}

TEST_P(HandleOnEngine, a_write_never_truncates) {
  const std::string path = make_file("data", 2 * MiB, 1);
  Handle handle(options());
  Memory memory = Memory::with_pattern(MiB + 100, 0, 1);
  handle.write(memory.bytes(), path).wait();
  handle.write_now(memory.bytes().first(10), path);
  handle.write({}, path).wait();
  handle.write_now({}, path, 100);
  const std::vector<std::byte> found = support::read_whole_file(path);
  ASSERT_EQ(found.size(), 2 * MiB);
  EXPECT_EQ(support::pattern_fault(found, 0, 1), "");
}

TEST_P(HandleOnEngine, zero_bytes_are_read_and_written_anywhere) {
  const std::string path = make_file("data", 100, 1);
  Handle handle(options());
  for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{100}, largest_offset}) {
    EXPECT_EQ(outcome_code(handle.read({}, path, offset)), 0);
    EXPECT_EQ(outcome_code(handle.write({}, path, offset)), 0);
    handle.read_now({}, path, offset);
    handle.write_now({}, path, offset);
  }
  EXPECT_EQ(support::read_whole_file(path).size(), 100U);
  EXPECT_EQ(handle.stats().requests, 0U);
  EXPECT_EQ(handle.stats().operations, 12U);
}

// --- Refusals --------------------------------------------------------------------------------

TEST_P(HandleOnEngine, a_read_past_the_end_is_an_error_that_names_the_end) {
  for (const std::size_t file_bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{512}, std::size_t{4096}, 3 * MiB + 100}) {
    const std::string path = make_file("data", file_bytes, 1);
    const File file = File::open(path, Access::read);
    Handle handle({.engine = GetParam(), .block_bytes = 256 * KiB});
    for (const std::size_t skew : {std::size_t{0}, std::size_t{1}}) {
      for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{file_bytes},
                                         std::uint64_t{file_bytes + 1}, std::uint64_t{10 * MiB}}) {
        Memory memory(file_bytes + MiB, skew);
        const std::string place = "offset " + std::to_string(offset) + " of " + path + " of " +
                                  std::to_string(file_bytes) + " bytes, skew " +
                                  std::to_string(skew);
        for (const Error& error :
             {error_of([&] { handle.read(memory.bytes(), file, offset).wait(); }), error_of([&] {
                handle.read_now(memory.bytes().first(1), file, offset + file_bytes);
              }),
              error_of([&] { handle.read_now(memory.bytes(), file, offset); })}) {
          EXPECT_EQ(error.code(), ENODATA) << place;
          EXPECT_EQ(error.path(), path);
          EXPECT_NE(error.hint().find("ends at offset " + std::to_string(file_bytes)),
                    std::string::npos)
              << place << ": " << error.what();
        }
      }
    }
    Memory whole(file_bytes);
    handle.read(whole.bytes(), file).wait();
    EXPECT_EQ(support::pattern_fault(whole.bytes(), 0, 1), "") << "up to the end all is well";
  }
}

TEST_P(HandleOnEngine, what_is_wrong_from_the_start_throws_at_the_call) {
  const std::string path = make_file("data", 4096, 1);
  const File reader = File::open(path, Access::read);
  const File writer = File::open(path, Access::write);
  Handle handle(options());
  Memory memory(100);
  const auto bytes = memory.bytes();
  EXPECT_EQ(error_of([&] { (void)handle.write(bytes, reader); }).code(), EBADF);
  EXPECT_EQ(error_of([&] { (void)handle.read(bytes, writer); }).code(), EBADF);
  EXPECT_EQ(error_of([&] { handle.write_now(bytes, reader); }).code(), EBADF);
  EXPECT_EQ(error_of([&] { handle.read_now(bytes, writer); }).code(), EBADF);
  const std::string missing = dir.file("missing");
  EXPECT_EQ(error_of([&] { (void)handle.read(bytes, missing); }).code(), ENOENT);
  EXPECT_EQ(error_of([&] { handle.read_now(bytes, missing); }).code(), ENOENT);
  EXPECT_EQ(error_of([&] { (void)handle.write(bytes, dir.path()); }).code(), EISDIR);
  for (const std::uint64_t offset :
       {largest_offset - 99, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
    const Error error = error_of([&] { (void)handle.read(bytes, path, offset); });
    EXPECT_EQ(error.code(), EINVAL);
    EXPECT_EQ(error.offset(), offset);
    EXPECT_EQ(error.length(), 100U);
    EXPECT_EQ(error_of([&] { (void)handle.write(bytes, path, offset); }).code(), EINVAL);
    EXPECT_EQ(error_of([&] { handle.write_now(bytes, path, offset); }).code(), EINVAL);
  }
  EXPECT_EQ(handle.stats().requests, 0U);
  handle.read(bytes, path).wait();
}

TEST_P(HandleOnEngine, a_failed_operation_leaves_the_handle_usable) {
  const std::string path = make_file("data", MiB, 1);
  Handle handle(options());
  Memory memory(MiB);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(outcome_code(handle.read(memory.bytes(), path, 1)), ENODATA);
    EXPECT_EQ(outcome_code(handle.read(memory.bytes(), path, 0)), 0);
  }
  EXPECT_EQ(handle.stats().failed_operations, 50U);
  EXPECT_EQ(handle.stats().operations, 100U);
}

// --- Many at once ----------------------------------------------------------------------------

TEST_P(HandleOnEngine, ten_thousand_operations_from_many_threads_are_each_exact) {
  constexpr std::size_t thread_count = 8;
  constexpr std::size_t each = 1250;
  constexpr std::size_t span_bytes = 16 * KiB;
  const std::string path = make_file("data", thread_count * each * span_bytes, 1);
  const File file = File::open(path, Access::read_write);
  Handle handle({.engine = GetParam(), .workers = 2});
  std::vector<std::string> faults(thread_count);
  std::vector<std::thread> users;
  for (std::size_t user = 0; user < thread_count; ++user) {
    users.emplace_back([&, user] {
      Dice dice(user);
      Memory memory(each * span_bytes, user);
      std::vector<Operation> operations;
      std::vector<std::pair<std::uint64_t, std::size_t>> places;
      for (std::size_t i = 0; i < each; ++i) {
        const std::uint64_t begin = (user * each + i) * span_bytes;
        const std::uint64_t offset = begin + dice.below(KiB);
        const std::size_t bytes = 1 + dice.below(span_bytes - KiB);
        const auto place = memory.bytes().subspan(i * span_bytes, bytes);
        places.emplace_back(offset, bytes);
        if (i % 4 == 0) {
          support::fill_pattern(place, offset, 2);
          operations.push_back(handle.write(place, file, offset));
        } else {
          operations.push_back(handle.read(place, file, offset));
        }
      }
      for (std::size_t i = 0; i < each && faults[user].empty(); ++i) {
        if (const auto error = outcome(operations[i])) faults[user] = error->what();
        const auto place = memory.bytes().subspan(i * span_bytes, places[i].second);
        faults[user] += support::pattern_fault(place, places[i].first, i % 4 == 0 ? 2 : 1);
      }
    });
  }
  for (std::thread& user : users) user.join();
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
  EXPECT_EQ(handle.stats().operations, thread_count * each);
  EXPECT_EQ(handle.stats().failed_operations, 0U);
}

TEST_P(HandleOnEngine, every_mode_of_submission_moves_the_same_bytes) {
  const std::string path = make_file("data", 8 * MiB, 1);
  for (const Submit submit : {Submit::batch, Submit::single}) {
    for (const Overlap overlap : {Overlap::on, Overlap::off}) {
      for (const unsigned workers : {1U, 3U}) {
        Handle handle({.engine = GetParam(),
                       .block_bytes = 64 * KiB,
                       .queue_depth = 8,
                       .workers = workers,
                       .submit = submit,
                       .overlap = overlap});
        Memory memory(8 * MiB, workers - 1);
        ASSERT_EQ(outcome_code(handle.read(memory.bytes(), path)), 0);
        EXPECT_EQ(support::pattern_fault(memory.bytes(), 0, 1), "");
        ASSERT_EQ(outcome_code(handle.write(memory.bytes(), path)), 0);
      }
    }
  }
  EXPECT_EQ(support::pattern_fault(support::read_whole_file(path), 0, 1), "");
}

TEST_P(HandleOnEngine, durable_writes_and_syncs_end_well_and_count_once) {
  Handle handle(options());
  Memory memory = Memory::with_pattern(MiB, 0, 1);
  for (const Durability durability : {Durability::none, Durability::data, Durability::full}) {
    handle.write(memory.bytes(), dir.file("queued"), 0, durability).wait();
    handle.write_now(memory.bytes().first(4096), dir.file("inline"), 0, durability);
    handle.write_now(memory.bytes().first(100), dir.file("ragged"), 3, durability);
    const File file = File::open(dir.file("queued"), Access::read);
    handle.sync(file, durability).wait();
  }
  EXPECT_EQ(handle.stats().operations, 12U);
  EXPECT_EQ(support::pattern_fault(support::read_whole_file(dir.file("queued")), 0, 1), "");
}

// --- Inline ----------------------------------------------------------------------------------

TEST_P(HandleOnEngine, small_transfers_start_no_thread) {
  const std::size_t threads_before = threads();
  const std::size_t descriptors_before = open_descriptors();
  Handle handle(options());
  Memory memory = Memory::with_pattern(MiB, 0, 1);
  Memory back(MiB, 5);
  const File file = File::open(dir.file("data"), Access::read_write);
  handle.write_now(memory.bytes(), file);
  handle.read_now(memory.bytes().first(256 * KiB), file);
  for (const std::size_t bytes : {std::size_t{1}, 4 * KiB, 64 * KiB, 256 * KiB}) {
    handle.read_now(back.bytes().first(bytes), file);
    EXPECT_EQ(support::pattern_fault(back.bytes().first(bytes), 0, 1), "");
    handle.read_now(memory.bytes().first(bytes), dir.file("data"));
  }
  handle.write_now(memory.bytes().first(10), dir.file("data"), 0, Durability::full);
  EXPECT_EQ(threads(), threads_before);
  EXPECT_LE(open_descriptors(), descriptors_before + 2) << "the file's own";
  const Stats stats = handle.stats();
  EXPECT_EQ(stats.inline_operations, 11U);
  EXPECT_EQ(stats.operations, 11U);
  EXPECT_EQ(stats.written_bytes, MiB + 10);
  EXPECT_EQ(stats.cpu_seconds, 0);
}

// Inline, the copy would begin only after the last byte has arrived.
TEST_P(HandleOnEngine, longer_transfers_through_slots_overlap_copies_and_requests) {
  const std::string path = make_file("data", MiB, 1);
  Handle handle(options());
  Memory back(MiB, 5);
  if (!File::open(path, Access::read).direct()) GTEST_SKIP() << "nothing goes through slots";
  handle.read_now(back.bytes(), path);
  EXPECT_EQ(support::pattern_fault(back.bytes(), 0, 1), "");
  const Stats stats = handle.stats();
  EXPECT_EQ(stats.inline_operations, 0U);
  EXPECT_EQ(stats.requests, 4U + stats.short_transfers + stats.retries);
}

TEST_P(HandleOnEngine, what_the_user_chose_is_not_cut) {
  const std::string path = make_file("data", MiB, 1);
  for (const HandleOptions& options :
       {HandleOptions{.engine = GetParam(), .block_bytes = MiB},
        HandleOptions{.engine = GetParam(), .queue_depth = 1},
        HandleOptions{.engine = GetParam(), .overlap = Overlap::off}}) {
    Handle handle(options);
    Memory back(MiB, 5);
    handle.read_now(back.bytes(), path);
    EXPECT_EQ(support::pattern_fault(back.bytes(), 0, 1), "");
    const Stats stats = handle.stats();
    EXPECT_EQ(stats.inline_operations, 1U);
    EXPECT_EQ(stats.requests, 1U + stats.short_transfers + stats.retries);
  }
}

TEST_P(HandleOnEngine, memory_of_huge_pages_moves_in_the_blocks_that_suit_it) {
  const std::string path = make_file("data", 8 * MiB, 1);
  const Device device = device_of(path);
  PinnedBuffer huge(8 * MiB);
  if (!huge.huge_page_reason().empty()) GTEST_SKIP() << huge.huge_page_reason();
  if (!File::open(path, Access::read).direct()) GTEST_SKIP() << "the page cache takes single pages";
  const auto requests = [&](std::span<std::byte> bytes, const HandleOptions& options) {
    Handle handle(options);
    handle.read_now(bytes, path);
    EXPECT_EQ(support::pattern_fault(bytes, 0, 1), "");
    const Stats stats = handle.stats();
    return stats.requests - stats.short_transfers - stats.retries;
  };
  EXPECT_EQ(requests(huge.bytes(), options()), 8 * MiB / device.huge_page_block_bytes);
  Memory usual(8 * MiB);
  const std::size_t slot_bytes = std::min<std::size_t>(device.huge_page_block_bytes, MiB);
  EXPECT_EQ(requests(usual.bytes(), options()),
            8 * MiB / (device.prefers_huge_pages ? slot_bytes : device.block_bytes));
  const HandleOptions chosen{.engine = GetParam(), .block_bytes = MiB};
  EXPECT_EQ(requests(huge.bytes(), chosen), 8U) << "what the user chose";

  Handle handle(options());
  handle.write_now(huge.bytes(), path);
  const Stats written = handle.stats();
  EXPECT_EQ(written.requests - written.short_transfers - written.retries,
            8 * MiB / device.huge_page_block_bytes);
  handle.read_now(huge.bytes().subspan(1, 5 * MiB), path);
  EXPECT_EQ(support::pattern_fault(huge.bytes().subspan(1, 5 * MiB), 0, 1), "") << "odd address";
  EXPECT_EQ(handle.stats().bounced_bytes, 5 * MiB);
}

TEST(Inline, a_ragged_end_alone_does_not_need_the_engine) {
  const support::TempDir dir;
  support::write_whole_file(dir.file("data"), support::pattern(MiB, 0, 1));
  Handle handle;
  PinnedBuffer buffer(250'000);
  handle.read_now(buffer.bytes(), dir.file("data"));
  EXPECT_EQ(support::pattern_fault(buffer.bytes(), 0, 1), "");
  EXPECT_EQ(handle.stats().inline_operations, 1U);
}

TEST(Inline, an_aligned_transfer_is_one_request) {
  const support::TempDir dir;
  support::write_whole_file(dir.file("data"), support::pattern(MiB, 0, 1));
  const File file = File::open(dir.file("data"), Access::read_write);
  Handle handle;
  Memory memory(256 * KiB);
  handle.read_now(memory.bytes().first(4096), file, 8192);
  EXPECT_EQ(handle.stats().requests, 1U);
  handle.read_now(memory.bytes(), file);
  EXPECT_EQ(handle.stats().requests, 2U);
  handle.write_now(memory.bytes().first(4096), file, 4096);
  EXPECT_EQ(handle.stats().requests, 3U);
  EXPECT_EQ(handle.stats().bounced_bytes, 0U);
  handle.read_now(memory.bytes().first(100), file, 1);
  EXPECT_EQ(handle.stats().requests, 4U) << "a ragged small read too";
  EXPECT_EQ(handle.stats().bounced_bytes, 100U);
}

TEST_P(HandleOnEngine, a_large_synchronous_transfer_is_queued_and_exact) {
  Handle handle(options());
  Memory memory = Memory::with_pattern(9 * MiB + 5, 0, 1, 9);
  handle.write_now(memory.bytes(), dir.file("data"), 3);
  Memory back(9 * MiB + 5);
  handle.read_now(back.bytes(), dir.file("data"), 3);
  EXPECT_EQ(support::pattern_fault(back.bytes(), 0, 1), "");
  EXPECT_EQ(handle.stats().inline_operations, 0U);
  EXPECT_EQ(error_of([&] { handle.read_now(back.bytes(), dir.file("data"), 4); }).code(), ENODATA);
}

TEST(Inline, more_callers_than_slots_are_all_served) {
  const support::TempDir dir;
  support::write_whole_file(dir.file("data"), support::pattern(MiB, 0, 1));
  const File file = File::open(dir.file("data"), Access::read);
  Handle handle({.slot_bytes = 4 * MiB});  // too little for even one inline slot
  Handle roomy;
  std::atomic<int> right{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 12; ++i) {
    callers.emplace_back([&] {
      Memory memory(100 * KiB, 1);
      for (Handle* one : {&handle, &roomy}) {
        for (std::uint64_t round = 0; round < 20; ++round) {
          one->read_now(memory.bytes(), file, round);
          right += support::pattern_fault(memory.bytes(), round, 1).empty() ? 1 : 0;
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(right, 12 * 40);
}

// --- Resources and figures -------------------------------------------------------------------

TEST_P(HandleOnEngine, by_path_leaves_no_descriptor_open) {
  const std::string path = make_file("data", 2 * MiB, 1);
  const std::size_t before = open_descriptors();
  {
    Handle handle(options());
    Memory memory(2 * MiB, 3);
    handle.read(memory.bytes(), path).wait();  // the engine is opened
    const std::size_t with_handle = open_descriptors();
    for (int i = 0; i < 20; ++i) {
      handle.read(memory.bytes(), path).wait();
      handle.write(memory.bytes().first(MiB), path, 77, Durability::full).wait();
      handle.read_now(memory.bytes().first(10), path);
      handle.write_now(memory.bytes().first(10), path, 5, Durability::full);
      EXPECT_EQ(outcome_code(handle.read(memory.bytes(), path, 5)), ENODATA);
      (void)error_of([&] { (void)handle.read(memory.bytes(), dir.path()); });
      ASSERT_EQ(open_descriptors(), with_handle) << "round " << i;
    }
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_P(HandleOnEngine, opening_and_closing_leaves_nothing_behind) {
  const std::string path = make_file("data", MiB, 1);
  Memory memory(MiB);
  const std::size_t descriptors_before = open_descriptors();
  // A thread that was joined may be listed for a moment longer.
  const auto settled_threads = [](std::size_t wanted) {
    for (int i = 0; i < 500 && threads() > wanted; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return threads();
  };
  std::thread([] {}).join();  // ThreadSanitizer starts one of its own beside the first
  const std::size_t threads_before = settled_threads(support::thread_sanitized ? 2 : 1);
  for (int i = 0; i < 5; ++i) {
    Handle handle({.engine = GetParam(), .workers = 3});
    handle.read(memory.bytes(), path).wait();
  }
  EXPECT_EQ(open_descriptors(), descriptors_before);
  EXPECT_EQ(settled_threads(threads_before), threads_before);
}

TEST_P(HandleOnEngine, figures_add_up) {
  const std::string path = make_file("data", 4 * MiB, 1);
  Handle handle({.engine = GetParam(), .block_bytes = 256 * KiB});
  const PinnedBuffer memory(4 * MiB);
  for (int i = 0; i < 20; ++i) handle.read(memory.bytes(), path).wait();
  handle.write(memory.bytes().first(MiB), path).wait();
  handle.write(memory.bytes().subspan(1, 256 * KiB), path, 0).wait();
  const Stats stats = handle.stats();
  EXPECT_EQ(stats.operations, 22U);
  EXPECT_EQ(stats.inline_operations, 0U);
  EXPECT_EQ(stats.read_bytes, 80 * MiB);
  EXPECT_EQ(stats.written_bytes, MiB + 256 * KiB);
  EXPECT_EQ(stats.bounced_bytes, 256 * KiB);
  EXPECT_EQ(stats.requests, 20U * 16 + 4 + 1 + stats.short_transfers + stats.retries);
  EXPECT_EQ(stats.failed_operations + stats.cancelled_operations, 0U);
  EXPECT_GT(stats.latency_ns_p50, 0U);
  EXPECT_LE(stats.latency_ns_p50, stats.latency_ns_p90);
  EXPECT_LE(stats.latency_ns_p90, stats.latency_ns_p99);
  EXPECT_LE(stats.latency_ns_p99, stats.latency_ns_max);
  EXPECT_GT(stats.cpu_seconds, 0);
}

TENSORFERRY_ON_EVERY_ENGINE(HandleOnEngine);

TEST(Stats, lists_each_counter_once) {
  // Everything in Stats but the counters. A new counter changes the difference.
  struct Others {
    std::vector<std::string> fallback_reasons;
    std::uint64_t latencies_ns[4];
    double cpu_seconds;
  };
  EXPECT_EQ(std::size(stats_counters), (sizeof(Stats) - sizeof(Others)) / sizeof(std::uint64_t));
  Stats stats;
  for (const StatsCounter& counter : stats_counters) ++(stats.*counter.value);
  for (const StatsCounter& counter : stats_counters) EXPECT_EQ(stats.*counter.value, 1U);
}

}  // namespace
}  // namespace tensorferry::handle
