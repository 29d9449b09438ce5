// fork() and memory: what a fork copies, what a child inherits, and whether the parent's transfers
// arrive in the parent's memory.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "handle/handle_fixture.h"
#include "support/child.h"

namespace tensorferry::handle {
namespace {

constexpr std::size_t pinned_bytes = 64 * MiB;
constexpr std::size_t locked_bytes = 8 * MiB;

class ForkMemory : public HandleTest {};

// Returns a complaint if a process that has just been forked has much memory of its own.
std::string copied() {
  const std::uint64_t own = kernel_figure("/proc/self/smaps_rollup", "Private_Dirty:") * KiB;
  return own < pinned_bytes / 4 ? "" : std::to_string(own) + " bytes were copied for the child";
}

std::int64_t huge_bytes(const PinnedBuffer& buffer) {
  return os::System::real().huge_bytes(buffer.data(), buffer.size());
}

TEST_P(ForkMemory, page_locked_memory_that_was_used_is_not_copied_for_children) {
  const File file = File::open(make_file("data", locked_bytes, 1), Access::read_write);
  Handle handle({.engine = GetParam(), .workers = 2});
  PinnedBuffer pinned(pinned_bytes);
  const auto used = pinned.bytes().first(locked_bytes);
  const std::int64_t huge = huge_bytes(pinned);
  for (int round = 0; round < 2; ++round) {
    handle.read(used, file).wait();
    const auto child = support::run_in_child(copied);
    EXPECT_TRUE(child.passed()) << child;
    EXPECT_EQ(support::pattern_fault(used, 0, 1), "");
    EXPECT_GE(huge_bytes(pinned), huge) << "the parent's huge pages";
    handle.write(used, file).wait();
  }
  EXPECT_EQ(support::pattern_fault(support::read_whole_file(file.path()), 0, 1), "");
  if (GetParam() == EngineKind::io_uring && !support::sanitized) {
    EXPECT_GT(handle.stats().fixed_requests, 0U);
  }
}

// The child may live on: the parent's next transfer must not copy all of it either.
TEST_P(ForkMemory, transfers_beside_a_living_child_copy_nothing_and_are_right) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const File file = File::open(make_file("data", locked_bytes, 1), Access::read);
  PinnedBuffer pinned(pinned_bytes);
  const auto used = pinned.bytes().first(locked_bytes);
  std::optional<Handle> handle(std::in_place, options());
  handle->read(used, file).wait();
  const std::int64_t huge = huge_bytes(pinned);
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  for (const bool opened_after : {false, true}) {
    if (opened_after) handle.emplace(options());
    std::fill(used.begin(), used.end(), std::byte{0});
    handle->read(used, file).wait();
    EXPECT_EQ(support::pattern_fault(used, 0, 1), "");
    EXPECT_GE(huge_bytes(pinned), huge) << "a copy would be of small pages";
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST_P(ForkMemory, slots_are_not_copied_for_children) {
  const File file = File::open(make_file("data", locked_bytes, 1), Access::read);
  Handle handle({.engine = GetParam(),
                 .block_bytes = MiB,
                 .queue_depth = 64,
                 .workers = 1,
                 .slot_bytes = 4 * pinned_bytes});
  Memory memory(locked_bytes - 1, 1);  // not aligned
  handle.read(memory.bytes(), file).wait();
  handle.read_now(memory.bytes().first(KiB), file);
  ASSERT_GT(handle.stats().bounced_bytes, 0U);
  const auto child = support::run_in_child(copied);
  EXPECT_TRUE(child.passed()) << child;
  handle.read(memory.bytes(), file).wait();
  EXPECT_EQ(support::pattern_fault(memory.bytes(), 0, 1), "");
}

TEST_P(ForkMemory, ordinary_memory_is_never_registered_and_so_shared_with_children) {
  const File file = File::open(make_file("data", pinned_bytes, 1), Access::read);
  Handle handle(options());
  Memory memory(pinned_bytes);
  handle.read(memory.bytes(), file).wait();
  const Stats stats = handle.stats();
  EXPECT_TRUE(stats.fixed_requests == 0 || stats.bounced_bytes == pinned_bytes) << "slots may be";
  const auto child = support::run_in_child(
      [&]() -> std::string { return copied() + support::pattern_fault(memory.bytes(), 0, 1); });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(ForkMemory, of_the_parent_is_an_error_for_a_handle_of_the_child) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const File file = File::open(make_file("data", locked_bytes, 1), Access::read_write);
  PinnedBuffer pinned(locked_bytes);
  Handle parents(options());
  parents.read(pinned.bytes(), file).wait();
  const auto child = support::run_in_child([&]() -> std::string {
    Handle own(options());
    const auto all = pinned.bytes();
    const auto small = all.subspan(5, KiB);
    std::string said;
    const auto refuse = [&](const char* what, const auto& call) {
      const Error error = error_of(call);
      if (error.code() == EFAULT && error.hint().find("fork()") != std::string::npos) return;
      said += std::string(what) + " gave \"" + error.what() + "\"; ";
    };
    refuse("read", [&] { (void)own.read(all, file); });
    refuse("write", [&] { (void)own.write(all, file); });
    refuse("read_now", [&] { own.read_now(small, file); });
    refuse("write_now", [&] { own.write_now(small, file); });
    refuse("read_many", [&] {
      const ReadTransfer one{small, file};
      (void)own.read_many({&one, 1});
    });
    if (is_pinned(all)) said += "it counts as page-locked; ";
    pinned.free();
    PinnedBuffer another(locked_bytes);  // never where the parent's was
    own.read(another.bytes(), file).wait();
    return said + support::pattern_fault(another.bytes(), 0, 1);
  });
  EXPECT_TRUE(child.passed()) << child;
  EXPECT_EQ(support::pattern_fault(pinned.bytes(), 0, 1), "");
}

// The parent reads into pages and writes beside them, while children start and live on.
TEST_P(ForkMemory, what_is_in_flight_lands_where_the_parent_looks) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const File file = File::open(make_file("data", locked_bytes, 1), Access::read);
  Handle handle({.engine = GetParam(), .block_bytes = 64 * KiB, .workers = 2});
  // Page-locked; ordinary and in place; ordinary and through slots.
  Users users(3, [&](std::size_t user) {
    return [&handle, &file, user, pinned = PinnedBuffer(user == 0 ? locked_bytes : 1),
            ordinary = Memory(locked_bytes, user == 0 ? 0 : user - 1)]() mutable -> std::string {
      const auto memory = user == 0 ? pinned.bytes() : ordinary.bytes();
      const auto half = memory.first(locked_bytes / 2);
      std::fill(memory.begin(), memory.end(), std::byte{0});
      const Operation operation = handle.read(half, file);
      for (std::size_t i = half.size(); i < memory.size(); i += KiB) memory[i] = std::byte{1};
      if (const auto error = outcome(operation)) return error->what();
      return support::pattern_fault(half, 0, 1);
    };
  });
  std::vector<pid_t> children;
  for (int i = 0; i < 20; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::pause();
      ::_exit(0);
    }
    children.push_back(child);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(users.end(), "");
  for (const pid_t child : children) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
}

// The number of buffers registered with the rings that a process has inherited.
std::size_t registered_buffers(pid_t process) {
  std::size_t count = 0;
  const std::string folder = "/proc/" + std::to_string(process) + "/fdinfo";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream lines(entry.path());
    bool listing = false;  // "UserBufs:" and then a line "    0: 0x7f41f2a00000/4096" for each
    for (std::string line; std::getline(lines, line);) {
      if (!line.starts_with(' ')) listing = line.starts_with("UserBufs:");
      count += listing && line.find(": 0x") != std::string::npos;
    }
  }
  return count;
}

// A living child holds the ring, and the ring would hold the memory.
TEST_P(ForkMemory, that_the_parent_is_done_with_is_not_kept_by_a_living_child) {
  if (GetParam() != EngineKind::io_uring || support::sanitized)
    GTEST_SKIP() << "nothing is registered";
  const File file = File::open(make_file("data", locked_bytes, 1), Access::read);
  PinnedBuffer pinned(locked_bytes);
  std::optional<Handle> handle(std::in_place, options());
  handle->read(pinned.bytes(), file).wait();
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  const std::size_t before = registered_buffers(child);
  handle.reset();
  const std::size_t after = registered_buffers(child);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  if (before == 0) GTEST_SKIP() << "the kernel does not tell what is registered";
  EXPECT_EQ(after, 0U);
}

// Forks on the worker's own thread: fork() must not wait for the worker.
TEST_P(ForkMemory, a_callback_may_fork) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const File file = File::open(make_file("data", locked_bytes, 1), Access::read);
  Handle handle(options());
  PinnedBuffer pinned(pinned_bytes);
  handle.read(pinned.bytes().first(locked_bytes), file).wait();
  const Operation operation = handle.read(pinned.bytes().first(locked_bytes), file);
  std::optional<support::ChildResult> child;
  std::atomic<bool> called{false};
  operation.when_done([&] {
    child = support::run_in_child([&]() -> std::string {
      (void)handle.stats();
      return copied();
    });
    called = true;
  });
  ASSERT_EQ(outcome_code(operation), 0);
  while (!called) std::this_thread::yield();
  EXPECT_TRUE(child->passed()) << *child;
  handle.read(pinned.bytes().first(locked_bytes), file).wait();
  EXPECT_EQ(support::pattern_fault(pinned.bytes().first(locked_bytes), 0, 1), "");
}

