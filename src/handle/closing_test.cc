// The end of a handle: it finishes writes, cancels reads, and reports what is lost.
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "handle/handle_fixture.h"

namespace tensorferry::handle {
namespace {

using support::pattern_fault;
using support::read_whole_file;

class Closing : public HandleTest {};
TENSORFERRY_ON_EVERY_ENGINE(Closing);

TEST_P(Closing, a_destroyed_handle_finishes_its_writes) {
  constexpr std::size_t bytes = 16 * MiB;
  for (const std::size_t skew : {std::size_t{0}, std::size_t{8}}) {
    Memory memory = Memory::with_pattern(bytes, 0, 3, skew);
    const std::string path = dir.file("new" + std::to_string(skew));
    {
      Handle handle(options());
      (void)handle.write(memory.bytes(), path, 0, Durability::data);
    }
    const auto found = read_whole_file(path);
    EXPECT_EQ(found.size(), bytes);
    EXPECT_EQ(pattern_fault(found, 0, 3), "");
  }
}

TEST_P(Closing, many_writes_are_finished_through_files_that_are_gone_from_scope) {
  constexpr std::size_t bytes = 700 * KiB;
  Memory memory = Memory::with_pattern(bytes, 0, 5);
  {
    Handle handle(options());
    for (int i = 0; i < 40; ++i) {
      (void)handle.write(memory.bytes(), dir.file("f" + std::to_string(i)));
    }
    handle.close();
    EXPECT_EQ(error_of([&] { (void)handle.write(memory.bytes(), dir.file("late")); }).code(),
              EINVAL);
    EXPECT_EQ(handle.stats().operations, 40U);
    EXPECT_GT(handle.stats().cpu_seconds, 0);
    handle.close();
  }
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(pattern_fault(read_whole_file(dir.file("f" + std::to_string(i))), 0, 5), "") << i;
  }
}

TEST_P(Closing, the_last_reference_may_go_in_a_callback) {
  Memory memory = Memory::with_pattern(4 * MiB, 0, 6);
  for (int round = 0; round < 20; ++round) {
    auto handle = std::make_shared<Handle>(options());
    const Operation other = handle->write(memory.bytes(), dir.file("other"));
    const Operation operation = handle->write(memory.bytes(), dir.file("one"));
    std::atomic<bool> told{false};
    operation.when_done([&told, handle] { told = true; });
    handle.reset();
    EXPECT_EQ(outcome_code(operation), 0);
    EXPECT_EQ(outcome_code(other), 0) << "the worker goes on without its handle";
    while (!told) std::this_thread::yield();
    EXPECT_EQ(pattern_fault(read_whole_file(dir.file("other")), 0, 6), "");
  }
}

TEST_P(Closing, the_last_reference_may_go_in_every_callback_of_several_workers) {
  Memory memory = Memory::with_pattern(64 * KiB, 0, 7);
  std::thread([] {
  }).join();  // a sanitizer starts a thread of its own with the first one, and keeps it
  const std::size_t before = threads();
  for (int round = 0; round < 20; ++round) {
    HandleOptions several = options();
    several.workers = 3;
    auto handle = std::make_shared<Handle>(several);
    std::vector<Operation> operations;
    for (int i = 0; i < 12; ++i) {
      operations.push_back(handle->write(memory.bytes(), dir.file("f" + std::to_string(i))));
      operations.back().when_done([handle] {});
    }
    handle.reset();
    for (const Operation& operation : operations) EXPECT_EQ(outcome_code(operation), 0);
  }
  const auto limit = Operation::Clock::now() + hang_limit;
  int times = 0;  // in a row: one look may miss a thread, or the kernel may add a helper
  while (times < 3 && Operation::Clock::now() < limit) {
    times = threads() <= before ? times + 1 : 0;
    std::this_thread::yield();
  }
  EXPECT_EQ(times, 3) << "a worker has stayed";
}

TEST_P(Closing, a_failure_that_nobody_asked_about_is_thrown_by_close_or_told_by_the_destructor) {
  Memory memory(4 * MiB);
  const std::string path = make_file("short", 100, 1);
  {
    Handle handle(options());
    (void)handle.read(memory.bytes(), path);
    while (handle.stats().failed_operations == 0) std::this_thread::yield();
    const Error error = error_of([&] { handle.close(); });
    EXPECT_EQ(error.code(), ENODATA);
    EXPECT_EQ(error.path(), path);
    EXPECT_EQ(error_of([&] { handle.close(); }).code(), 0) << "it is told once";
  }
  std::optional<Error> told;
  {
    HandleOptions telling = options();
    telling.on_lost = [&told](const Error& error) { told = error; };
    Handle handle(telling);
    for (std::size_t i = 0; i < 3; ++i) {
      (void)handle.read(memory.bytes().subspan(i * MiB, MiB), path);
    }
    while (handle.stats().failed_operations < 3) std::this_thread::yield();
  }
  ASSERT_TRUE(told);
  EXPECT_EQ(told->path(), path);
  EXPECT_NE(told->hint().find("2 more operations failed"), std::string::npos) << told->what();
}

TEST_P(Closing, a_failure_that_somebody_saw_is_not_told_again) {
  Memory memory(4 * MiB);
  const std::string path = make_file("short", 100, 1);
  Handle handle(options());
  EXPECT_EQ(outcome_code(handle.read(memory.bytes(), path)), ENODATA);
  EXPECT_EQ(error_of([&] { handle.read_now(memory.bytes(), path); }).code(), ENODATA);
  EXPECT_EQ(error_of([&] { handle.close(); }).code(), 0);
}

class Held : public GateTest {
 protected:
  [[nodiscard]] static HandleOptions limited(double seconds) {
    HandleOptions chosen = options();
    chosen.close_limit_seconds = seconds;
    return chosen;
  }
};

TEST_F(Held, reads_are_cancelled_and_writes_are_waited_for) {
  Memory in(4 * block);
  Memory out = Memory::with_pattern(4 * block, 0, 9);
  auto handle = std::make_unique<Handle>(gate.open_handle(options()));
  const Operation read = handle->read(in.bytes(), *file);
  const Operation write = handle->write(out.bytes(), *file);
  ASSERT_TRUE(gate.holds(8));
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    handle.reset();
    closed = true;
  });
  EXPECT_EQ(outcome_code(read), ECANCELED);
  EXPECT_FALSE(closed);
  EXPECT_FALSE(write.done());
  gate.open();
  closer.join();
  EXPECT_TRUE(write.done());
  EXPECT_EQ(outcome_code(write), 0);
  const auto found = read_whole_file(path);
  EXPECT_EQ(pattern_fault(std::span(found).first(4 * block), 0, 9), "");
}

