#include "tensorferry/swap_space.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "handle/handle_fixture.h"
#include "support/child.h"
#include "support/faulty_engine.h"
#include "support/loop_device.h"
#include "support/pattern.h"
#include "support/sanitizers.h"
#include "support/temp_dir.h"
#include "swap/space.h"
#include "swap/swap_fixture.h"

namespace tensorferry {
namespace {

using handle::Dice;
using handle::error_of;
using handle::Gate;
using handle::hang_limit;
using handle::Memory;
using handle::outcome_code;
using support::pattern_fault;

namespace fs = std::filesystem;

constexpr std::size_t buffer_bytes = 8 * MiB;

class SwapSpaceTest : public ::testing::Test {
 protected:
  [[nodiscard]] SwapOptions options() const { return swap::options_in(dir, buffer_bytes); }

  // A swap space whose requests wait at the gate.
  [[nodiscard]] SwapSpace gated(Gate& gate) const {
    SwapOptions gated_options = options();
    gated_options.handle = Gate::settings();
    return {gated_options, swap::Seams{gate.seams()}};
  }

  support::TempDir dir;
};

// Empty if get() returns the right bytes; else tells the first wrong one.
std::string fault_in(SwapSpace& space, std::string_view key, std::size_t bytes, std::uint32_t seed,
                     std::uint64_t offset = 0) {
  Memory memory(bytes);
  space.get(key, memory.bytes(), offset).wait();
  return pattern_fault(memory.bytes(), offset, seed);
}

void store(SwapSpace& space, std::string_view key, std::size_t bytes, std::uint32_t seed) {
  Memory memory = Memory::with_pattern(bytes, 0, seed);
  space.put(key, memory.bytes()).wait();
}

TEST_F(SwapSpaceTest, tensors_of_any_size_come_back) {
  SwapSpace space(options());
  const std::vector<std::size_t> sizes = {0,    1,     511,         4095,     4096,
                                          4097, 70000, 3 * MiB + 1, 16 * MiB, 20 * MiB + 777};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    store(space, std::to_string(i), sizes[i], static_cast<std::uint32_t>(i + 1));
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::string key = std::to_string(i);
    EXPECT_EQ(fault_in(space, key, sizes[i], static_cast<std::uint32_t>(i + 1)), "") << sizes[i];
    EXPECT_EQ(space.size(key), sizes[i]);
  }
  EXPECT_EQ(space.stats().tensors, sizes.size());
}

TEST_F(SwapSpaceTest, a_part_can_be_read_alone) {
  SwapSpace space(options());
  store(space, "t", 3 * MiB, 5);
  EXPECT_EQ(fault_in(space, "t", 1000, 5, 4096), "");
  EXPECT_EQ(fault_in(space, "t", 12345, 5, 1234567), "");
  Memory memory(2);
  EXPECT_EQ(error_of([&] { (void)space.get("t", memory.bytes(), 3 * MiB - 1); }).code(), EINVAL);
}

TEST_F(SwapSpaceTest, an_unknown_tensor_is_an_error_that_names_it) {
  SwapSpace space(options());
  Memory memory(16);
  const Error error = error_of([&] { (void)space.get("layer 7", memory.bytes()); });
  EXPECT_EQ(error.code(), ENOENT);
  EXPECT_NE(std::string(error.what()).find("layer 7"), std::string::npos);
  EXPECT_EQ(error_of([&] { space.prefetch("x"); }).code(), ENOENT);
  EXPECT_EQ(error_of([&] { (void)space.fetch("x"); }).code(), ENOENT);
  EXPECT_FALSE(space.drop("x"));
  EXPECT_EQ(space.size("x"), std::nullopt);
}

TEST_F(SwapSpaceTest, a_dropped_tensor_is_gone_and_its_room_is_used_again) {
  SwapSpace space(options());
  store(space, "a", 4 * MiB, 1);
  const std::uint64_t taken = space.stats().file_bytes;
  for (std::uint32_t i = 0; i < 20; ++i) {
    EXPECT_TRUE(space.drop("a"));
    store(space, "a", 4 * MiB, i);
  }
  EXPECT_EQ(space.stats().file_bytes, taken);
}

TEST_F(SwapSpaceTest, tensors_are_striped_over_all_directories) {
  const support::TempDir second;
  const support::TempDir third;
  SwapOptions three = options();
  three.directories = {dir.path(), second.path(), third.path()};
  SwapSpace space(three);
  const std::uint64_t before = space.stats().written_bytes;
  store(space, "t", 9 * MiB + 5, 3);
  EXPECT_EQ(fault_in(space, "t", 9 * MiB + 5, 3), "");
  EXPECT_EQ(fault_in(space, "t", 4 * MiB, 3, 2 * MiB + 11), "");
  EXPECT_GE(space.stats().written_bytes - before, 9 * MiB + 5);
  ASSERT_EQ(space.directories().size(), 3U);
  for (const std::string& directory : space.directories()) {
    std::ifstream file(directory + "/tensors", std::ios::binary);
    std::string head(4096, '\0');
    ASSERT_TRUE(file.read(head.data(), 4096));
    EXPECT_NE(head, std::string(4096, '\0')) << directory << " holds nothing";
  }
}

TEST_F(SwapSpaceTest, a_pending_write_is_read_from_its_memory) {
  Gate gate;
  SwapSpace space = gated(gate);
  Memory memory = Memory::with_pattern(2 * MiB, 0, 9);
  const Operation put = space.put("t", memory.bytes());
  ASSERT_TRUE(gate.holds(1));
  EXPECT_EQ(fault_in(space, "t", 2 * MiB, 9), "");
  EXPECT_EQ(fault_in(space, "t", 4096, 9, 8192), "");
  const auto fetched = space.fetch("t");
  ASSERT_TRUE(fetched);
  fetched->operation.wait();
  EXPECT_EQ(pattern_fault(fetched->buffer.bytes(), 0, 9), "");
  EXPECT_FALSE(put.done());
  EXPECT_EQ(space.stats().forwarded_bytes, 4 * MiB + 4096);
  EXPECT_EQ(space.stats().read_bytes, 0U);
  gate.open();
  put.wait();
}

TEST_F(SwapSpaceTest, that_ends_gives_up_its_writes) {
  Gate gate;
  Memory memory(2 * MiB);
  std::optional<Operation> put;
  {
    SwapSpace space = gated(gate);
    put.emplace(space.put("t", memory.bytes()));
    ASSERT_TRUE(gate.holds(1));
  }
  EXPECT_TRUE(put->done());
  EXPECT_EQ(outcome_code(*put), ECANCELED);
  EXPECT_NE(put->error()->hint().find("cancelled by the caller"), std::string::npos)
      << put->error()->what();
}

TEST_F(SwapSpaceTest, may_end_in_a_callback_of_its_own) {
  Memory memory(2 * MiB);
  for (int round = 0; round < 20; ++round) {
    auto space = std::make_shared<SwapSpace>(options());
    const Operation first = space->put("a", memory.bytes());
    const Operation second = space->put("b", memory.bytes());
    std::atomic<bool> told{false};
    first.when_done([&told, space] { told = true; });
    space.reset();
    while (!told) std::this_thread::yield();
    EXPECT_EQ(outcome_code(first), 0);
    const int code = outcome_code(second);
    EXPECT_TRUE(code == 0 || code == ECANCELED) << code;
  }
}

// After the write is done, the memory belongs to the user again.
TEST_F(SwapSpaceTest, memory_is_never_read_once_its_write_is_done) {
  SwapSpace space(options());
  Memory memory(64 * KiB);
  Memory out(64 * KiB);
  for (std::uint32_t round = 0; round < 2000; ++round) {
    support::fill_pattern(memory.bytes(), 0, round);
    space.put("t", memory.bytes()).wait();
    std::ranges::fill(memory.bytes(), std::byte{0xee});
    space.get("t", out.bytes()).wait();
    ASSERT_EQ(pattern_fault(out.bytes(), 0, round), "") << round;
  }
}

TEST_F(SwapSpaceTest, rewriting_a_pending_tensor_replaces_it_and_never_mixes) {
  Gate gate;
  SwapSpace space = gated(gate);
  Memory first = Memory::with_pattern(MiB, 0, 1);
  Memory second = Memory::with_pattern(MiB, 0, 2);
  const Operation put_first = space.put("t", first.bytes());
  ASSERT_TRUE(gate.holds(1));
  const Operation put_second = space.put("t", second.bytes());
  EXPECT_EQ(fault_in(space, "t", MiB, 2), "");
  ASSERT_TRUE(gate.holds(2));
  for (const auto& event : gate.events()) {  // no byte of the file is written twice
    for (const auto& other : gate.events()) {
      if (event.request.tag == other.request.tag) continue;
      EXPECT_TRUE(event.request.offset + event.request.bytes <= other.request.offset ||
                  other.request.offset + other.request.bytes <= event.request.offset);
    }
  }
  gate.open();
  put_first.wait();
  put_second.wait();
  EXPECT_EQ(fault_in(space, "t", MiB, 2), "");
}

TEST_F(SwapSpaceTest, a_reader_gets_old_or_new_bytes_while_the_tensor_is_rewritten) {
  SwapSpace space(options());
  store(space, "t", 512 * KiB, 0);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    Memory memory(512 * KiB);
    for (std::uint32_t seed = 1; !stop; seed = seed % 250 + 1) {
      support::fill_pattern(memory.bytes(), 0, seed);
      space.put("t", memory.bytes()).wait();
    }
  });
  Memory out(512 * KiB);
  std::string fault;
  for (int round = 0; round < 1500 && fault.empty(); ++round) {
    if (round % 3 == 0) (void)space.prefetch("t");
    space.get("t", out.bytes()).wait();
    fault = "none of them";
    for (std::uint32_t seed = 0; seed <= 250; ++seed) {
      if (pattern_fault(out.bytes().first(64), 0, seed).empty()) {
        fault = pattern_fault(out.bytes(), 0, seed);
        break;
      }
    }
  }
  stop = true;
  writer.join();
  EXPECT_EQ(fault, "");
}

