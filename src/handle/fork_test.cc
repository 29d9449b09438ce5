// fork(): a handle stays with the parent, which goes on using it; the child opens its own.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "handle/handle_fixture.h"
#include "handle/ledger.h"
#include "handle/trace.h"
#include "handle/transfer.h"
#include "support/child.h"

namespace tensorferry::handle {
namespace {

class Fork : public HandleTest {};

// Returns nothing if the call throws an Error with this code, else a complaint.
template <class Call>
std::string expect_code(const char* what, int code, Call call) {
  const Error error = error_of(call);
  if (error.code() == code && !error.hint().empty()) return {};
  return std::string(what) + " gave \"" + error.what() + "\"; ";
}

TEST_P(Fork, in_the_child_every_use_of_the_handle_is_an_error) {
  const std::string path = make_file("data", 4 * MiB, 1);
  const File file = File::open(path, Access::read_write);
  Memory memory(4 * MiB);
  const auto small = memory.bytes().first(KiB);
  std::optional<Handle> automatic(std::in_place);  // no crew was ever started
  std::optional<Handle> chosen(std::in_place, options());
  chosen->read(memory.bytes(), file).wait();
  for (std::optional<Handle>* handle : {&automatic, &chosen}) {
    const auto result = support::run_in_child([&] {
      Handle& one = **handle;
      std::string said;
      said += expect_code("read", ECHILD, [&] { (void)one.read(memory.bytes(), file); });
      said += expect_code("read by path", ECHILD, [&] { (void)one.read(small, path); });
      said += expect_code("write", ECHILD, [&] { (void)one.write(small, file); });
      said += expect_code("read_now", ECHILD, [&] { one.read_now(small, file); });
      said += expect_code("write_now", ECHILD, [&] { one.write_now(small, file); });
      said += expect_code("large read_now", ECHILD, [&] { one.read_now(memory.bytes(), file); });
      said += expect_code("sync", ECHILD, [&] { (void)one.sync(file); });
      said += expect_code("read_many", ECHILD, [&] { (void)one.read_many({}); });
      said += expect_code("write_many", ECHILD, [&] { (void)one.write_many({}); });
      said += expect_code("engine", ECHILD, [&] { (void)one.engine(); });
      said += expect_code("engine_reason", ECHILD, [&] { (void)one.engine_reason(); });
      (void)one.stats();
      (void)one.options();
      handle->reset();
      return said;
    });
    EXPECT_TRUE(result.passed()) << result;
    (*handle)->read(memory.bytes(), file).wait();
    EXPECT_EQ(support::pattern_fault(memory.bytes(), 0, 1), "") << "the parent goes on";
  }
}

TEST_P(Fork, in_the_child_the_parents_operations_can_be_asked_but_not_waited_for) {
  const std::string path = make_file("data", KiB, 1);
  Gate gate;
  Handle handle = gate.open_handle({});
  Memory memory(2 * KiB);
  const Operation ended = handle.read(memory.bytes().first(KiB), path);
  ASSERT_TRUE(gate.holds(1));
  gate.let_pass(1);
  ASSERT_EQ(outcome_code(ended), 0);
  const Operation running = handle.read(memory.bytes().last(KiB), path);
  ASSERT_TRUE(gate.holds(1));
  const auto result = support::run_in_child([&]() -> std::string {
    if (!ended.done() || running.done()) return "done() is wrong";
    ended.wait();
    running.cancel();
    if (running.error()) return "a cancellation took effect";
    return expect_code("wait", ECHILD, [&] { running.wait(); }) +
           expect_code("wait_for", ECHILD, [&] { (void)running.wait_for(hang_limit); });
  });
  EXPECT_TRUE(result.passed()) << result;
  gate.open();
  EXPECT_EQ(outcome_code(running), 0);
}

TEST_P(Fork, the_child_works_with_a_handle_of_its_own) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const std::string path = make_file("data", 4 * MiB, 1);
  const File file = File::open(path, Access::read);
  PinnedBuffer pinned(4 * MiB);
  Handle parents(options());
  parents.read(pinned.bytes(), file).wait();
  const auto result = support::run_in_child([&]() -> std::string {
    Handle own(options());
    PinnedBuffer locked(4 * MiB);
    own.read(locked.bytes(), file).wait();
    Memory memory(MiB, 1);
    own.read(memory.bytes(), path, 5).wait();
    own.read_now(memory.bytes().first(100), file, 5);
    return support::pattern_fault(locked.bytes(), 0, 1) +
           support::pattern_fault(memory.bytes(), 5, 1);
  });
  EXPECT_TRUE(result.passed()) << result;
  EXPECT_EQ(support::pattern_fault(pinned.bytes(), 0, 1), "");
  parents.read(pinned.bytes(), file).wait();
  EXPECT_EQ(support::pattern_fault(pinned.bytes(), 0, 1), "");
}

TEST_P(Fork, forks_in_the_middle_of_everything_disturb_nobody) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const std::string path = make_file("data", 8 * MiB, 1);
  const File file = File::open(path, Access::read);
  Handle handle({.engine = GetParam(), .block_bytes = 64 * KiB, .workers = 2});
  Users users(3, [&](std::size_t user) {
    return [&handle, &file, user, ordinary = Memory(8 * MiB, user)]() mutable -> std::string {
      PinnedBuffer pinned(user == 1 ? 8 * MiB : 1);
      const auto memory = user == 1 ? pinned.bytes() : ordinary.bytes();
      if (const auto error = outcome(handle.read(memory, file))) return error->what();
      return support::pattern_fault(memory, 0, 1);
    };
  });
  for (int i = 0; i < 20; ++i) {
    const auto result = support::run_in_child([&]() -> std::string {
      std::string said = expect_code("read", ECHILD, [&] { (void)handle.read({}, file); });
      Handle own(options());
      PinnedBuffer memory(8 * MiB);
      own.read(memory.bytes(), file).wait();
      return said + support::pattern_fault(memory.bytes(), 0, 1);
    });
    ASSERT_TRUE(result.passed()) << "round " << i << ": " << result;
  }
  EXPECT_EQ(users.end(), "");
}

