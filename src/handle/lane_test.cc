// Small operations on lanes: whoever waits works, and somebody completes them if nobody waits.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>
#include <vector>

#include "handle/handle_fixture.h"
#include "support/memory.h"
#include "support/pattern.h"
#include "support/thrown.h"

namespace tensorferry::handle {
namespace {

using namespace std::chrono_literals;
using support::Memory;
using support::pattern_fault;
using support::thrown_by;

// The threads of this process by name.
std::size_t threads_named(const std::string& name) {
  std::size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string comm;
    std::getline(std::ifstream(task.path() / "comm"), comm);
    count += comm == name;
  }
  return count;
}

class LaneTest : public ::testing::Test {
 protected:
  static constexpr std::size_t block = 4 * KiB;
  static constexpr std::size_t blocks = 256;

  void SetUp() override {
    if (auto opened = engines::open_engine(EngineKind::libaio, 1, os::System::real());
        !opened.ok()) {
      GTEST_SKIP() << opened.error().what();
    }
    support::write_whole_file(path, support::pattern(blocks * block, 0, 1));
    file.emplace(File::open(path, Access::read_write));
    if (!file->direct_reason().empty()) GTEST_SKIP() << file->direct_reason();
  }

  [[nodiscard]] Operation read(Handle& handle, std::span<std::byte> memory, std::size_t index) {
    return handle.read(memory, *file, index % blocks * block);
  }
  [[nodiscard]] static std::string fault(std::span<const std::byte> memory, std::size_t index) {
    return pattern_fault(memory, index % blocks * block, 1);
  }

