// The order in which workers take the blocks of several operations.
#include <gtest/gtest.h>

#include <thread>

#include "handle/crew.h"
#include "handle/handle_fixture.h"

namespace tensorferry::handle {
namespace {

using std::chrono::milliseconds;
using Kind = Gate::Event::Kind;

class Order : public GateTest {
 protected:
  // Reads the given number of blocks for each letter with room for few at a time. Returns the
  // letters in the order in which the worker submitted their blocks.
  std::string submitted(const std::vector<std::pair<char, std::size_t>>& sizes, unsigned depth) {
    Gate own;
    Handle handle = own.open_handle(options(depth));
    Memory first(depth * block);
    const Operation filling = handle.read(first.bytes(), *file);
    EXPECT_TRUE(own.holds(depth));
    std::vector<Memory> memories;
    std::vector<Operation> operations;
    for (const auto& [letter, blocks] : sizes) {
      memories.emplace_back(blocks * block);
      operations.push_back(handle.read(memories.back().bytes(), *file));
    }
    own.open();
    for (const Operation& operation : operations) EXPECT_EQ(outcome_code(operation), 0);
    std::string order;
    for (const auto& [kind, request] : own.events()) {
      if (kind != Kind::submitted) continue;
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const auto memory = memories[i].bytes();
        if (request.memory >= memory.data() && request.memory < memory.data() + memory.size()) {
          order += sizes[i].first;
        }
      }
    }
    return order;
  }
};

TEST_F(Order, one_in_flight_does_not_hold_up_the_next) {
  Handle handle = gate.open_handle(options());
  Memory memory(3 * block);
  const Operation first = handle.read(memory.bytes().first(block), *file);
  ASSERT_TRUE(gate.holds(1));
  const Operation second = handle.read(memory.bytes().subspan(block, block), *file);
  EXPECT_TRUE(gate.holds(2)) << "the second request was not sent while the first was in flight";
  const Operation sync = handle.sync(*file);
  EXPECT_TRUE(gate.holds(3));
  gate.open();
  for (const auto& operation : {first, second, sync}) EXPECT_EQ(outcome_code(operation), 0);
}

TEST_F(Order, a_small_one_does_not_wait_for_a_large_one) {
  constexpr std::size_t large_blocks = 2000;
  const std::string large_path = dir.file("large");
  support::write_whole_file(large_path, support::pattern(large_blocks * block, 0, 2));
  const File large_file = File::open(large_path, Access::read);
  Memory large(large_blocks * block);
  Memory small(block);
  Handle handle = gate.open_handle(options());
  const Operation slow = handle.read(large.bytes(), large_file);
  ASSERT_TRUE(gate.holds(32));
  const Operation quick = handle.read(small.bytes(), *file);
  gate.open();
  ASSERT_EQ(outcome_code(slow), 0);
  ASSERT_EQ(outcome_code(quick), 0);
  const auto completed = requests(Kind::completed);
  const auto own = std::find_if(completed.begin(), completed.end(), [&](const auto& request) {
    return request.memory == small.bytes().data();
  });
  EXPECT_LT(own - completed.begin(), 100) << "of " << large_blocks;
}

TEST_F(Order, more_than_the_queue_holds_wait_and_do_not_fail) {
  Handle handle = gate.open_handle(options(4));
  Memory memory(64 * block);
  std::vector<Operation> operations;
  for (std::size_t i = 0; i < 64; ++i) {
    operations.push_back(handle.read(memory.bytes().subspan(i * block, block), *file, i * block));
  }
  ASSERT_TRUE(gate.holds(4));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(gate.held(), 4U);
  gate.open();
  for (const auto& operation : operations) EXPECT_EQ(outcome_code(operation), 0);
  EXPECT_EQ(support::pattern_fault(memory.bytes(), 0, 1), "");
}

TEST_F(Order, they_take_turns_of_so_many_blocks_however_little_room_there_is) {
  static_assert(turn_blocks == 8);
  for (const unsigned depth : {1U, 3U, 8U}) {
    EXPECT_EQ(submitted({{'a', 20}, {'b', 8}, {'c', 3}, {'d', 9}}, depth),
              "aaaaaaaabbbbbbbbcccddddddddaaaaaaaadaaaa")
        << "depth " << depth;
  }
}

}  // namespace
}  // namespace tensorferry::handle
