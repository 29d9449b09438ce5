// An operation as its user sees it: waiting, progress, durability, cancelling, and the end of the
// handle under it.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "handle/handle_fixture.h"

namespace tensorferry::handle {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using Kind = Gate::Event::Kind;

class OperationTest : public GateTest {};

// --- Waiting ---------------------------------------------------------------------------------

TEST_F(OperationTest, is_not_done_before_its_last_byte) {
  Handle handle = gate.open_handle(options());
  Memory memory(4 * block);
  const auto before = Operation::Clock::now();
  const Operation operation = handle.read(memory.bytes(), *file, block);
  for (std::size_t moved = 0; moved < 4; ++moved) {
    ASSERT_TRUE(gate.holds(4 - moved));
    EXPECT_FALSE(operation.done());
    EXPECT_FALSE(operation.error().has_value());
    EXPECT_EQ(operation.bytes(), moved * block);
    EXPECT_FALSE(operation.wait_for(milliseconds(5)));
    EXPECT_FALSE(operation.wait_for(nanoseconds(0)));
    EXPECT_FALSE(operation.wait_for(milliseconds(-5)));
    EXPECT_FALSE(operation.wait_until(Operation::Clock::now() - milliseconds(5)));
    gate.let_pass(1);
    while (operation.bytes() == moved * block) std::this_thread::yield();
  }
  ASSERT_EQ(outcome_code(operation), 0);
  EXPECT_TRUE(operation.done());
  EXPECT_EQ(operation.bytes(), 4 * block);
  EXPECT_EQ(support::pattern_fault(memory.bytes(), block, 1), "");
  const Operation::Timing timing = operation.timing();
  EXPECT_LE(before, timing.queued);
  EXPECT_LE(timing.queued, timing.started);
  EXPECT_LE(timing.started, timing.finished);
  EXPECT_LE(timing.finished, Operation::Clock::now());
}

TEST_F(OperationTest, the_longest_limit_there_is_means_waiting) {
  Handle handle = gate.open_handle(options());
  Memory memory(block);
  const Operation operation = handle.read(memory.bytes(), *file);
  ASSERT_TRUE(gate.holds(1));
  std::thread opener([this] {
    std::this_thread::sleep_for(milliseconds(20));
    gate.open();
  });
  EXPECT_TRUE(operation.wait_for(nanoseconds::max()));
  EXPECT_TRUE(operation.wait_until(Operation::Clock::time_point::max()));
  opener.join();
}

TEST_F(OperationTest, every_waiter_is_woken) {
  Handle handle = gate.open_handle(options());
  Memory memory(block);
  const Operation operation = handle.read(memory.bytes(), *file);
  std::atomic<int> woken{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 8; ++i) {
    waiters.emplace_back([&, copy = operation] { woken += copy.wait_for(hang_limit) ? 1 : 0; });
  }
  ASSERT_TRUE(gate.holds(1));
  gate.open();
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(woken, 8);
}

TEST_F(OperationTest, a_failed_one_throws_the_same_error_at_every_wait) {
  Handle handle = gate.open_handle(options());
  gate.open();
  Memory memory(2 * block);
  const Operation operation = handle.read(memory.bytes(), *file, 63 * block);
  EXPECT_EQ(error_of([&] { operation.wait(); }).code(), ENODATA);
  EXPECT_EQ(error_of([&] { (void)operation.wait_for(hang_limit); }).code(), ENODATA);
  ASSERT_TRUE(operation.error().has_value());
  EXPECT_EQ(operation.error()->path(), path);
  EXPECT_EQ(operation.error()->operation(), "read");
  EXPECT_EQ(operation.bytes(), block);
}

// --- Durability ------------------------------------------------------------------------------

TEST_F(OperationTest, durability_is_sought_after_all_bytes_and_step_by_step) {
  Handle handle = gate.open_handle(options());
  Memory memory = Memory::with_pattern(8 * block, 0, 3);
  const Operation operation = handle.write(memory.bytes(), *file, 0, Durability::full);
  ASSERT_TRUE(gate.holds(8));
  gate.let_pass(7);
  while (operation.bytes() < 7 * block) std::this_thread::yield();
  EXPECT_EQ(gate.held(), 1U);
  for (int step = 0; step < 2; ++step) {
    gate.let_pass(1);
    ASSERT_TRUE(gate.holds(1));
    std::this_thread::sleep_for(milliseconds(10));
    EXPECT_EQ(gate.held(), 1U) << "one step after the other";
    EXPECT_FALSE(operation.done()) << "step " << step;
  }
  gate.let_pass(1);
  ASSERT_EQ(outcome_code(operation), 0);
  const auto completed = requests(Kind::completed);
  ASSERT_EQ(completed.size(), 10U);
  EXPECT_EQ(completed[8].kind, engines::RequestKind::sync_full);
  EXPECT_EQ(completed[9].kind, engines::RequestKind::sync_full);
  EXPECT_NE(completed[8].fd, completed[9].fd) << "the file, then its directory";
  EXPECT_EQ(handle.stats().operations, 1U);
}

TEST_F(OperationTest, data_durability_is_one_sync_of_the_file) {
  Handle handle = gate.open_handle(options());
  gate.open();
  Memory memory(2 * block);
  ASSERT_EQ(outcome_code(handle.write(memory.bytes(), *file, 0, Durability::data)), 0);
  const auto completed = requests(Kind::completed);
  ASSERT_EQ(completed.size(), 3U);
  EXPECT_EQ(completed[2].kind, engines::RequestKind::sync_data);
  EXPECT_EQ(completed[2].fd, file->opened()->main_fd());
}

TEST_F(OperationTest, a_write_of_nothing_is_still_made_durable) {
  Handle handle = gate.open_handle(options());
  gate.open();
  ASSERT_EQ(outcome_code(handle.write({}, *file, 0, Durability::full)), 0);
  EXPECT_EQ(requests(Kind::completed).size(), 2U);
}

TEST_F(OperationTest, a_failed_sync_fails_the_operation_and_is_not_repeated) {
  for (const int code : {EIO, EINTR, EAGAIN}) {
    Gate failing;
    failing.sync_result = -code;
    failing.open();
    Handle handle = failing.open_handle(options());
    Memory memory(block);
    const Operation operation = handle.write(memory.bytes(), *file, 0, Durability::full);
    EXPECT_EQ(outcome_code(operation), code);
    EXPECT_EQ(failing.events().size(), 4U) << "one write and one sync, submitted and completed";
    EXPECT_EQ(outcome(operation)->path(), path);
    EXPECT_FALSE(outcome(operation)->hint().empty());
    EXPECT_EQ(handle.stats().failed_operations, 1U);
  }
}

// --- Cancelling ------------------------------------------------------------------------------

TEST_F(OperationTest, cancelled_in_the_queue_it_never_starts) {
  Handle handle = gate.open_handle(options(1));
  Memory memory(2 * block);
  const Operation first = handle.read(memory.bytes().first(block), *file);
  ASSERT_TRUE(gate.holds(1));
  const Operation second = handle.read(memory.bytes().last(block), *file);
  second.cancel();
  EXPECT_TRUE(second.done()) << "nothing of it was in flight";
  EXPECT_EQ(outcome_code(second), ECANCELED);
  EXPECT_FALSE(first.done());
  gate.open();
  EXPECT_EQ(outcome_code(first), 0);
  EXPECT_EQ(requests(Kind::submitted).size(), 1U);
  EXPECT_EQ(support::constant_fault(memory.bytes().last(block), 0, std::byte{0}), "");
  EXPECT_EQ(handle.stats().cancelled_operations, 1U);
}

TEST_F(OperationTest, cancelled_in_flight_it_ends_and_others_do_not) {
  Handle handle = gate.open_handle(options());
  Memory memory(3 * block);
  const Operation doomed = handle.read(memory.bytes().first(2 * block), *file);
  const Operation other = handle.read(memory.bytes().last(block), *file, 2 * block);
  ASSERT_TRUE(gate.holds(3));
  doomed.cancel();
  const std::optional<Error> error = outcome(doomed);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ECANCELED);
  EXPECT_FALSE(error->hint().empty());
  EXPECT_FALSE(other.done());
  gate.open();
  EXPECT_EQ(outcome_code(other), 0);
  EXPECT_EQ(support::constant_fault(memory.bytes().first(2 * block), 0, std::byte{0}), "");
  EXPECT_EQ(support::pattern_fault(memory.bytes().last(block), 2 * block, 1), "");
}