TEST_F(SwapSpaceTest, a_prefetched_tensor_is_handed_over_without_another_read) {
  SwapSpace space(options());
  store(space, "t", 2 * MiB + 5, 4);
  EXPECT_TRUE(space.prefetch("t"));
  EXPECT_TRUE(space.prefetch("t"));
  const auto fetched = space.fetch("t");
  ASSERT_TRUE(fetched);
  fetched->operation.wait();
  EXPECT_EQ(pattern_fault(fetched->buffer.bytes(), 0, 4), "");
  const std::uint64_t read = space.stats().read_bytes;
  EXPECT_LE(read, 2 * MiB + 4096);
  EXPECT_TRUE(space.prefetch("t"));
  EXPECT_EQ(fault_in(space, "t", 1000, 4, 5000), "");
  EXPECT_LE(space.stats().read_bytes, 2 * read);
  EXPECT_EQ(space.stats().prefetched, 2U);
}

TEST_F(SwapSpaceTest, a_prefetch_that_is_out_of_date_is_not_used) {
  SwapSpace space(options());
  store(space, "t", MiB, 1);
  EXPECT_TRUE(space.prefetch("t"));
  store(space, "t", MiB, 2);
  EXPECT_EQ(fault_in(space, "t", MiB, 2), "");
  EXPECT_EQ(space.stats().prefetches_in_vain, 1U);
}

