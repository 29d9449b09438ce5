// Classes and rates: who goes first, what is held back, and that nothing starves or gets stuck.
#include "tensorferry/priority.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "handle/governor.h"
#include "handle/handle_fixture.h"
#include "support/child.h"
#include "support/faulty_system.h"

namespace tensorferry::handle {
namespace {

using namespace std::chrono_literals;
using Kind = Gate::Event::Kind;
using Clock = Governor::Clock;

constexpr auto urgent = Priority::urgent;
constexpr auto normal = Priority::normal;
constexpr auto background = Priority::background;

Clock::time_point at(std::chrono::nanoseconds time) { return Clock::time_point(1h + time); }

// --- Names and scopes --------------------------------------------------------------------------

TEST(Priorities, have_names) {
  for (const Priority one : {urgent, normal, background}) {
    EXPECT_EQ(parse_priority(to_string(one)), one);
  }
  EXPECT_EQ(to_string(background), "background");
  const Error wrong = error_of([] { (void)parse_priority("high"); });
  EXPECT_EQ(wrong.code(), EINVAL);
  EXPECT_NE(std::string(wrong.what()).find("urgent, normal or background"), std::string::npos);
}

TEST(Priorities, scopes_nest_and_belong_to_a_thread) {
  EXPECT_EQ(scope_priority(), std::nullopt);
  const PriorityScope outer(background);
  {
    const PriorityScope inner(urgent);
    EXPECT_EQ(scope_priority(), urgent);
    std::thread([] { EXPECT_EQ(scope_priority(), std::nullopt); }).join();
  }
  EXPECT_EQ(scope_priority(), background);
}

// --- Rates -------------------------------------------------------------------------------------

TEST(Rates, are_held_on_average_and_exactly) {
  constexpr std::uint64_t per_second = 200'000'000;
  Rate rate(per_second);
  auto now = at(0s);
  std::uint64_t bytes = 0;
  while (now < at(10s)) {
    const auto due = rate.due_in(now);
    if (due > 0ns) {
      now += due + 50us;  // a worker wakes late
      continue;
    }
    rate.charge(MiB, now);
    bytes += MiB;
  }
  EXPECT_NEAR(static_cast<double>(bytes), 10.0 * per_second, 0.01 * 10.0 * per_second);
}

TEST(Rates, do_not_save_up_what_nobody_used) {
  Rate rate(MiB);
  rate.charge(MiB, at(0s));
  rate.charge(0, at(1h));
  EXPECT_EQ(rate.due_in(at(1h)), 0ns);
  rate.charge(10 * MiB, at(1h));
  EXPECT_GT(rate.due_in(at(1h)), 9s);
}

TEST(Rates, end_at_once_when_they_are_taken_back) {
  Rate rate(1);
  rate.charge(MiB, at(0s));
  EXPECT_GT(rate.due_in(at(0s)), 1h);
  rate.set(0);
  EXPECT_EQ(rate.due_in(at(0s)), 0ns);
}

// --- The governor ------------------------------------------------------------------------------

// Urgent reads of 64 KiB one after the other that take so long, beside the background.
Clock::time_point reads(Governor& governor, Clock::time_point from, int count,
                        std::chrono::nanoseconds took) {
  for (int i = 0; i < count; ++i) {
    governor.begins(urgent, from);
    governor.ended(urgent, Direction::read, 64 * KiB, from, from + took);
    from += took;
  }
  return from;
}

TEST(Governors, leave_the_background_alone_while_nobody_else_uses_the_drive) {
  Governor governor;
  governor.background_begins(1024 * MiB);
  EXPECT_TRUE(governor.admits(at(0s)));
  governor.begins(background, at(0s));
  EXPECT_TRUE(governor.admits(at(0s)));
  for (const Priority other : {urgent, normal}) {
    governor.begins(other, at(1s));
    EXPECT_FALSE(governor.admits(at(1s))) << to_string(other);
    EXPECT_TRUE(governor.admits(at(5s))) << "long after";
    governor.forget();
    governor.background_begins(1024 * MiB);
  }
}

TEST(Governors, adapt_the_background_to_what_urgent_operations_suffer) {
  Governor governor;
  governor.background_begins(MiB);
  Clock::time_point now = reads(governor, at(0s), 1000, 100us);
  const std::uint64_t undisturbed = governor.limit(now);
  now = reads(governor, now, 1, 2ms);
  EXPECT_LT(governor.limit(now), undisturbed);
  now = reads(governor, now, 100, 2ms);
  EXPECT_EQ(governor.limit(now), Governor::limit_min);
  now = reads(governor, now, 10'000, 150us);
  EXPECT_EQ(governor.limit(now), Governor::limit_max);
}

TEST(Governors, do_not_blame_the_background_for_what_happens_without_it) {
  Governor governor;
  Clock::time_point now = reads(governor, at(0s), 10, 100us);
  const std::uint64_t before = governor.limit(now);
  now = reads(governor, now, 10, 5ms);
  EXPECT_EQ(governor.limit(now), before);
}

TEST(Governors, are_one_for_each_drive) {
  EXPECT_EQ(&Governor::of("1:1"), &Governor::of("1:1"));
  EXPECT_NE(&Governor::of("1:1"), &Governor::of("1:2"));
}

TEST(Governors, begin_anew_in_a_child_of_fork) {
  Governor& governor = Governor::of("forked");
  governor.background_begins(MiB);
  const auto child = support::run_in_child(
      [&] { return governor.under_way() == 0 ? std::string() : "it has the parent's bytes"; });
  EXPECT_TRUE(child.passed()) << child;
  EXPECT_EQ(governor.under_way(), MiB);
  governor.background_ends(MiB);
}

// --- The order of blocks -----------------------------------------------------------------------

class Classes : public GateTest {
 protected:
  struct Asked {
    char letter;
    std::size_t blocks;
    std::optional<Priority> priority;
  };

  // Fills the one place in the queue, starts the operations, calls then(operations), lets all pass
  // and returns the letters in the order in which their blocks were submitted.
  template <class Then>
  std::string submitted(const HandleOptions& options, const std::vector<Asked>& asked, Then then) {
    Gate own;
    Handle handle = own.open_handle(options);
    Memory first(block);
    const Operation filling = handle.read(first.bytes(), *file, 0, {}, normal);
    EXPECT_TRUE(own.holds(1));
    std::vector<Memory> memories;
    std::vector<Operation> operations;
    for (const Asked& one : asked) {
      memories.emplace_back(one.blocks * block);
      operations.push_back(handle.read(memories.back().bytes(), *file, 0, {}, one.priority));
    }
    then(operations);
    own.open();
    const PriorityScope raises_nothing(background);
    for (const Operation& operation : operations) EXPECT_EQ(outcome_code(operation), 0);
    std::string order;
    for (const auto& [kind, request] : own.events()) {
      if (kind != Kind::submitted) continue;
      for (std::size_t i = 0; i < asked.size(); ++i) {
        const auto memory = memories[i].bytes();
        if (request.memory >= memory.data() && request.memory < memory.data() + memory.size()) {
          order += asked[i].letter;
        }
      }
    }
    return order;
  }
  std::string submitted(const std::vector<Asked>& asked) {
    return submitted(options(1), asked, [](const auto&) {});
  }
};

TEST_F(Classes, urgent_goes_before_normal_before_background) {
  EXPECT_EQ(submitted({{'b', 4, background}, {'n', 4, normal}, {'u', 4, urgent}}), "uuuunnnnbbbb");
}

TEST_F(Classes, no_class_starves) {
  const std::string order = submitted({{'b', 2, background}, {'n', 2, normal}, {'u', 60, urgent}});
  const std::string turn = std::string(16, 'u') + "bn";
  EXPECT_EQ(order, turn + turn + std::string(60 - 32, 'u'));
}

TEST_F(Classes, operations_without_one_take_that_of_the_scope_and_then_of_the_handle) {
  HandleOptions low = options(1);
  low.priority = background;
  EXPECT_EQ(submitted(low, {{'h', 4, {}}, {'n', 4, normal}}, [](const auto&) {}), "nnnnhhhh");
  const PriorityScope scope(urgent);
  EXPECT_EQ(submitted(low, {{'n', 4, normal}, {'s', 4, {}}}, [](const auto&) {}), "ssssnnnn");
}

TEST_F(Classes, who_waits_raises_what_he_waits_for) {
  const auto look_at_last = [](const std::vector<Operation>& operations) {
    EXPECT_FALSE(operations.back().wait_for(0ns));
  };
  const std::vector<Asked> two = {{'a', 4, background}, {'b', 4, background}};
  EXPECT_EQ(submitted(options(1), two, look_at_last), "bbbbaaaa") << "raised to normal";
  const PriorityScope scope(urgent);
  const std::vector<Asked> three = {{'n', 4, normal}, {'b', 4, background}};
  EXPECT_EQ(submitted(options(1), three, look_at_last), "bbbbnnnn") << "raised to urgent";
}

TEST_F(Classes, a_waiter_in_the_background_raises_nothing) {
  const auto look_at_last = [](const std::vector<Operation>& operations) {
    const PriorityScope scope(background);
    EXPECT_FALSE(operations.back().wait_for(0ns));
  };
  const std::vector<Asked> two = {{'a', 4, background}, {'b', 4, background}};
  EXPECT_EQ(submitted(options(1), two, look_at_last), "aaaabbbb");
}

// --- What is held back -------------------------------------------------------------------------

TEST_F(Classes, the_background_of_one_handle_gives_way_to_urgent_reads_of_another) {
  constexpr std::size_t large = MiB;
  constexpr unsigned depth = 128;
  Gate low_gate;
  low_gate.pretend = true;
  HandleOptions low_options{.block_bytes = large, .queue_depth = depth};
  low_options.priority = background;
  Handle low = low_gate.open_handle(low_options);
  Handle high = gate.open_handle(options());
  gate.open();
  Memory memory(depth * large);
  const File target = File::open(dir.file("target"), Access::write);
  const auto read_urgently = [&] {
    Memory small(block);
    high.read(small.bytes(), *file, 0, {}, urgent).wait();
  };
  read_urgently();
  const std::jthread reader([&](const std::stop_token& over) {  // without an end
    while (!over.stop_requested()) {
      read_urgently();
      std::this_thread::sleep_for(1ms);
    }
  });
  const Operation write = low.write(memory.bytes(), target);
  EXPECT_TRUE(low_gate.holds(1));
  std::this_thread::sleep_for(20ms);
  EXPECT_LE(low_gate.held() * large, Governor::limit_max);
  low_gate.open();
  EXPECT_EQ(outcome_code(write), 0) << "it goes on all the same";
}

TEST_F(Classes, the_background_has_the_drive_for_itself_if_nobody_else_uses_it) {
  Gate own;
  Handle handle = own.open_handle(options());
  Memory memory(64 * block);
  const Operation read = handle.read(memory.bytes(), *file, 0, {}, background);
  EXPECT_TRUE(own.holds(24)) << "of 32, the rest is for others";
  own.open();
  EXPECT_EQ(outcome_code(read), 0);
}

TEST_F(Classes, some_slots_are_for_urgent_operations_alone) {
  constexpr std::size_t large = 256 * KiB;
  use_classes();  // before that, normal operations may take all slots
  gate.pretend = true;
  HandleOptions few{.block_bytes = large, .queue_depth = 64};
  few.slot_bytes = 4 * MiB;
  Handle handle = gate.open_handle(few);
  const File target = File::open(dir.file("target"), Access::write);
  Memory memory(32 * large);
  const auto odd = memory.bytes().subspan(1, 31 * large);  // goes through slots
  const Operation usual = handle.write(odd, target, 0, Durability::none, {}, normal);
  ASSERT_TRUE(gate.holds(1));
  std::this_thread::sleep_for(50ms);
  const std::size_t held = gate.held();
  ASSERT_LT(held, 31U) << "all had slots";
  const Operation first =
      handle.write(odd.first(large), target, 31 * large, Durability::none, {}, urgent);
  EXPECT_TRUE(gate.holds(held + 1));
  gate.open();
  EXPECT_EQ(outcome_code(usual), 0);
  EXPECT_EQ(outcome_code(first), 0);
}

TEST_F(Classes, small_operations_in_the_background_are_queued) {
  Handle handle;
  Memory memory(block);
  handle.read_now(memory.bytes(), *file, 0, {}, background);
  handle.read(memory.bytes(), *file, 0, {}, background).wait();
  handle.write_now(memory.bytes(), *file, 0, Durability::data, {}, background);
  EXPECT_EQ(handle.stats().inline_operations, 0U);
  EXPECT_EQ(handle.stats().lane_operations, 0U);
  handle.read_now(memory.bytes(), *file, 0, {}, urgent);
  EXPECT_EQ(handle.stats().inline_operations, 1U);
}

TEST_F(Classes, the_background_is_not_blamed_for_what_a_sync_takes) {
  support::FaultySystem system;
  Seams seams;
  seams.system = &system;
  Handle handle = make_handle({.engine = EngineKind::threads}, seams);
  const File target = files::open(system, dir.file("target"), Access::write);
  Governor& governor = Governor::of(device_of(dir.path()).number);
  Memory memory(block);
  const auto write = [&] {
    handle.write_now(memory.bytes(), target, 0, Durability::data, {}, urgent);
  };
  for (int i = 0; i < 5; ++i) write();
  system.add(
      {.call = support::Call::fdatasync, .times = support::SystemRule::always, .delay = 100ms});
  governor.background_begins(MiB);
  const std::uint64_t before = governor.limit(Clock::now());
  for (int i = 0; i < 3; ++i) write();
  EXPECT_EQ(governor.limit(Clock::now()), before);
  governor.background_ends(MiB);
  EXPECT_EQ(handle.stats().inline_operations, 8U);
}

// --- Rates of handles and classes --------------------------------------------------------------

// Sets the rate of the background and takes it back.
class BackgroundRate {
 public:
  explicit BackgroundRate(std::uint64_t bytes_per_second) {
    set_rate(background, bytes_per_second);
  }
  ~BackgroundRate() { set_rate(background, 0); }
  BackgroundRate(const BackgroundRate&) = delete;
  BackgroundRate& operator=(const BackgroundRate&) = delete;
};

TEST_F(Classes, nobody_is_faster_than_the_rate) {
  constexpr std::uint64_t per_second = 64 * 64 * block;  // 16 MiB
  Memory memory(64 * block);
  const auto seconds_of_ten = [&](Handle& first, Handle& second, Priority priority) {
    const auto begin = Clock::now();
    for (int i = 0; i < 5; ++i) {
      first.read_now(memory.bytes(), *file, 0, {}, priority);
      second.read_now(memory.bytes(), *file, 0, {}, priority);
    }
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  constexpr double least = 9.0 * 64 * block / per_second - 0.03;  // the last one owes its time
  {
    HandleOptions limited = options();
    limited.rate = per_second;
    Handle handle(limited);
    EXPECT_GE(seconds_of_ten(handle, handle, normal), least);
  }
  const BackgroundRate rate(per_second);
  EXPECT_EQ(tensorferry::rate(background), per_second);
  Handle first(options());
  Handle second(options());
  EXPECT_GE(seconds_of_ten(first, second, background), least) << "of two handles together";
}

TEST_F(Classes, what_a_rate_holds_back_keeps_deadlines_and_can_be_cancelled) {
  HandleOptions slow = options();
  slow.rate = 1;
  Handle handle = gate.open_handle(slow);
  gate.open();
  Memory memory(4 * block);
  const Operation read = handle.read(memory.bytes(), *file);
  EXPECT_FALSE(read.wait_for(10ms));
  read.cancel();
  EXPECT_EQ(outcome_code(read), ECANCELED);
}

TEST_F(Classes, a_handle_that_closes_finishes_its_writes_at_once_whatever_the_rate) {
  HandleOptions slow = options();
  slow.rate = 1;
  slow.close_limit_seconds = 3600;
  const BackgroundRate rate(1);
  Handle handle(slow);
  const std::string target = dir.file("target");
  const auto content = support::pattern(64 * block, 0, 7);
  const Operation write =
      handle.write(std::as_bytes(std::span(content)), target, 0, Durability::data, {}, background);
  EXPECT_FALSE(write.wait_for(10ms));
  handle.close();
  EXPECT_EQ(outcome_code(write), 0);
  EXPECT_EQ(write.bytes(), 64 * block);
}

TEST_F(Classes, a_rate_that_is_taken_back_lets_go_of_what_it_held) {
  auto rate = std::make_unique<BackgroundRate>(1);
  Handle handle(options());
  Memory memory(64 * block);
  const Operation read = handle.read(memory.bytes(), *file, 0, {}, background);
  const PriorityScope raises_nothing(background);
  EXPECT_FALSE(read.wait_for(10ms));
  rate.reset();
  EXPECT_EQ(outcome_code(read), 0);
}

// --- All at once -------------------------------------------------------------------------------

TEST_F(Classes, threads_of_all_classes_get_the_right_bytes) {
  const BackgroundRate rate(512 * MiB);
  Handle first({.block_bytes = block, .queue_depth = 8, .workers = 2});
  Handle second({.priority = background});
  std::atomic<std::uint64_t> rounds{0};
  Users users(6, [&](std::size_t user) {
    return [&, dice = Dice(user)]() mutable -> std::string {
      const auto priority = static_cast<Priority>(dice.below(3));
      const std::size_t begin = dice.below(60);
      const std::size_t blocks = dice.between(1, 64 - begin);
      Memory memory(blocks * block + 1);
      const auto bytes = memory.bytes().subspan(dice.below(2), blocks * block);
      Handle& handle = dice.coin() ? first : second;
      const Operation read = handle.read(bytes, *file, begin * block, {}, priority);
      std::optional<PriorityScope> scope;
      if (dice.coin()) scope.emplace(static_cast<Priority>(dice.below(3)));
      const bool cancelled = dice.below(8) == 0;
      if (cancelled) read.cancel();
      const int code = outcome_code(read);
      ++rounds;
      if (code == ECANCELED && cancelled) return "";
      return code != 0 ? "failed" : support::pattern_fault(bytes, begin * block, 1);
    };
  });
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(users.end(), "");
  EXPECT_GT(rounds, 10U);
  first.close();
  second.close();
  EXPECT_EQ(Governor::of(device_of(path).number).under_way(), 0U);
}

}  // namespace
}  // namespace tensorferry::handle
