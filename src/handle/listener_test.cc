// Operation::when_done calls every listener once, and never too early.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "handle/handle_fixture.h"

namespace tensorferry::handle {
namespace {

class Listener : public ::testing::Test {
 protected:
  static constexpr std::size_t block = 4 * KiB;

  Listener() {
    const std::string path = dir.file("data");
    support::write_whole_file(path, support::pattern(2 * block, 0, 1));
    file.emplace(File::open(path, Access::read));
  }

  // The thread that ends the operation calls it, perhaps a moment after the waiter returns.
  [[nodiscard]] bool told_so_often(int times) const {
    const auto limit = Operation::Clock::now() + hang_limit;
    while (told < times && Operation::Clock::now() < limit) std::this_thread::yield();
    return told == times;
  }

  support::TempDir dir;
  std::optional<File> file;
  Gate gate;
  std::atomic<int> told{0};
};

TEST_F(Listener, is_told_once_when_the_operation_is_done) {
  Handle handle = gate.open_handle({.block_bytes = block});
  Memory memory(2 * block);
  const Operation operation = handle.read(memory.bytes(), *file);
  std::atomic<bool> early{false};
  for (int i = 0; i < 3; ++i) {
    operation.when_done([&] {
      if (!operation.done()) early = true;
      ++told;
    });
  }
  ASSERT_TRUE(gate.holds(2));
  EXPECT_EQ(told, 0);
  gate.let_pass(2);
  operation.wait();
  EXPECT_TRUE(told_so_often(3));
  EXPECT_FALSE(early);
}

TEST_F(Listener, who_comes_late_is_told_at_once) {
  Handle handle({.block_bytes = block});
  Memory memory(2 * block);
  const Operation operation = handle.read(memory.bytes(), *file);
  operation.wait();
  operation.when_done([&] { ++told; });
  EXPECT_EQ(told, 1);
}

TEST_F(Listener, is_told_of_failures_and_of_the_end_of_the_handle) {
  Memory memory(3 * block);
  {
    Handle handle = gate.open_handle({.block_bytes = block});
    handle.read(memory.bytes().first(2 * block), *file).when_done([&] { ++told; });
    ASSERT_TRUE(gate.holds(2));
  }  // cancelled
  EXPECT_TRUE(told_so_often(1));
  Handle handle;
  handle.read(memory.bytes(), *file).when_done([&] { ++told; });  // past the end of the file
  EXPECT_TRUE(told_so_often(2));
}

}  // namespace
}  // namespace tensorferry::handle