TEST_F(SwapSpaceTest, prefetches_give_way_to_those_who_need_the_room) {
  SwapSpace space(options());
  for (int i = 0; i < 4; ++i) store(space, std::to_string(i), 2 * MiB, 1);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(space.prefetch(std::to_string(i)));
  EXPECT_FALSE(space.prefetch("0") && space.stats().buffer_bytes_used > buffer_bytes);
  const auto all = space.take(buffer_bytes);
  ASSERT_TRUE(all);
  EXPECT_EQ(space.stats().prefetches_in_vain, 4U);
  EXPECT_FALSE(space.prefetch("0"));  // no room
}

TEST_F(SwapSpaceTest, who_finds_no_room_waits_until_there_is_some) {
  SwapSpace space(options());
  auto first = space.take(buffer_bytes - 4096);
  ASSERT_TRUE(first);
  const auto soon = SwapSpace::Clock::now() + std::chrono::milliseconds(20);
  EXPECT_FALSE(space.take(8192, soon));
  EXPECT_TRUE(space.take(4096));
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    first.reset();
  });
  EXPECT_TRUE(space.take(buffer_bytes));
  later.join();
  EXPECT_EQ(space.stats().waits, 2U);
  EXPECT_EQ(error_of([&] { (void)space.take(buffer_bytes + 1); }).code(), EINVAL);
}

