#include "handle/process_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "handle/handle_fixture.h"
#include "support/child.h"
#include "support/pattern.h"

namespace tensorferry::handle {
namespace {

constexpr ProcessNeeds few{.threads = 4, .engines = 4, .slot_bytes = 1000};

TEST(ProcessShare, late_crews_get_less_and_never_nothing) {
  ProcessLimits limits({.threads = 10, .engines = 100, .slot_bytes = 715});
  std::vector<ProcessShare> shares;
  for (int i = 0; i < 4; ++i) shares.emplace_back(limits, 4U, 1U, 80U, 10U);
  EXPECT_EQ(shares[0].workers(), 4U);
  EXPECT_EQ(shares[1].workers(), 4U);
  EXPECT_EQ(shares[2].workers(), 2U);
  EXPECT_EQ(shares[3].workers(), 1U);
  EXPECT_EQ(shares[0].slot_bytes(), 320U);
  EXPECT_EQ(shares[2].slot_bytes(), 60U) << "whole slots, as many to each worker";
  EXPECT_EQ(shares[3].slot_bytes(), 10U);
  const ProcessShare last(limits, 4U, 1U, 80U, 10U);
  EXPECT_EQ(last.slot_bytes(), 10U);
  EXPECT_EQ(limits.in_use().slot_bytes, 320U + 320U + 60U + 10U + 10U);
}

TEST(ProcessShare, workers_that_are_not_granted_take_no_slots) {
  ProcessLimits limits({.threads = 1, .engines = 100, .slot_bytes = 1000});
  const ProcessShare share(limits, 4U, 1U, 80U, 10U);
  EXPECT_EQ(limits.in_use(), (ProcessNeeds{.threads = 1, .engines = 1, .slot_bytes = 80}));
}

TEST(ProcessShare, what_ends_is_there_for_others) {
  ProcessLimits limits(few);
  {
    const ProcessShare all(limits, 4U, 1U, 250U, 10U);
    EXPECT_EQ(ProcessShare(limits, 4U, 1U, 250U, 10U).workers(), 1U);
  }
  const ProcessShare again(limits, 4U, 1U, 250U, 10U);
  EXPECT_EQ(again.workers(), 4U);
  EXPECT_EQ(again.slot_bytes(), 1000U);
}

TEST(ProcessShare, what_a_user_chose_is_granted_in_full) {
  ProcessLimits limits(few);
  const ProcessShare all(limits, 4U, 1U, 250U, 10U);
  const ProcessShare chosen(limits, 8U, 8U, 250U, 250U);
  EXPECT_EQ(chosen.workers(), 8U);
  EXPECT_EQ(chosen.slot_bytes(), 2000U);
}

TEST(ProcessShare, a_worker_needs_a_thread_and_an_engine) {
  ProcessLimits limits({.threads = 8, .engines = 3, .slot_bytes = 1000});
  const ProcessShare share(limits, 6U, 1U, 0U, 0U);
  EXPECT_EQ(share.workers(), 3U);
  EXPECT_EQ(limits.in_use(), (ProcessNeeds{.threads = 3, .engines = 3}));
}

TEST(ProcessShare, what_is_not_needed_is_taken_whole_or_not_at_all) {
  ProcessLimits limits(few);
  const auto most = ProcessShare::try_take(limits, {.threads = 3, .engines = 1, .slot_bytes = 900});
  ASSERT_TRUE(most);
  const ProcessNeeds before = limits.in_use();
  EXPECT_FALSE(ProcessShare::try_take(limits, {.threads = 2}));
  EXPECT_FALSE(most->try_more({.threads = 1, .engines = 1, .slot_bytes = 101}));
  EXPECT_FALSE(most->try_more({.engines = 4}));
  EXPECT_EQ(limits.in_use(), before) << "a refusal takes nothing";
  EXPECT_TRUE(most->try_more({.threads = 1, .engines = 3, .slot_bytes = 100}));
  EXPECT_EQ(limits.in_use(), before) << "what ended is given back";
}

TEST(ProcessShare, a_child_of_fork_begins_with_nothing_in_use) {
  ProcessLimits& limits = ProcessLimits::of_process();
  const ProcessShare all(limits, 1000U, 1U, std::size_t{1} << 40, 1U);
  const ProcessNeeds before = limits.in_use();
  const auto result = support::run_in_child([&]() -> std::string {
    if (limits.in_use() != ProcessNeeds{}) return "what the parent uses counts";
    const ProcessShare own(limits, 2U, 1U, 2048U, 1U);
    return own.workers() == 2 && own.slot_bytes() == 4096 ? "" : "the child gets less";
  });
  EXPECT_TRUE(result.passed()) << result;
  EXPECT_EQ(limits.in_use(), before);
}

// --- What handles take -----------------------------------------------------------------------

class ProcessShareOfHandle : public ::testing::Test {
 protected:
  static constexpr std::size_t bytes = 4 * KiB;

