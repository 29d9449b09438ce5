// fork() beside a swap space: the space and its memory stay with the parent, and a child that uses
// what it has inherited never hangs, whatever other threads of the parent were doing.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "handle/handle_fixture.h"
#include "support/child.h"
#include "support/pattern.h"
#include "support/temp_dir.h"
#include "swap/swap_fixture.h"
#include "tensorferry/swap_space.h"

namespace tensorferry {
namespace {

using handle::error_of;
using handle::kernel_figure;
using handle::Memory;
using support::pattern_fault;

// A child that hangs waits for a lock or for threads that it does not have.
constexpr std::chrono::seconds child_limit{20};

class SwapFork : public ::testing::TestWithParam<SwapMemory> {
 protected:
  static constexpr std::size_t buffer_bytes = 64 * MiB;

  [[nodiscard]] SwapOptions options() const {
    SwapOptions options = swap::options_in(dir, buffer_bytes);
    options.memory = GetParam();
    return options;
  }

  support::TempDir dir;
};

SwapBuffer filled(SwapSpace& space, std::size_t bytes, std::uint32_t seed) {
  std::optional<SwapBuffer> buffer = space.take(bytes);
  support::fill_pattern(buffer->bytes(), 0, seed);
  return *buffer;
}

std::string fault_of(SwapSpace& space, std::string_view key, std::size_t bytes,
                     std::uint32_t seed) {
  const auto fetched = space.fetch(key);
  fetched->operation.wait();
  if (fetched->buffer.bytes().size() != bytes) return "of another size";
  return pattern_fault(fetched->buffer.bytes(), 0, seed);
}

TEST_P(SwapFork, buffers_are_not_copied_for_children_and_not_there) {
  SwapSpace space(options());
  {
    const SwapBuffer buffer = filled(space, buffer_bytes / 2, 1);
    space.put("t", buffer.bytes()).wait();
  }
  for (int round = 0; round < 2; ++round) {
    const auto fetched = space.fetch("t");
    fetched->operation.wait();
    const auto child = support::run_in_child([]() -> std::string {
      const std::uint64_t own = kernel_figure("/proc/self/smaps_rollup", "Private_Dirty:") * KiB;
      return own < buffer_bytes / 4 ? "" : std::to_string(own) + " bytes were copied";
    });
    EXPECT_TRUE(child.passed()) << child;
    if (support::no_holes_in_children() == nullptr) {
      const volatile std::byte* const first = fetched->buffer.bytes().data();
      const auto touching = support::run_in_child([first]() -> std::string {
        (void)*first;
        return "it read what is not there";
      });
      EXPECT_TRUE(support::sanitized ? !touching.passed() && touching.text.empty()
                                     : touching.signal == SIGSEGV)
          << touching;
    }
    EXPECT_EQ(pattern_fault(fetched->buffer.bytes(), 0, 1), "");
  }
}

TEST_P(SwapFork, in_a_child_every_use_of_the_space_is_an_error) {
  auto space = std::make_unique<SwapSpace>(options());
  std::optional<SwapBuffer> buffer = filled(*space, MiB, 1);
  const Operation put = space->put("t", buffer->bytes());
  put.wait();
  const SwapPart part{"t", 0, MiB};
  std::optional<SwapView> view = space->view({&part, 1});
  const auto child = support::run_in_child(
      [&]() -> std::string {
        std::string said;
        const auto refused = [&](const char* what, const auto& call) {
          const int code = error_of(call).code();
          if (code != ECHILD) said += std::string(what) + " gave " + std::to_string(code) + "; ";
        };
        Memory memory(MiB);
        refused("put", [&] { (void)space->put("t", memory.bytes()); });
        refused("get", [&] { (void)space->get("t", memory.bytes()); });
        refused("prefetch", [&] { (void)space->prefetch("t"); });
        refused("fetch", [&] { (void)space->fetch("t"); });
        refused("take", [&] { (void)space->take(1); });
        refused("take until", [&] { (void)space->take(1, put); });
        refused("drop", [&] { (void)space->drop("t"); });
        refused("view", [&] { (void)space->view({&part, 1}); });
        refused("reserve", [&] { space->reserve(1); });
        refused("size", [&] { (void)space->size("t"); });
        refused("stats", [&] { (void)space->stats(); });
        refused("engine_reason", [&] { (void)space->engine_reason(); });
        if (space->directories().size() != 1) said += "directories(); ";
        (void)space->notes();
        if (in_swap_buffer(buffer->bytes())) said += "in_swap_buffer(); ";
        said += pattern_fault(view->bytes(), 0, 1);  // children inherit views
        view.reset();
        buffer.reset();
        space.reset();
        return said;
      },
      child_limit);
  EXPECT_TRUE(child.passed()) << child;
  EXPECT_EQ(fault_of(*space, "t", MiB, 1), "");
}

TEST_P(SwapFork, a_child_can_end_a_space_whose_buffers_a_thread_waits_for) {
  auto space = std::make_unique<SwapSpace>(options());
  std::optional<SwapBuffer> all = space->take(buffer_bytes);
  std::thread waiting([&space] { (void)space->take(MiB); });
  while (space->stats().waits == 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(10));  // until it waits
  const auto child = support::run_in_child(
      [&]() -> std::string {
        all.reset();
        space.reset();
        return {};
      },
      child_limit);
  EXPECT_TRUE(child.passed()) << child;
  all.reset();
  waiting.join();
}

TEST_P(SwapFork, forks_in_the_middle_of_everything_hang_nobody) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  auto space = std::make_unique<SwapSpace>(options());
  std::atomic<bool> over{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> users;
  for (std::uint32_t id = 0; id < 2; ++id) {
    users.emplace_back([&, id] {
      const std::string key = "thread " + std::to_string(id);
      while (!over) {
        const SwapBuffer buffer = filled(*space, 64 * KiB, id);
        space->put(key, buffer.bytes()).wait();
        (void)space->prefetch(key);
        wrong += !fault_of(*space, key, 64 * KiB, id).empty();
        const SwapPart part{key, 0, 4 * KiB};
        (void)space->view({&part, 1});
      }
    });
  }
  users.emplace_back([&] {
    while (!over) (void)space->stats();
  });
  users.emplace_back([&] {
    while (!over) (void)space->take(KiB);
  });
  std::string complaint;
  for (int round = 0; round < 40 && complaint.empty(); ++round) {
    std::optional<SwapBuffer> buffer = filled(*space, KiB, 9);
    const auto child = support::run_in_child(
        [&]() -> std::string {
          const bool ours = in_swap_buffer(buffer->bytes());
          buffer.reset();
          const int stats = error_of([&] { (void)space->stats(); }).code();
          const int size = error_of([&] { (void)space->size("thread 0"); }).code();
          space.reset();
          return !ours && stats == ECHILD && size == ECHILD ? "" : "it is used as its own";
        },
        child_limit);
    if (!child.passed()) complaint = ::testing::PrintToString(child);
  }
  over = true;
  for (std::thread& user : users) user.join();
  EXPECT_EQ(complaint, "");
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(memory, SwapFork,
                         ::testing::Values(SwapMemory::page_locked, SwapMemory::ordinary),
                         [](const auto& tested) {
                           return tested.param == SwapMemory::ordinary ? "ordinary" : "page_locked";
                         });

}  // namespace
}  // namespace tensorferry