TEST_F(SwapSpaceTest, room_is_free_only_when_its_write_is_done) {
  Gate gate;
  SwapSpace space = gated(gate);
  std::optional<SwapBuffer> buffer = space.take(buffer_bytes);
  ASSERT_TRUE(buffer);
  support::fill_pattern(buffer->bytes(), 0, 6);
  const Operation put = space.put("t", buffer->bytes());
  buffer.reset();  // the kernel still uses it
  const auto soon = SwapSpace::Clock::now() + std::chrono::milliseconds(20);
  EXPECT_FALSE(space.take(4096, soon));
  gate.open();
  EXPECT_TRUE(space.take(buffer_bytes));
  put.wait();
  EXPECT_EQ(fault_in(space, "t", buffer_bytes, 6), "");
}

TEST_F(SwapSpaceTest, who_waits_for_room_and_an_operation_gets_what_comes_first) {
  Gate gate;
  SwapSpace space = gated(gate);
  std::optional<SwapBuffer> buffer = space.take(buffer_bytes);
  ASSERT_TRUE(buffer);
  Memory memory(4096);
  const Operation put = space.put("t", memory.bytes());
  const auto soon = SwapSpace::Clock::now() + std::chrono::milliseconds(20);
  EXPECT_FALSE(space.take(4096, put, soon)) << "neither has come";
  const auto late = SwapSpace::Clock::now() + hang_limit;
  const auto after_waits = [&](std::uint64_t count, const std::function<void()>& then) {
    return std::jthread([&space, late, count, then] {
      while (space.stats().waits < count && SwapSpace::Clock::now() < late) {
        std::this_thread::yield();
      }
      then();
    });
  };
  std::jthread later = after_waits(2, [&] { gate.open(); });
  EXPECT_FALSE(space.take(4096, put, late)) << "all room is held";
  EXPECT_TRUE(put.done());
  later.join();
  EXPECT_FALSE(space.take(4096, put)) << "it was done before";
  gate.close();
  const Operation other = space.put("t", memory.bytes());
  const std::jthread giving = after_waits(3, [&] { buffer.reset(); });
  EXPECT_TRUE(space.take(buffer_bytes, other, late));
  EXPECT_FALSE(other.done());
  gate.open();
  other.wait();
}

TEST_F(SwapSpaceTest, who_waits_for_room_raises_the_writes_that_hold_it) {
  Gate gate;
  SwapSpace space = gated(gate);
  const std::optional<SwapBuffer> buffer = space.take(buffer_bytes);
  const PriorityScope low(Priority::background);
  const Operation put = space.put("t", buffer.value().bytes());
  EXPECT_EQ(put.transfer().priority(), Priority::background);
  const PriorityScope high(Priority::urgent);
  EXPECT_FALSE(space.take(4096, SwapSpace::Clock::now()));
  EXPECT_EQ(put.transfer().priority(), Priority::urgent);
  gate.open();
  EXPECT_EQ(outcome_code(put), 0);
}

TEST_F(SwapSpaceTest, memory_stays_what_was_configured) {
  SwapOptions some = options();
  some.buffer_bytes = 32 * MiB;
  SwapSpace space(some);
  const auto move_all = [&space] {
    for (int i = 0; i < 64; ++i) {
      auto buffer = space.take(4 * MiB - 100);
      support::fill_pattern(buffer->bytes(), 0, static_cast<std::uint32_t>(i));
      (void)space.put("t" + std::to_string(i), buffer->bytes());
    }
    for (int i = 0; i < 64; ++i) {
      const auto fetched = space.fetch("t" + std::to_string(i));
      fetched->operation.wait();
      ASSERT_EQ(pattern_fault(fetched->buffer.bytes(), 0, static_cast<std::uint32_t>(i)), "");
    }
  };
  move_all();
  const std::uint64_t before = handle::kernel_figure("/proc/self/status", "VmHWM");
  for (int round = 0; round < 4; ++round) move_all();
  const std::uint64_t after = handle::kernel_figure("/proc/self/status", "VmHWM");
  if (support::no_memory_figures() == nullptr) {
    EXPECT_LE(after - before, 1024U) << "KiB more than before";
  }
}