// --- Locks: another thread of the parent may hold any of them at the moment of the fork ----------

// A child that hangs has found a lock held.
constexpr std::chrono::seconds child_limit{20};

// Asks everything that a child may ask of finished operations and of handles. Returns a complaint.
std::string asked(Handle& handle, const Operation& ended, const Operation& failed) {
  if (handle.stats().operations < 2) return "the figures are not those of the parent";
  if (ended.error() || !failed.error()) return "error() is wrong";
  const Operation::Timing timing = ended.timing();
  if (timing.finished < timing.started || timing.started < timing.queued) return "timing()";
  ended.wait();
  if (error_of([&] { failed.wait(); }).code() != ENODATA) return "the error is another one";
  bool told = false;
  ended.when_done([&told] { told = true; });
  failed.cancel();
  return told && ended.bytes() == KiB ? "" : "when_done() or bytes()";
}

TEST_P(Fork, a_child_can_ask_what_other_threads_were_asking) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const File file = File::open(make_file("data", KiB, 1), Access::read);
  std::optional<Handle> handle(std::in_place, options());
  Memory memory(2 * KiB);
  const Operation ended = handle->read(memory.bytes().first(KiB), file);
  const Operation failed = handle->read(memory.bytes(), file);
  ASSERT_EQ(outcome_code(ended), 0);
  ASSERT_EQ(outcome_code(failed), ENODATA);
  std::atomic<bool> over{false};
  std::vector<std::thread> busy;
  const auto keep_asking = [&](auto question) {
    busy.emplace_back([&over, question] {
      while (!over) question();
    });
  };
  keep_asking([&] { (void)failed.error(); });
  keep_asking([&] { (void)ended.timing(); });
  keep_asking([&] { (void)handle->stats(); });
  std::string complaint;
  for (int round = 0; round < 40 && complaint.empty(); ++round) {
    const auto child = support::run_in_child(
        [&]() -> std::string {
          std::string said = asked(*handle, ended, failed);
          handle.reset();
          Handle own(options());
          (void)own.stats();
          return said;
        },
        child_limit);
    if (!child.passed()) complaint = ::testing::PrintToString(child);
  }
  over = true;
  for (std::thread& thread : busy) thread.join();
  EXPECT_EQ(complaint, "");
}