TEST_F(OperationTest, what_the_kernel_does_not_give_up_is_waited_for) {
  gate.cancellable = false;
  Handle handle = gate.open_handle(options(2));
  Memory memory(8 * block);
  const Operation operation = handle.read(memory.bytes(), *file);
  ASSERT_TRUE(gate.holds(2));
  operation.cancel();
  EXPECT_FALSE(operation.wait_for(milliseconds(20))) << "two requests are still in flight";
  EXPECT_FALSE(operation.error().has_value());
  gate.open();
  EXPECT_EQ(outcome_code(operation), ECANCELED);
  EXPECT_EQ(requests(Kind::submitted).size(), 2U) << "the other six never start";
  EXPECT_EQ(support::constant_fault(memory.bytes().last(6 * block), 0, std::byte{0}), "");
}

TEST_F(OperationTest, all_bytes_moved_before_the_cancellation_is_success) {
  gate.cancellable = false;
  Handle handle = gate.open_handle(options());
  Memory memory(block);
  const Operation operation = handle.read(memory.bytes(), *file);
  ASSERT_TRUE(gate.holds(1));
  operation.cancel();
  gate.open();
  EXPECT_EQ(outcome_code(operation), 0);
  EXPECT_EQ(support::pattern_fault(memory.bytes(), 0, 1), "");
  EXPECT_EQ(handle.stats().cancelled_operations, 0U);
}