  support::TempDir dir;
  std::string path = dir.file("data");
  std::optional<File> file;
};

TEST_F(LaneTest, who_waits_needs_no_worker) {
  Handle handle;
  Memory memory(block);
  for (std::size_t i = 0; i < 100; ++i) {
    const Operation operation = read(handle, memory.bytes(), i);
    operation.wait();
    ASSERT_EQ(fault(memory.bytes(), i), "");
    EXPECT_EQ(operation.engine(), "libaio");
  }
  EXPECT_EQ(handle.stats().lane_operations, 100U);
  EXPECT_EQ(handle.stats().operations, 100U);
  EXPECT_EQ(threads_named("ferry-worker"), 0U);
}

TEST_F(LaneTest, odd_memory_and_odd_offsets_are_exact) {
  Handle handle;
  Memory memory(64 * KiB, 5);
  for (std::size_t i = 0; i < 200; ++i) {
    const std::size_t bytes = 1 + i * 331 % (60 * KiB);
    const std::uint64_t offset = i * 7919 % (blocks * block - bytes);
    handle.read(memory.bytes().first(bytes), *file, offset).wait();
    ASSERT_EQ(pattern_fault(memory.bytes().first(bytes), offset, 1), "") << bytes << " " << offset;
  }
  EXPECT_GT(handle.stats().lane_operations, 150U);
}

// A virtual disk wants such memory in slots, and those of a lane are small.
TEST_F(LaneTest, memory_in_small_pages_is_not_cut_for_the_slots_of_a_lane) {
  Handle handle;
  const support::UntouchedMemory memory(blocks * block);
  ::madvise(memory.bytes().data(), memory.bytes().size(), MADV_NOHUGEPAGE);
  std::ranges::fill(memory.bytes(), std::byte{0});
  handle.read_now(memory.bytes(), *file, 0);
  EXPECT_EQ(fault(memory.bytes(), 0), "");
  EXPECT_LE(handle.stats().requests, 4U);
}

TEST_F(LaneTest, what_is_written_is_read_back) {
  Handle handle;
  Memory memory(block);
  for (std::size_t i = 0; i < 32; ++i) {
    Memory out = Memory::with_pattern(block, i * block, 7);
    handle.write(out.bytes(), *file, i * block).wait();
  }
  for (std::size_t i = 0; i < 32; ++i) {
    read(handle, memory.bytes(), i).wait();
    ASSERT_EQ(pattern_fault(memory.bytes(), i * block, 7), "");
  }
  EXPECT_EQ(handle.stats().lane_operations, 64U);
}

TEST_F(LaneTest, an_operation_that_nobody_waits_for_becomes_done) {
  Handle handle;
  Memory memory(block);
  const Operation operation = read(handle, memory.bytes(), 3);
  const auto limit = Operation::Clock::now() + support::hang_limit;
  while (handle.stats().operations == 0 && Operation::Clock::now() < limit) {
    std::this_thread::sleep_for(1ms);  // never looks at the operation itself
  }
  EXPECT_EQ(handle.stats().operations, 1U);
  EXPECT_TRUE(operation.done());
  EXPECT_EQ(fault(memory.bytes(), 3), "");
}

TEST_F(LaneTest, asking_whether_it_is_done_is_enough) {
  Handle handle;
  Memory memory(block);
  const Operation operation = read(handle, memory.bytes(), 5);
  const auto limit = Operation::Clock::now() + support::hang_limit;
  while (!operation.done() && Operation::Clock::now() < limit) {
  }
  EXPECT_TRUE(operation.done());
  EXPECT_EQ(fault(memory.bytes(), 5), "");
}

TEST_F(LaneTest, listeners_are_called_on_a_thread_of_the_library) {
  Handle handle;
  Memory memory(64 * block);
  std::atomic<int> calls{0};
  std::atomic<int> on_callers_thread{0};
  const auto caller = std::this_thread::get_id();
  std::vector<Operation> operations;
  int listeners = 0;
  for (std::size_t i = 0; i < 64; ++i) {
    operations.push_back(read(handle, memory.bytes().subspan(i * block, block), i));
    if (operations.back().done()) continue;
    ++listeners;
    operations.back().when_done([&] {
      if (std::this_thread::get_id() == caller) ++on_callers_thread;
      ++calls;
    });
  }
  for (const Operation& operation : operations) operation.wait();
  const auto limit = Operation::Clock::now() + support::hang_limit;
  while (calls < listeners && Operation::Clock::now() < limit) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(calls, listeners);
  EXPECT_GE(calls, 32) << "some may have been done before";
  EXPECT_LT(on_callers_thread, calls) << "only those that were done at once";
}

// A user who holds a lock while it waits must not run a listener that wants the lock.
TEST_F(LaneTest, a_waiter_may_hold_a_lock_that_a_listener_takes) {
  Handle handle;
  Memory memory(2 * block);
  std::mutex mutex;
  for (std::size_t i = 0; i < 200; ++i) {
    const auto called = std::make_shared<std::promise<void>>();
    std::thread other;
    {
      const std::unique_lock lock(mutex);
      const Operation first = read(handle, memory.bytes().first(block), i);
      const Operation second = read(handle, memory.bytes().last(block), i + 1);
      other = std::thread([&mutex, called, first] {
        first.when_done([&mutex, called] {
          const std::lock_guard wanted(mutex);
          called->set_value();
        });
      });
      second.wait();
    }
    other.join();
    ASSERT_EQ(called->get_future().wait_for(support::hang_limit), std::future_status::ready);
  }
}

TEST_F(LaneTest, another_thread_may_wait) {
  Handle handle;
  Memory memory(64 * block);
  for (int round = 0; round < 20; ++round) {
    std::vector<Operation> operations;
    for (std::size_t i = 0; i < 64; ++i) {
      operations.push_back(read(handle, memory.bytes().subspan(i * block, block), i));
    }
    std::vector<std::thread> waiters;
    for (std::size_t first = 0; first < 4; ++first) {
      waiters.emplace_back([&, first] {
        for (std::size_t i = first; i < 64; i += 4) operations[i].wait();
      });
    }
    for (std::thread& waiter : waiters) waiter.join();
    for (std::size_t i = 0; i < 64; ++i) {
      ASSERT_EQ(fault(memory.bytes().subspan(i * block, block), i), "");
    }
  }
}

TEST_F(LaneTest, the_thread_that_started_an_operation_may_end) {
  Handle handle;
  Memory memory(32 * block);
  std::vector<std::optional<Operation>> operations(32);
  for (std::size_t i = 0; i < 32; ++i) {
    std::thread([&, i] {
      operations[i] = read(handle, memory.bytes().subspan(i * block, block), i);
    }).join();
  }
  for (std::size_t i = 0; i < 32; ++i) {
    operations[i]->wait();
    ASSERT_EQ(fault(memory.bytes().subspan(i * block, block), i), "");
  }
}

TEST_F(LaneTest, many_threads_share_lanes_and_lose_nothing) {
  Handle handle;
  Users users(8, [&](std::size_t user) {
    return [&, memory = std::make_shared<Memory>(16 * block), i = user * 17]() mutable {
      std::vector<Operation> operations;
      for (std::size_t k = 0; k < 16; ++k) {
        operations.push_back(read(handle, memory->bytes().subspan(k * block, block), i + k));
      }
      std::string found;
      for (std::size_t k = 0; k < 16; ++k) {
        operations[k].wait();
        found += fault(memory->bytes().subspan(k * block, block), i + k);
      }
      i += 16;
      return found;
    };
  });
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(users.end(), "");
}

TEST_F(LaneTest, more_operations_than_a_lane_takes_go_to_the_workers) {
  Handle handle;
  Memory memory(blocks * block);
  std::vector<Operation> operations;
  for (std::size_t i = 0; i < blocks; ++i) {
    operations.push_back(read(handle, memory.bytes().subspan(i * block, block), i));
  }
  for (const Operation& operation : operations) operation.wait();
  EXPECT_EQ(fault(memory.bytes(), 0), "");
  EXPECT_EQ(handle.stats().operations, blocks);
}

TEST_F(LaneTest, a_deadline_is_kept) {
  Handle handle;
  Memory memory(block);
  const Operation operation = read(handle, memory.bytes(), 0);
  (void)operation.wait_until(Operation::Clock::now() - 1s);
  EXPECT_TRUE(operation.wait_for(support::hang_limit));
}

// A drive that keeps what it gets, until the gate opens.
class HeldLane : public LaneTest {
 protected:
  HeldLane() { gate_.service = engines::Service::any_thread; }