TEST_F(SwapSpaceTest, a_view_shows_parts_of_tensors_as_one) {
  const support::TempDir second;
  SwapOptions two = options();
  two.directories = {dir.path(), second.path()};
  auto space = std::make_unique<SwapSpace>(two);
  store(*space, "a", 5 * MiB, 1);
  store(*space, "b", 3 * MiB + 100, 2);
  const std::vector<SwapPart> parts = {{"a", 4096, 4 * MiB}, {"b", 8192, 3 * MiB - 8192 + 100}};
  const SwapView view = space->view(parts);
  ASSERT_EQ(view.bytes().size(), 7 * MiB - 8192 + 100);
  EXPECT_EQ(pattern_fault(view.bytes().first(4 * MiB), 4096, 1), "");
  store(*space, "a", 5 * MiB, 7);
  store(*space, "b", 100, 7);
  space->drop("a");
  store(*space, "c", 16 * MiB, 8);
  space.reset();
  EXPECT_EQ(pattern_fault(view.bytes().first(4 * MiB), 4096, 1), "");
  EXPECT_EQ(pattern_fault(view.bytes().subspan(4 * MiB), 8192, 2), "");
}

TEST_F(SwapSpaceTest, a_view_of_what_is_being_written_waits_for_it) {
  SwapSpace space(options());
  for (std::uint32_t round = 0; round < 50; ++round) {
    const Memory memory = Memory::with_pattern(MiB, 0, round);
    const Operation put = space.put("t", memory.bytes());
    const std::vector<SwapPart> parts = {{"t", 0, MiB}};
    const SwapView view = space.view(parts);
    ASSERT_EQ(pattern_fault(view.bytes(), 0, round), "");
    put.wait();
  }
}

TEST_F(SwapSpaceTest, misaligned_parts_of_a_view_are_refused) {
  SwapSpace space(options());
  store(space, "t", MiB, 1);
  const auto refused = [&space](std::vector<SwapPart> parts) {
    return error_of([&] { (void)space.view(parts); }).code();
  };
  EXPECT_EQ(refused({{"t", 100, 4096}}), EINVAL);
  EXPECT_EQ(refused({{"t", 0, 100}, {"t", 0, 4096}}), EINVAL);
  EXPECT_EQ(refused({{"t", 4096, MiB}}), EINVAL);
  EXPECT_EQ(refused({{"nobody", 0, 4096}}), ENOENT);
}

TEST_F(SwapSpaceTest, a_failed_put_leaves_the_tensor_as_it_was) {
  support::EngineFaults faults;
  std::atomic<bool> broken{false};
  faults.judge = [&broken](const engines::Request& request, std::uint64_t) {
    support::Fault fault;
    if (broken && request.kind == engines::RequestKind::write) {
      fault.kind = support::Fault::Kind::fail;
      fault.error = EIO;
    }
    return fault;
  };
  swap::Seams seams;
  seams.handle.open_engine = [&faults](EngineKind kind, unsigned depth, os::System& system) {
    return faults.open(kind, depth, system);
  };
  SwapSpace space(options(), seams);
  store(space, "t", MiB, 1);
  broken = true;
  Memory memory = Memory::with_pattern(2 * MiB, 0, 2);
  EXPECT_EQ(outcome_code(space.put("t", memory.bytes())), EIO);
  EXPECT_EQ(outcome_code(space.put("new", memory.bytes())), EIO);
  EXPECT_EQ(space.size("t"), MiB);
  EXPECT_EQ(space.size("new"), std::nullopt);
  EXPECT_EQ(fault_in(space, "t", MiB, 1), "");
  broken = false;
  store(space, "t", 2 * MiB, 2);
  EXPECT_EQ(fault_in(space, "t", 2 * MiB, 2), "");
}