TEST_P(Fork, a_child_can_end_what_other_threads_were_using) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const File file = File::open(make_file("data", KiB, 1), Access::read);
  std::atomic<bool> over{false};
  std::optional<Handle> handle(std::in_place, options());
  std::vector<std::thread> busy;
  for (int user = 0; user < 3; ++user) {
    busy.emplace_back([&, user] {
      Memory memory(KiB, static_cast<std::size_t>(user));
      while (!over) {
        handle->read_now(memory.bytes(), file);
        const Operation operation = handle->read(memory.bytes(), file);
        operation.when_done([] {});
        operation.wait();
      }
    });
  }
  std::string complaint;
  for (int round = 0; round < 50 && complaint.empty(); ++round) {
    Memory memory(KiB);
    std::optional<Operation> operation = handle->read(memory.bytes(), file);
    const auto child = support::run_in_child(
        [&]() -> std::string {
          operation->cancel();
          if (!operation->done()) {
            const int code = error_of([&] { operation->when_done([] {}); }).code();
            if (code != ECHILD) return "when_done() gave " + std::to_string(code);
          }
          operation.reset();
          handle.reset();
          return {};
        },
        child_limit);
    if (!child.passed()) complaint = ::testing::PrintToString(child);
    operation->wait();
  }
  over = true;
  for (std::thread& thread : busy) thread.join();
  EXPECT_EQ(complaint, "");
}

TEST(ForkedLedger, can_be_read_whatever_other_threads_note) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  Ledger ledger;
  for (int i = 0; i < 20; ++i) ledger.note_fallback("reason " + std::to_string(i));
  std::atomic<bool> over{false};
  std::thread noting([&] {
    while (!over) ledger.note_fallback("reason 19");
  });
  std::string complaint;
  for (int round = 0; round < 100 && complaint.empty(); ++round) {
    const auto child = support::run_in_child(
        [&]() -> std::string {
          const auto reasons = ledger.stats().fallback_reasons;
          return reasons.size() == 20 && reasons.back() == "reason 19" ? "" : "others";
        },
        child_limit);
    if (!child.passed()) complaint = ::testing::PrintToString(child);
  }
  over = true;
  noting.join();
  EXPECT_EQ(complaint, "");
}

TEST(ForkedTrace, can_be_asked_for_problems_whatever_other_threads_ask) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  std::atomic<bool> over{false};
  std::thread asking([&over] {
    while (!over) (void)Trace::problem();
  });
  std::string complaint;
  for (int round = 0; round < 100 && complaint.empty(); ++round) {
    const auto child = support::run_in_child([] { return Trace::problem(); }, child_limit);
    if (!child.passed()) complaint = ::testing::PrintToString(child);
  }
  over = true;
  asking.join();
  EXPECT_EQ(complaint, "");
}

TEST(ForkedTransfer, can_end_in_a_child_although_a_thread_of_the_parent_waits_for_it) {
  auto transfer = std::make_shared<Transfer>(Direction::read, "read", std::make_shared<Ledger>());
  std::atomic<pid_t> waiter{0};
  std::thread waiting([&waiter, &all = *transfer] {
    waiter = ::gettid();
    (void)all.wait_until(std::nullopt);
  });
  // /proc says that it sleeps in the wait.
  const auto asleep = [&waiter] {
    std::ifstream stat("/proc/self/task/" + std::to_string(waiter) + "/stat");
    std::string line;
    std::getline(stat, line);
    return line.find(") S ") != std::string::npos;
  };
  while (waiter == 0 || !asleep()) std::this_thread::yield();
  const auto child = support::run_in_child(
      [&]() -> std::string {
        transfer.reset();
        return {};
      },
      child_limit);
  EXPECT_TRUE(child.passed()) << child;
  transfer->complete();
  waiting.join();
}

TENSORFERRY_ON_EVERY_ENGINE(Fork);

}  // namespace
}  // namespace tensorferry::handle