// The worker is the child's only thread: it has nothing to return to, and the rings are the
// parent's.
TEST_P(ForkMemory, a_child_that_returns_from_a_callback_ends) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const File file = File::open(make_file("data", locked_bytes, 1), Access::read);
  Handle handle({.engine = GetParam(), .workers = 1});
  Memory memory(locked_bytes);
  std::atomic<pid_t> child{-1};
  std::atomic<bool> next_called{false};
  const Operation operation = handle.read(memory.bytes(), file);
  const Operation behind = handle.read(memory.bytes(), file);
  operation.when_done([&] { child = ::fork(); });
  operation.when_done([&] {
    if (child == 0) support::write_whole_file(dir.file("two callbacks"), {});
    next_called = true;
  });
  EXPECT_EQ(outcome_code(operation), 0);
  while (!next_called) std::this_thread::yield();
  int status = 0;
  pid_t ended = 0;
  for (int i = 0; i < 1000 && ended == 0; ++i) {
    ended = ::waitpid(child, &status, WNOHANG);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(ended, child) << "the child goes on";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  if (ended == 0) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  EXPECT_FALSE(std::filesystem::exists(dir.file("two callbacks")));
  EXPECT_EQ(outcome_code(behind), 0);
  EXPECT_EQ(outcome_code(handle.read(memory.bytes(), file)), 0);
}

TENSORFERRY_ON_EVERY_ENGINE(ForkMemory);

}  // namespace
}  // namespace tensorferry::handle