  [[nodiscard]] Operation held_read(std::size_t index) {
    Operation operation = read(handle_, memory_.bytes().subspan(index * block, block), index);
    EXPECT_TRUE(gate_.holds(index + 1));
    EXPECT_EQ(handle_.stats().lane_operations, index + 1);
    return operation;
  }

  Gate gate_;
  Memory memory_{2 * block};
  Handle handle_ = make_handle({}, gate_.seams());
};

TEST_F(HeldLane, a_deadline_passes_for_who_works_and_for_who_follows) {
  const Operation first = held_read(0);
  EXPECT_FALSE(first.wait_for(1ms)) << "alone, so this thread worked";
  auto worker = std::async(std::launch::async, [&] { return outcome_code(first); });
  const Operation second = held_read(1);
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(second.wait_for(1ms));
  gate_.open();
  EXPECT_EQ(outcome_code(second), 0);
  EXPECT_EQ(worker.get(), 0);
  EXPECT_EQ(fault(memory_.bytes(), 0), "");
}

TEST_F(HeldLane, a_cancelled_operation_ends_whoever_waits_for_it) {
  const Operation alone = held_read(0);
  alone.cancel();
  EXPECT_EQ(outcome_code(alone), ECANCELED);
  const Operation awaited = read(handle_, memory_.bytes().first(block), 0);
  auto waiter = std::async(std::launch::async, [&] { return outcome_code(awaited); });
  ASSERT_TRUE(gate_.holds(1));
  EXPECT_FALSE(awaited.wait_for(5ms));  // the waiter works by now, or this thread has
  awaited.cancel();
  EXPECT_EQ(waiter.get(), ECANCELED);
}

TEST_F(LaneTest, an_error_names_the_place) {
  Handle handle;
  Memory memory(block);
  const Operation operation = handle.read(memory.bytes(), *file, blocks * block);
  const auto error = thrown_by([&] { operation.wait(); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ENODATA);
  EXPECT_EQ(error->offset(), blocks * block);
}

TEST_F(LaneTest, closing_finishes_writes_that_nobody_waits_for) {
  for (int round = 0; round < 20; ++round) {
    Memory memory = Memory::with_pattern(32 * block, 0, static_cast<std::uint32_t>(round));
    std::vector<Operation> operations;
    {
      Handle handle;
      for (std::size_t i = 0; i < 32; ++i) {
        operations.push_back(
            handle.write(memory.bytes().subspan(i * block, block), *file, i * block));
      }
    }
    for (const Operation& operation : operations) EXPECT_TRUE(operation.done());
    const auto whole = support::read_whole_file(path);
    ASSERT_EQ(
        pattern_fault(std::span(whole).first(32 * block), 0, static_cast<std::uint32_t>(round)),
        "");
  }
}

TEST_F(LaneTest, durable_writes_are_synced_by_a_worker) {
  Handle handle;
  Memory memory = Memory::with_pattern(block, 0, 9);
  handle.write(memory.bytes(), *file, 0, Durability::full).wait();
  EXPECT_EQ(handle.stats().lane_operations, 1U);
  EXPECT_EQ(handle.stats().requests, 3U) << "the write, the file and its directory";
}

// The worker that syncs reports done when the keeper may have ended.
TEST_F(LaneTest, closing_calls_the_listener_of_a_durable_write) {
  for (int round = 0; round < 100; ++round) {
    Memory memory(block);
    std::atomic<int> calls{0};
    Handle handle;
    handle.write(memory.bytes(), *file, 0, Durability::data).when_done([&] { ++calls; });
    handle.close();
    ASSERT_EQ(calls, 1) << "round " << round;
  }
}

TEST_F(LaneTest, an_operation_may_be_cancelled_at_any_time) {
  Handle handle;
  Memory memory(64 * block);
  for (int round = 0; round < 50; ++round) {
    std::vector<Operation> operations;
    for (std::size_t i = 0; i < 64; ++i) {
      operations.push_back(read(handle, memory.bytes().subspan(i * block, block), i));
    }
    for (const Operation& operation : operations) operation.cancel();
    for (const Operation& operation : operations) {
      const auto ended = support::outcome(operation);
      EXPECT_TRUE(!ended || ended->code() == ECANCELED);
    }
  }
}

TEST_F(LaneTest, a_listener_may_destroy_the_handle) {
  for (int round = 0; round < 20; ++round) {
    auto handle = std::make_unique<Handle>();
    Memory memory(block);
    const auto gone = std::make_shared<std::promise<void>>();
    const Operation operation = read(*handle, memory.bytes(), 1);
    operation.when_done([&handle, gone] {
      handle.reset();
      gone->set_value();
    });
    ASSERT_EQ(gone->get_future().wait_for(support::hang_limit), std::future_status::ready);
  }
}

// The workers start only then, to sync; the last of them ends the crew.
TEST_F(LaneTest, a_listener_may_destroy_the_handle_of_a_durable_write) {
  for (int round = 0; round < 50; ++round) {
    auto handle = std::make_unique<Handle>();
    Memory memory(2 * block);
    const auto gone = std::make_shared<std::promise<void>>();
    const Operation read_one = read(*handle, memory.bytes().first(block), 1);
    const Operation write =
        handle->write(memory.bytes().last(block), *file, 2 * block, Durability::full);
    read_one.when_done([&handle, gone] {
      handle.reset();
      gone->set_value();
    });
    ASSERT_EQ(gone->get_future().wait_for(support::hang_limit), std::future_status::ready);
    ASSERT_TRUE(write.wait_for(support::hang_limit));
  }
}

TEST_F(LaneTest, what_moves_counts_for_its_device_once_somebody_asks) {
  Handle handle;
  Memory memory(block);
  read(handle, memory.bytes(), 0).wait();
  ASSERT_EQ(handle.conductor().device_use().size(), 1U);
  for (std::size_t i = 0; i < 100; ++i) read(handle, memory.bytes(), i).wait();
  const DeviceUse use = handle.conductor().device_use().front();
  EXPECT_EQ(use.bytes, 100 * block);
  EXPECT_GT(use.busy_seconds, 0);
  EXPECT_EQ(handle.stats().lane_operations, 101U);
}

TEST_F(LaneTest, a_chosen_engine_is_used) {
  for (const EngineKind kind : {EngineKind::io_uring, EngineKind::threads}) {
    if (!engines::open_engine(kind, 1, os::System::real()).ok()) continue;
    Handle handle({.engine = kind});
    Memory memory(block);
    const Operation operation = read(handle, memory.bytes(), 0);
    operation.wait();
    EXPECT_EQ(operation.engine(), to_string(kind));
    EXPECT_EQ(handle.stats().lane_operations, 0U);
  }
}

// A drive works on several requests at once in less time than on a large one.
TEST_F(LaneTest, a_read_that_somebody_waits_for_is_cut) {
  Handle handle;
  PinnedBuffer memory(MiB);
  handle.read_now(memory.bytes(), *file);
  EXPECT_EQ(fault(memory.bytes(), 0), "");
  EXPECT_EQ(handle.stats().requests, memory.huge_page_reason().empty() ? 2U : 4U);
  EXPECT_EQ(handle.stats().lane_operations, 1U);
}

TEST_F(LaneTest, a_thread_needs_no_other_however_many_read_beside_it) {
  Handle handle;
  std::vector<std::thread> readers;
  std::atomic<int> wrong{0};
  for (std::size_t user = 0; user < 24; ++user) {
    readers.emplace_back([&, user] {
      Memory memory(64 * KiB, 5);  // goes through slots
      for (std::size_t i = 0; i < 20; ++i) {
        handle.read_now(memory.bytes(), *file, (user * 20 + i) % 15 * 64 * KiB);
        const std::uint64_t offset = (user * 20 + i) % 15 * 64 * KiB;
        wrong += pattern_fault(memory.bytes(), offset, 1).empty() ? 0 : 1;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(threads_named("ferry-worker"), 0U);
  const Stats stats = handle.stats();
  EXPECT_EQ(stats.inline_operations + stats.lane_operations, stats.operations);
}

}  // namespace
}  // namespace tensorferry::handle