TEST_F(Held, reads_are_finished_where_that_is_asked_for) {
  Memory memory(4 * block);
  Handle handle = gate.open_handle(options());
  const Operation read = handle.read(memory.bytes(), *file);
  ASSERT_TRUE(gate.holds(4));
  EXPECT_FALSE(handle.close_until(Operation::Clock::now(), OpenReads::finish));
  EXPECT_FALSE(read.done());
  gate.open();
  handle.close(OpenReads::finish);
  EXPECT_EQ(outcome_code(read), 0);
  EXPECT_EQ(pattern_fault(memory.bytes(), 0, 1), "");
}

TEST_F(Held, what_does_not_move_is_given_up_by_name) {
  Memory memory = Memory::with_pattern(64 * block, 0, 9);
  Handle handle = gate.open_handle(limited(0.05));
  const Operation write = handle.write(memory.bytes(), *file, 3 * block);
  ASSERT_TRUE(gate.holds(32));
  const Error error = error_of([&] { handle.close(); });
  EXPECT_EQ(error.code(), ECANCELED);
  EXPECT_EQ(error.path(), path);
  EXPECT_EQ(error.offset(), 3 * block);
  EXPECT_EQ(error.length(), 64 * block);
  EXPECT_NE(error.hint().find("50 ms"), std::string::npos) << error.what();
  EXPECT_EQ(outcome_code(write), ECANCELED);
}