TEST_F(SwapSpaceTest, a_full_drive_is_an_error_and_all_stays_readable) {
  if (const auto reason = support::LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  support::LoopDevice device(64 * MiB);
  device.make_file_system("ext4");
  device.mount();
  SwapOptions small = options();
  small.directories = {device.mount_point()};
  {
    SwapSpace space(small);
    std::uint32_t count = 0;
    Error full({});
    for (; count < 40; ++count) {
      full = error_of([&] { store(space, std::to_string(count), 3 * MiB, count); });
      if (full.code() != 0) break;
    }
    EXPECT_EQ(full.code(), ENOSPC);
    EXPECT_GE(count, 12U);
    EXPECT_NE(full.hint().find("needed 3145728 bytes, free "), std::string::npos) << full.what();
    for (std::uint32_t i = 0; i < count; ++i) {
      EXPECT_EQ(fault_in(space, std::to_string(i), 3 * MiB, i), "") << i;
    }
    // Every second tensor is dropped: a larger one fits, in several extents.
    for (std::uint32_t i = 0; i < count; i += 2) space.drop(std::to_string(i));
    store(space, "scattered", 12 * MiB, 77);
    EXPECT_EQ(fault_in(space, "scattered", 12 * MiB, 77), "");
    EXPECT_EQ(fault_in(space, "1", 3 * MiB, 1), "");
  }
  device.unmount();
}

TEST_F(SwapSpaceTest, a_drive_that_is_full_leaves_the_rest_to_the_others) {
  if (const auto reason = support::LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  support::LoopDevice device(24 * MiB);
  device.make_file_system("ext4");
  device.mount();
  SwapOptions two = options();
  two.directories = {device.mount_point(), dir.path()};
  {
    SwapSpace space(two);
    for (std::uint32_t i = 0; i < 20; ++i) store(space, std::to_string(i), 4 * MiB, i);
    for (std::uint32_t i = 0; i < 20; ++i) {
      EXPECT_EQ(fault_in(space, std::to_string(i), 4 * MiB, i), "") << i;
    }
  }
  device.unmount();
}

TEST_F(SwapSpaceTest, room_can_be_taken_ahead) {
  SwapSpace space(options());
  space.reserve(50 * MiB);
  EXPECT_GE(space.stats().file_bytes, 50 * MiB);
  EXPECT_EQ(error_of([&] { space.reserve(std::uint64_t{1} << 55); }).code(), ENOSPC);
}

TEST_F(SwapSpaceTest, its_files_are_gone_with_it) {
  {
    SwapSpace space(options());
    store(space, "t", MiB, 1);
    EXPECT_TRUE(fs::exists(space.directories().front() + "/tensors"));
  }
  for (const auto& entry : fs::recursive_directory_iterator(dir.path())) {
    EXPECT_TRUE(entry.is_directory()) << entry.path();
  }
}

TEST_F(SwapSpaceTest, in_a_child_of_fork_its_use_is_an_error_and_its_end_removes_nothing) {
  auto space = std::make_unique<SwapSpace>(options());
  store(*space, "t", MiB, 1);
  const auto child = support::run_in_child([&space]() -> std::string {
    Memory memory(MiB);
    const int code = error_of([&] { (void)space->get("t", memory.bytes()); }).code();
    const int reserved = error_of([&] { space->reserve(MiB); }).code();
    space.reset();
    return code == ECHILD && reserved == ECHILD
               ? ""
               : "codes " + std::to_string(code) + ", " + std::to_string(reserved);
  });
  EXPECT_TRUE(child.passed()) << child;
  EXPECT_EQ(fault_in(*space, "t", MiB, 1), "");
}

TEST_F(SwapSpaceTest, many_threads_on_many_tensors_see_their_own_bytes) {
  SwapSpace space(options());
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (std::uint32_t id = 0; id < 6; ++id) {
    threads.emplace_back([&, id] {
      Dice dice(id);
      const std::string key = "thread " + std::to_string(id);
      bool there = false;
      std::size_t bytes = 0;
      std::uint32_t seed = 0;
      for (std::uint32_t round = 0; round < 300; ++round) {
        const std::uint64_t what = dice.below(6);
        if (what <= 1 || !there) {
          bytes = 1 + dice.below(MiB);
          seed = id * 1000 + round;
          auto buffer = space.take(bytes);
          support::fill_pattern(buffer->bytes(), 0, seed);
          const Operation put = space.put(key, buffer->bytes());
          if (dice.coin()) put.wait();
          there = true;
        } else if (what == 2) {
          (void)space.prefetch(key);
        } else if (what == 3) {
          const auto fetched = space.fetch(key);
          fetched->operation.wait();
          wrong += !pattern_fault(fetched->buffer.bytes(), 0, seed).empty();
        } else if (what == 4) {
          wrong += !fault_in(space, key, bytes, seed).empty();
        } else if (dice.below(4) == 0) {
          space.drop(key);
          there = false;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace tensorferry