  void SetUp() override {
    if (auto opened = engines::open_engine(EngineKind::libaio, 1, os::System::real());
        !opened.ok()) {
      GTEST_SKIP() << opened.error().what();
    }
    support::write_whole_file(path, support::pattern(bytes, 0, 1));
    file.emplace(File::open(path, Access::read));
    if (!file->direct_reason().empty()) GTEST_SKIP() << file->direct_reason();
  }

  [[nodiscard]] static Handle handle_within(ProcessLimits& limits, unsigned workers = 1) {
    HandleOptions options;
    options.workers = workers;
    Seams seams;
    seams.limits = &limits;
    return make_handle(options, std::move(seams));
  }
  // A read that is queued, through a slot if the address is odd.
  [[nodiscard]] std::string read(Handle& handle, std::size_t shift = 0) const {
    const PinnedBuffer memory(bytes + shift);
    const auto target = memory.bytes().last(bytes);
    handle.read(target, *file, 0).wait();
    return support::pattern_fault(target, 0, 1);
  }
  [[nodiscard]] std::string read_on_a_new_thread(Handle& handle) const {
    std::string fault = "not read";
    std::thread([&] { fault = read(handle); }).join();
    return fault;
  }

  support::TempDir dir;
  std::string path = dir.file("data");
  std::optional<File> file;
};

TEST_F(ProcessShareOfHandle, lanes_and_their_keeper_count) {
  ProcessLimits limits({.threads = 100, .engines = 100, .slot_bytes = 100 * MiB});
  {
    Handle handle = handle_within(limits);
    ASSERT_EQ(read(handle), "");
    const ProcessNeeds one = limits.in_use();
    EXPECT_EQ(one.threads, 2U) << "a worker and the keeper";
    EXPECT_EQ(one.engines, 2U) << "of the worker and of the lane";
    ASSERT_EQ(read_on_a_new_thread(handle), "");
    EXPECT_EQ(limits.in_use().threads, 2U);
    EXPECT_EQ(limits.in_use().engines, 3U);
    EXPECT_EQ(limits.in_use().slot_bytes, one.slot_bytes) << "nothing went through a slot";
    ASSERT_EQ(read(handle, 1), "");
    EXPECT_GT(limits.in_use().slot_bytes, one.slot_bytes) << "the lane has got slots";
  }
  EXPECT_EQ(limits.in_use(), ProcessNeeds{});
}

TEST_F(ProcessShareOfHandle, without_an_engine_to_spare_threads_share_a_lane) {
  ProcessLimits limits({.threads = 100, .engines = 2, .slot_bytes = 100 * MiB});
  Handle handle = handle_within(limits);
  ASSERT_EQ(read(handle), "");
  for (int i = 0; i < 3; ++i) ASSERT_EQ(read_on_a_new_thread(handle), "");
  EXPECT_EQ(limits.in_use().engines, 2U);
  EXPECT_EQ(handle.stats().lane_operations, 4U);
  EXPECT_EQ(handle.stats().fallbacks, 1U);
}

TEST_F(ProcessShareOfHandle, without_a_thread_for_the_keeper_workers_move_small_operations) {
  ProcessLimits limits({.threads = 1, .engines = 100, .slot_bytes = 100 * MiB});
  Handle handle = handle_within(limits);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(read(handle), "");
  EXPECT_EQ(limits.in_use().threads, 1U);
  EXPECT_EQ(limits.in_use().engines, 1U);
  EXPECT_EQ(handle.stats().lane_operations, 0U);
  EXPECT_EQ(handle.stats().fallbacks, 1U);
}

TEST_F(ProcessShareOfHandle, without_slots_of_its_own_a_lane_leaves_it_to_the_workers) {
  ProcessLimits limits({.threads = 100, .engines = 100, .slot_bytes = 0});
  Handle handle = handle_within(limits);
  ASSERT_EQ(read(handle), "");
  const ProcessNeeds before = limits.in_use();  // the least that a worker needs
  ASSERT_EQ(read(handle, 1), "");
  EXPECT_EQ(limits.in_use(), before);
  EXPECT_EQ(handle.stats().lane_operations, 1U) << "in place";
}

// Such as the crews of a process with many drives: they go on, each worker with one slot.
TEST_F(ProcessShareOfHandle, each_worker_has_a_slot_that_counts_and_a_lack_of_more_is_told) {
  constexpr std::size_t size = 8 * MiB;
  const std::string large = dir.file("large");
  support::write_whole_file(large, support::pattern(size, 0, 2));
  const PinnedBuffer memory(size + 1);
  std::size_t one = 0;
  for (const unsigned workers : {1U, 3U}) {
    ProcessLimits limits({.threads = 100, .engines = 100, .slot_bytes = 0});
    {
      Handle handle = handle_within(limits, workers);
      const auto odd = memory.bytes().last(size);
      std::ranges::fill(odd, std::byte{0});
      handle.read(odd, large).wait();
      EXPECT_EQ(support::pattern_fault(odd, 0, 2), "");
      if (workers == 1) one = limits.in_use().slot_bytes;
      EXPECT_GT(one, 0U);
      EXPECT_EQ(limits.in_use().slot_bytes, workers * one);
      const std::vector<std::string> reasons = handle.stats().fallback_reasons;
      const auto tells = [](const std::string& reason) {
        return reason.find("all the memory for slots it may have") != std::string::npos;
      };
      EXPECT_TRUE(std::ranges::any_of(reasons, tells));
    }
    EXPECT_EQ(limits.in_use(), ProcessNeeds{});
  }
}

TEST_F(ProcessShareOfHandle, threads_that_come_and_go_use_the_same_lane) {
  ProcessLimits limits({.threads = 100, .engines = 100, .slot_bytes = 100 * MiB});
  Handle handle = handle_within(limits);
  ASSERT_EQ(read_on_a_new_thread(handle), "");
  const unsigned engines = limits.in_use().engines;
  for (int i = 0; i < 5; ++i) ASSERT_EQ(read_on_a_new_thread(handle), "");
  EXPECT_EQ(limits.in_use().engines, engines);
}

TEST_F(ProcessShareOfHandle, inline_slots_count_and_fall_back_to_workers) {
  const auto read_now = [this](Handle& handle) {
    const PinnedBuffer memory(bytes + 1);
    const auto odd = memory.bytes().last(bytes);
    handle.read_now(odd, *file, 0);
    return support::pattern_fault(odd, 0, 1);
  };
  ProcessLimits enough({.threads = 100, .engines = 100, .slot_bytes = 100 * MiB});
  Handle with = handle_within(enough);
  ASSERT_EQ(read_now(with), "");
  EXPECT_GT(enough.in_use().slot_bytes, 0U);
  EXPECT_EQ(with.stats().inline_operations, 1U);

  ProcessLimits none({.threads = 100, .engines = 100, .slot_bytes = 0});
  Handle without = handle_within(none);
  ASSERT_EQ(read_now(without), "");
  EXPECT_EQ(without.stats().inline_operations, 0U);
}

}  // namespace
}  // namespace tensorferry::handle