TEST_F(OperationTest, a_durable_write_cancelled_before_its_sync_is_no_success) {
  gate.cancellable = false;
  Handle handle = gate.open_handle(options());
  Memory memory(block);
  const Operation operation = handle.write(memory.bytes(), *file, 0, Durability::data);
  ASSERT_TRUE(gate.holds(1));
  operation.cancel();
  gate.open();
  EXPECT_EQ(outcome_code(operation), ECANCELED);
  EXPECT_EQ(requests(Kind::completed).size(), 1U) << "no sync was made";
}

TEST_F(OperationTest, a_durable_write_cancelled_between_its_syncs_is_no_success) {
  gate.cancellable = false;
  Handle handle = gate.open_handle(options());
  Memory memory(block);
  const Operation operation = handle.write(memory.bytes(), *file, 0, Durability::full);
  ASSERT_TRUE(gate.holds(1));
  gate.let_pass(1);
  ASSERT_TRUE(gate.holds(1));
  while (requests(Kind::submitted).size() < 2) std::this_thread::yield();
  operation.cancel();
  EXPECT_FALSE(operation.wait_for(milliseconds(10)));
  gate.open();
  EXPECT_EQ(outcome_code(operation), ECANCELED);
  EXPECT_EQ(requests(Kind::completed).size(), 2U);
}

TEST_F(OperationTest, cancelling_twice_or_too_late_changes_nothing) {
  Handle handle = gate.open_handle(options());
  Memory memory(2 * block);
  const Operation doomed = handle.read(memory.bytes().first(block), *file);
  ASSERT_TRUE(gate.holds(1));
  for (int i = 0; i < 3; ++i) doomed.cancel();
  EXPECT_EQ(outcome_code(doomed), ECANCELED);
  gate.open();
  const Operation fine = handle.read(memory.bytes().last(block), *file, block);
  EXPECT_EQ(outcome_code(fine), 0);
  for (const auto& operation : {doomed, fine}) operation.cancel();
  EXPECT_FALSE(fine.error().has_value());
  EXPECT_EQ(outcome_code(fine), 0);
  EXPECT_EQ(handle.stats().operations, 2U);
  EXPECT_EQ(handle.stats().cancelled_operations, 1U);
}

TEST_F(OperationTest, outlives_its_handle) {
  Memory memory(block);
  std::optional<Operation> fine;
  std::optional<Operation> doomed;
  {
    Handle handle = gate.open_handle(options());
    fine.emplace(handle.read(memory.bytes(), *file));
    ASSERT_TRUE(gate.holds(1));
    gate.let_pass(1);
    ASSERT_EQ(outcome_code(*fine), 0);
    doomed.emplace(handle.read(memory.bytes(), *file));
    ASSERT_TRUE(gate.holds(1));
  }
  ASSERT_TRUE(doomed->done());
  for (const auto& operation : {*fine, *doomed}) operation.cancel();
  EXPECT_EQ(outcome_code(*fine), 0);
  EXPECT_EQ(outcome_code(*doomed), ECANCELED);
  EXPECT_EQ(fine->bytes(), block);
  EXPECT_EQ(fine->engine(), "threads");
  EXPECT_FALSE(fine->engine_reason().empty());
}