TEST_F(Held, the_destructor_gives_up_too_and_tells) {
  Memory memory(8 * block);
  std::optional<Error> told;
  {
    HandleOptions chosen = limited(0.05);
    chosen.on_lost = [&told](const Error& error) { told = error; };
    Handle handle = gate.open_handle(chosen);
    (void)handle.write(memory.bytes(), *file);
    ASSERT_TRUE(gate.holds(8));
  }
  ASSERT_TRUE(told);
  EXPECT_EQ(told->code(), ECANCELED);
  EXPECT_EQ(told->length(), 8 * block);
}

// A handle cannot give up what the kernel has in hand.
TEST_F(Held, what_arrives_after_it_was_given_up_is_not_told_as_lost) {
  gate.cancellable = false;
  Memory memory = Memory::with_pattern(8 * block, 0, 9);
  Handle handle = gate.open_handle(limited(0.05));
  const Operation write = handle.write(memory.bytes(), *file);
  ASSERT_TRUE(gate.holds(8));
  EXPECT_FALSE(handle.close_until(Operation::Clock::now() + std::chrono::milliseconds(500)));
  gate.open();
  EXPECT_EQ(error_of([&] { handle.close(); }).code(), 0);
  EXPECT_EQ(outcome_code(write), 0);
  const auto found = read_whole_file(path);
  EXPECT_EQ(pattern_fault(std::span(found).first(8 * block), 0, 9), "");
}

TEST_F(Held, moving_slowly_is_moving) {
  Memory memory = Memory::with_pattern(16 * block, 0, 9);
  Handle handle = gate.open_handle(limited(2));
  const Operation write = handle.write(memory.bytes(), *file);
  ASSERT_TRUE(gate.holds(16));
  std::thread slowly([this] {
    for (int i = 0; i < 16; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // 3.2 s in all
      gate.let_pass(1);
    }
  });
  handle.close();
  slowly.join();
  EXPECT_EQ(outcome_code(write), 0);
}

TEST_F(Held, a_sync_under_way_is_waited_for) {
  Memory memory(block);
  Handle handle = gate.open_handle(limited(0.05));
  const Operation write = handle.write(memory.bytes(), *file, 0, Durability::data);
  ASSERT_TRUE(gate.holds(1));
  gate.let_pass(1);
  while (requests(Gate::Event::Kind::submitted).size() < 2) std::this_thread::yield();
  EXPECT_FALSE(handle.close_until(Operation::Clock::now() + std::chrono::milliseconds(300)));
  gate.open();
  handle.close();
  EXPECT_EQ(outcome_code(write), 0);
}

// io_uring does so if the system allows it no more threads.
TEST_F(Held, what_the_kernel_cancels_by_itself_is_a_failure_and_told) {
  gate.sync_result = -ECANCELED;
  gate.open();
  Memory memory(block);
  Handle handle = gate.open_handle(options());
  (void)handle.write(memory.bytes(), *file, 0, Durability::data);
  while (handle.stats().operations == 0) std::this_thread::yield();
  EXPECT_EQ(handle.stats().failed_operations, 1U);
  EXPECT_EQ(error_of([&] { handle.close(); }).code(), EAGAIN);
}

TEST_F(Held, cancel_all_gives_writes_up_and_the_handle_stays_open) {
  Memory memory = Memory::with_pattern(40 * block, 0, 9);
  Handle handle = gate.open_handle(options());
  const Operation first = handle.write(memory.bytes(), *file);
  const Operation second = handle.write(memory.bytes(), dir.file("new"));
  const Operation third = handle.read(memory.bytes(), *file);
  ASSERT_TRUE(gate.holds(32));
  handle.cancel_all();
  for (const Operation& operation : {first, second, third}) {
    EXPECT_EQ(outcome_code(operation), ECANCELED);
  }
  EXPECT_EQ(std::filesystem::file_size(dir.file("new")), 0U);
  gate.open();
  EXPECT_EQ(outcome_code(handle.write(memory.bytes(), *file)), 0);
  EXPECT_EQ(error_of([&] { handle.close(); }).code(), 0) << "who cancels knows";
}