TEST_F(OperationTest, a_closing_handle_waits_for_what_the_kernel_holds) {
  gate.cancellable = false;
  Memory memory(8 * block);
  std::optional<Operation> operation;
  std::atomic<bool> closed{false};
  std::thread closer;
  {
    auto handle = std::make_unique<Handle>(gate.open_handle(options(2)));
    operation.emplace(handle->read(memory.bytes(), *file));
    ASSERT_TRUE(gate.holds(2));
    closer = std::thread([&closed, gone = std::move(handle)]() mutable {
      gone.reset();
      closed = true;
    });
  }
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(closed);
  EXPECT_FALSE(operation->done());
  gate.open();
  closer.join();
  EXPECT_TRUE(operation->done());
  EXPECT_EQ(outcome_code(*operation), ECANCELED);
}

TEST_F(OperationTest, a_closing_handle_does_not_leave_its_work_to_a_slow_canceller) {
  std::atomic<bool> inside{false};
  std::atomic<bool> over{false};
  thread_local bool is_canceller = false;
  gate.on_wake = [&] {
    if (!is_canceller) return;
    inside = true;
    while (!over) std::this_thread::yield();
  };
  Memory memory(2 * block);
  std::optional<Handle> handle(gate.open_handle(options()));
  const Operation first = handle->read(memory.bytes().first(block), *file);
  const Operation second = handle->read(memory.bytes().last(block), *file);
  ASSERT_TRUE(gate.holds(2));
  std::thread canceller([&] {
    is_canceller = true;
    first.cancel();
  });
  while (!inside) std::this_thread::yield();
  handle.reset();
  EXPECT_TRUE(second.done()) << "the handle is gone and a request is in flight";
  EXPECT_EQ(gate.held(), 0U);
  over = true;
  canceller.join();
  EXPECT_EQ(outcome_code(first), ECANCELED);
  EXPECT_EQ(outcome_code(second), ECANCELED);
}

// --- Races -----------------------------------------------------------------------------------

// Cancels operations while they end by themselves, at as many different moments as possible.
void race_cancellations(Gate& gate, const File& file, Durability durability) {
  constexpr int rounds = 4000;
  gate.pretend = true;
  gate.open();
  Handle handle = gate.open_handle({.block_bytes = 4 * KiB});
  Memory memory(8 * KiB);
  std::mutex mutex;
  std::optional<Operation> target;
  std::atomic<bool> over{false};
  std::thread canceller([&] {
    for (unsigned spin = 0; !over; ++spin) {
      std::optional<Operation> doomed;
      {
        const std::lock_guard lock(mutex);
        std::swap(doomed, target);
      }
      for (unsigned i = 0; i < spin % 512; ++i) {
        std::atomic_signal_fence(std::memory_order_seq_cst);
      }
      if (doomed) doomed->cancel();
    }
  });
  unsigned cancelled = 0;
  for (int i = 0; i < rounds && !::testing::Test::HasFatalFailure(); ++i) {
    const Operation operation = handle.write(memory.bytes(), file, 0, durability);
    {
      const std::lock_guard lock(mutex);
      target = operation;
    }
    const int first = outcome_code(operation);
    EXPECT_TRUE(first == 0 || first == ECANCELED) << first;
    if (first == ETIMEDOUT) break;
    cancelled += first == ECANCELED ? 1 : 0;
    std::this_thread::yield();
    ASSERT_EQ(outcome_code(operation), first) << "an operation ends once";
  }
  over = true;
  canceller.join();
  EXPECT_EQ(handle.stats().operations, static_cast<std::uint64_t>(rounds));
  EXPECT_EQ(handle.stats().cancelled_operations, cancelled);
}

TEST_F(OperationTest, ends_once_however_cancellations_race_with_its_end) {
  race_cancellations(gate, *file, Durability::none);
}

TEST_F(OperationTest, ends_once_however_cancellations_race_with_its_sync) {
  race_cancellations(gate, *file, Durability::data);
}

TEST_F(OperationTest, ends_once_however_cancellations_race_with_its_syncs) {
  race_cancellations(gate, *file, Durability::full);
}

// Another thread holds the queue's lock (it is about to wake the worker) while the worker ends a
// step and the test cancels the operation: both then go on in either order.
TEST_F(OperationTest, a_cancellation_that_meets_the_next_step_is_not_lost) {
  thread_local bool is_slow = false;
  std::atomic<bool> inside{false};
  std::atomic<bool> go_on{false};
  gate.on_wake = [&] {
    if (!is_slow) return;
    inside = true;
    while (!go_on) std::this_thread::yield();
  };
  Handle handle = gate.open_handle(options());
  Memory memory(2 * block);
  for (int round = 0; round < 200; ++round) {
    inside = go_on = false;
    const Operation doomed = handle.write(memory.bytes().first(block), *file, 0, Durability::full);
    ASSERT_TRUE(gate.holds(1));
    if (round % 2 == 1) {
      gate.let_pass(1);  // the bytes; now the file's sync is held
      while (gate.events().back().request.kind != engines::RequestKind::sync_full) {
        std::this_thread::yield();
      }
    }
    std::optional<Operation> other;
    std::thread slow([&] {
      is_slow = true;
      other.emplace(handle.read(memory.bytes().last(block), *file));
    });
    while (!inside) std::this_thread::yield();
    std::thread canceller([&] {
      while (!go_on) std::this_thread::yield();
      doomed.cancel();
    });
    gate.let_pass(1);
    std::this_thread::sleep_for(milliseconds(1));
    go_on = true;
    slow.join();
    canceller.join();
    gate.open();
    const int code = outcome_code(doomed);
    ASSERT_TRUE(code == 0 || code == ECANCELED) << "round " << round << ": " << code;
    ASSERT_EQ(outcome_code(*other), 0);
    gate.close();
  }
}

class OperationOnEngine : public HandleTest {};

TEST_P(OperationOnEngine, cancelling_may_race_with_the_end_of_the_handle) {
  const File file = File::open(make_file("data", MiB, 1), Access::read_write);
  Memory memory(MiB);
  for (int round = 0; round < 30; ++round) {
    std::vector<Operation> operations;
    std::optional<Handle> handle(
        std::in_place, HandleOptions{.engine = GetParam(), .block_bytes = 4 * KiB, .workers = 2});
    for (std::size_t i = 0; i < 32; ++i) {
      operations.push_back(
          handle->read(memory.bytes().subspan(i * 32 * KiB, 32 * KiB), file, i * 32 * KiB));
    }
    std::vector<std::thread> cancellers;
    for (int i = 0; i < 2; ++i) {
      cancellers.emplace_back([&operations] {
        for (const Operation& operation : operations) operation.cancel();
      });
    }
    for (int i = 0; i < round * 20; ++i) std::this_thread::yield();
    handle.reset();
    for (std::thread& canceller : cancellers) canceller.join();
    for (const Operation& operation : operations) {
      ASSERT_TRUE(operation.done());
      const int code = outcome_code(operation);
      ASSERT_TRUE(code == 0 || code == ECANCELED) << code;
    }
  }
}

TEST_P(OperationOnEngine, memory_is_left_alone_once_a_cancelled_read_is_done) {
  constexpr std::size_t bytes = 64 * MiB;
  const File file = File::open(make_file("data", bytes, 1), Access::read);
  Handle handle(options());
  Dice dice(1);
  int cancelled = 0;
  for (const std::size_t skew : {std::size_t{0}, std::size_t{1}}) {
    Memory memory(bytes, skew);
    for (int round = 0; round < 8; ++round) {
      const Operation operation = handle.read(memory.bytes(), file);
      std::this_thread::sleep_for(std::chrono::microseconds(dice.below(3000)));
      operation.cancel();
      const int code = outcome_code(operation);
      ASSERT_TRUE(code == 0 || code == ECANCELED) << code;
      cancelled += code == ECANCELED ? 1 : 0;
      std::fill(memory.bytes().begin(), memory.bytes().end(), std::byte{0xaa});
      std::this_thread::sleep_for(milliseconds(30));
      ASSERT_EQ(support::constant_fault(memory.bytes(), 0, std::byte{0xaa}), "");
    }
  }
  EXPECT_GT(cancelled, 0);
}

TEST_P(OperationOnEngine, every_one_is_done_when_the_handle_is_gone) {
  constexpr std::size_t bytes = 16 * MiB;
  const File file = File::open(make_file("data", bytes, 1), Access::read_write);
  Memory memory = Memory::with_pattern(bytes, 0, 1, 64);
  for (int round = 0; round < 4; ++round) {
    std::vector<Operation> operations;
    {
      Handle handle(options());
      for (int i = 0; i < 50; ++i) {
        operations.push_back(round % 2 == 0
                                 ? handle.read(memory.bytes(), file)
                                 : handle.write(memory.bytes(), file, 0, Durability::full));
      }
      std::this_thread::sleep_for(milliseconds(round * 5));
    }
    for (const Operation& operation : operations) {
      ASSERT_TRUE(operation.done());
      const int code = outcome_code(operation);
      ASSERT_TRUE(code == 0 || code == ECANCELED) << code;
    }
  }
}

TENSORFERRY_ON_EVERY_ENGINE(OperationOnEngine);

}  // namespace
}  // namespace tensorferry::handle