TEST_F(Held, cancel_all_ends_a_close_that_waits) {
  Memory memory(8 * block);
  Handle handle = gate.open_handle(options());
  const Operation write = handle.write(memory.bytes(), *file);
  ASSERT_TRUE(gate.holds(8));
  std::thread closer([&] { handle.close(); });
  while (error_of([&] { handle.read_now({}, *file); }).code() != EINVAL) std::this_thread::yield();
  handle.cancel_all();
  closer.join();
  EXPECT_EQ(outcome_code(write), ECANCELED);
}

TEST_F(Held, calls_that_race_with_close_end_or_are_refused) {
  gate.open();
  for (int round = 0; round < 200; ++round) {
    Handle handle = gate.open_handle(options());
    Memory memory(4 * block);
    std::vector<Operation> operations;
    std::atomic<int> calls{0};
    std::atomic<bool> closing{false};
    std::thread user([&] {
      try {
        for (;; ++calls) {  // few before the race: close() waits for all of them
          while (calls >= 20 && !closing) std::this_thread::yield();
          operations.push_back(handle.write(memory.bytes(), *file));
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), EINVAL) << error.what();
      }
    });
    while (calls < round % 20) std::this_thread::yield();
    closing = true;
    handle.close();
    user.join();
    for (const Operation& operation : operations) {
      const int code = outcome_code(operation);
      EXPECT_TRUE(code == 0 || code == ECANCELED) << code;
    }
  }
}

TEST(Losses, are_told_with_the_first_and_the_number_of_the_others) {
  Ledger ledger;
  const Error first({.operation = "write", .path = "data", .code = EIO, .hint = "the drive"});
  for (const auto& [count, hint] : {std::pair(1, "the drive"),
                                    {2, "the drive; 1 more operation failed unseen"},
                                    {3, "the drive; 2 more operations failed unseen"}}) {
    for (int i = 0; i < count; ++i) ledger.note_lost(i == 0 ? first : Error({}));
    const std::optional<Error> told = ledger.take_lost();
    ASSERT_TRUE(told.has_value());
    EXPECT_EQ(told->hint(), hint);
    EXPECT_EQ(told->code(), EIO);
    EXPECT_FALSE(ledger.take_lost().has_value());
  }
}

// --- After a failed write --------------------------------------------------------------------

TEST_P(Closing, a_cancelled_write_leaves_the_file_as_long_as_it_was) {
  Memory memory = Memory::with_pattern(64 * MiB, 0, 4);
  for (const std::size_t old_bytes : {std::size_t{0}, std::size_t{5000}, std::size_t{3 * MiB}}) {
    const std::string path = make_file("grown", old_bytes, 4);
    Handle handle(options());
    const Operation operation = handle.write(memory.bytes(), path);
    operation.cancel();
    const int code = outcome_code(operation);
    EXPECT_TRUE(code == ECANCELED || code == 0) << code;
    const auto found = read_whole_file(path);
    EXPECT_EQ(found.size(), code == 0 ? memory.bytes().size() : old_bytes);
    EXPECT_EQ(pattern_fault(found, 0, 4), "");
  }
}

TEST_F(Held, a_write_of_several_parts_that_fails_leaves_nothing) {
  Memory memory(8 * block);
  const File target = File::open(dir.file("new"), Access::write);
  Handle handle = gate.open_handle(options());
  std::vector<WriteTransfer> transfers;
  for (std::size_t i = 0; i < 8; ++i) {
    transfers.push_back({memory.bytes().subspan(i * block, block), target, i * block});
  }
  gate.newest_first = true;
  const Operation operation = handle.write_many(transfers);
  ASSERT_TRUE(gate.holds(8));
  gate.let_pass(3);
  while (requests(Gate::Event::Kind::completed).size() < 3) std::this_thread::yield();
  EXPECT_GT(target.size(), 0U);
  operation.cancel();
  EXPECT_EQ(outcome_code(operation), ECANCELED);
  EXPECT_EQ(target.size(), 0U);
}

}  // namespace
}  // namespace tensorferry::handle
