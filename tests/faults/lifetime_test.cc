// F10: handles end, processes fork and processes exit with I/O in flight, from one thread and from
// many. Everything ends in bounded time, and the kernel has let go of every buffer.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include "rig.h"
#include "support/child.h"
#include "support/sanitizers.h"

namespace tensorferry::faults {
namespace {

std::atomic<bool> leaving_in_mid_flight{false};

}  // namespace
}  // namespace tensorferry::faults

// LeakSanitizer asks this function. A process that exits with I/O in flight leaves memory behind,
// which is no leak.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off() {  // NOLINT
  return tensorferry::faults::leaving_in_mid_flight ? 1 : 0;
}

namespace tensorferry::faults {
namespace {

using support::pattern;
using support::read_whole_file;
using support::run_in_child;
using support::write_whole_file;

constexpr std::uint32_t seed = 91;
constexpr std::size_t lane_bytes = 8 * MiB;
constexpr std::size_t lane_count = 4;
constexpr std::size_t file_bytes = lane_count * lane_bytes;
constexpr std::size_t operation_bytes = 512 * KiB + 100;
constexpr std::size_t operation_count = 24;

int runs() { return soaking() ? 200 : 20; }

bool cancelled_or_well(const std::optional<Error>& error) {
  return !error || error->code() == ECANCELED;
}

class Lifetime : public ::testing::TestWithParam<EngineKind> {
 protected:
  Lifetime() { write_whole_file(path_, pattern(file_bytes, 0, seed)); }

  static HandleOptions options() {
    return {.engine = GetParam(), .block_bytes = 128 * KiB, .queue_depth = 8, .workers = 2};
  }

  support::TempDir dir_;
  std::string path_ = dir_.file("data");
};

INSTANTIATE_TEST_SUITE_P(Engines, Lifetime, all_engines, engine_name);

// Many reads and writes of the same bytes: the content of the file never changes. Writes do not
// overlap if each user of the file has another lane.
class Traffic {
 public:
  explicit Traffic(std::size_t lane) : lane_(lane % lane_count) {
    for (std::size_t i = 0; i < operation_count; ++i) {
      buffers_.emplace_back(operation_bytes, i % 3 * 8);
      if (i % 3 == 2) buffers_.back().fill(offset(i), seed);
    }
  }

  void start(Handle& handle, const File& file) {
    operations_.clear();
    for (std::size_t i = 0; i < operation_count; ++i) {
      operations_.push_back(i % 3 == 2
                                ? handle.write(buffers_[i].bytes(), file, offset(i),
                                               i % 2 == 0 ? Durability::none : Durability::full)
                                : handle.read(buffers_[i].bytes(), file, offset(i)));
    }
  }

  // Empty if each operation is done, with the right bytes or cancelled.
  [[nodiscard]] std::string ended_fault() {
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      if (!operations_[i].done()) return "operation " + std::to_string(i) + " is not done";
      if (const auto error = operations_[i].error()) {
        if (error->code() != ECANCELED) return error->what();
        continue;
      }
      if (auto fault = buffers_[i].fault(offset(i), seed); !fault.empty()) return fault;
    }
    return {};
  }

  // Empty if every operation completes with the right bytes.
  [[nodiscard]] std::string complete_fault() {
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      if (const auto error = outcome(operations_[i])) return error->what();
      if (auto fault = buffers_[i].fault(offset(i), seed); !fault.empty()) return fault;
    }
    return {};
  }

  // Empty if nothing writes to the buffers for a while. Call it when all operations have ended.
  [[nodiscard]] std::string late_write_fault(std::chrono::milliseconds wait) {
    for (const GuardedMemory& buffer : buffers_) buffer.fill(1, 7);
    std::this_thread::sleep_for(wait);
    for (const GuardedMemory& buffer : buffers_) {
      if (!buffer.fault(1, 7).empty()) return "a buffer was written to after the end";
    }
    return {};
  }

  [[nodiscard]] std::vector<Operation>& operations() { return operations_; }

 private:
  [[nodiscard]] std::uint64_t offset(std::size_t i) const {
    return lane_ * lane_bytes + i % 8 * MiB + i % 2 * 7;
  }

  std::size_t lane_;
  std::vector<GuardedMemory> buffers_;
  std::vector<Operation> operations_;
};

// ---- destroy ------------------------------------------------------------------------------------

TEST_P(Lifetime, a_handle_destroyed_in_mid_flight_ends_every_operation) {
  const auto child = run_in_child(
      [&]() -> std::string {
        std::mt19937_64 dice(1);
        for (int run = 0; run < runs(); ++run) {
          Traffic traffic(static_cast<std::size_t>(run));
          {
            Handle handle(options());
            traffic.start(handle, File::open(path_, Access::read_write));
            std::this_thread::sleep_for(std::chrono::microseconds(dice() % 3000));
          }
          if (auto fault = traffic.ended_fault(); !fault.empty()) return fault;
          const auto fault = traffic.late_write_fault(std::chrono::milliseconds(2));
          if (!fault.empty()) return fault;
        }
        return pattern_fault(read_whole_file(path_), 0, seed);
      },
      std::chrono::seconds(300));
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(Lifetime, handles_destroyed_by_many_threads_at_once_end_every_operation) {
  const auto child = run_in_child(
      [&]() -> std::string {
        std::atomic<int> bad{0};
        std::vector<std::thread> threads;
        for (std::size_t t = 0; t < 4; ++t) {
          threads.emplace_back([&, t] {
            for (int run = 0; run < runs(); ++run) {
              Traffic traffic(t);
              {
                Handle handle(options());
                traffic.start(handle, File::open(path_, Access::read_write));
              }
              if (!traffic.ended_fault().empty()) ++bad;
            }
          });
        }
        for (std::thread& thread : threads) thread.join();
        if (bad > 0) return std::to_string(bad) + " handles left operations behind";
        return pattern_fault(read_whole_file(path_), 0, seed);
      },
      std::chrono::seconds(300));
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(Lifetime, threads_that_wait_while_a_handle_is_destroyed_are_let_go) {
  const auto child = run_in_child(
      [&]() -> std::string {
        for (int run = 0; run < runs(); ++run) {
          Traffic traffic(static_cast<std::size_t>(run));
          auto handle = std::make_unique<Handle>(options());
          traffic.start(*handle, File::open(path_, Access::read_write));
          std::vector<std::thread> waiters;
          for (Operation& operation : traffic.operations()) {
            waiters.emplace_back([operation] { (void)outcome(operation); });
          }
          handle.reset();
          for (std::thread& waiter : waiters) waiter.join();
          if (auto fault = traffic.ended_fault(); !fault.empty()) return fault;
        }
        return {};
      },
      std::chrono::seconds(300));
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(Lifetime, operations_outlive_their_handle_and_their_file) {
  std::optional<Operation> kept;
  GuardedMemory buffer(operation_bytes);
  {
    Handle handle(options());
    kept = handle.read(buffer.bytes(), path_, 0);
    ASSERT_ENDED_WELL(*kept);
  }
  EXPECT_TRUE(kept->done());
  EXPECT_FALSE(kept->error().has_value());
  EXPECT_EQ(kept->bytes(), operation_bytes);
  EXPECT_EQ(kept->engine(), to_string(GetParam()));
  EXPECT_NE(kept->engine_reason(), "");
  EXPECT_LE(kept->timing().queued, kept->timing().finished);
  kept->cancel();
}

// ---- cancel -------------------------------------------------------------------------------------

TEST_P(Lifetime, cancelled_operations_end_and_let_go_of_their_buffers) {
  Handle handle(options());
  const File file = File::open(path_, Access::read_write);
  std::mt19937_64 dice(2);
  for (int run = 0; run < 3 * runs(); ++run) {
    Traffic traffic(static_cast<std::size_t>(run));
    traffic.start(handle, file);
    std::this_thread::sleep_for(std::chrono::microseconds(dice() % 2000));
    for (Operation& operation : traffic.operations()) operation.cancel();
    for (Operation& operation : traffic.operations()) {
      const auto error = outcome(operation);
      ASSERT_TRUE(cancelled_or_well(error)) << error->what();
    }
    ASSERT_EQ(traffic.ended_fault(), "");
    ASSERT_EQ(traffic.late_write_fault(std::chrono::milliseconds(1)), "");
  }
  EXPECT_EQ(pattern_fault(read_whole_file(path_), 0, seed), "");
  const Stats stats = handle.stats();
  EXPECT_EQ(stats.operations, 3U * static_cast<unsigned>(runs()) * operation_count)
      << "every operation completes exactly once";
  EXPECT_GT(stats.cancelled_operations, 0U);
}

// Cancels around the change from moving bytes to making them durable.
TEST_P(Lifetime, an_operation_cancelled_while_it_becomes_durable_ends_exactly_once) {
  Rig rig({.engine = GetParam(), .block_bytes = 4096, .queue_depth = 4});
  rig.engine.judge = [](const engines::Request& request, std::uint64_t) -> support::Fault {
    // The sync itself costs nothing: the test is about the race.
    const bool write = request.kind == engines::RequestKind::write;
    return write ? support::Fault{} : support::Fault{support::Fault::Kind::pretend, 0, 0};
  };
  const File file = rig.open_file(path_);
  GuardedMemory buffer(4096);
  buffer.fill(0, seed);
  std::mt19937_64 dice(3);
  constexpr std::uint64_t rounds = 3000;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    const Operation operation = rig.handle.write(buffer.bytes(), file, 0, Durability::full);
    const auto end = Operation::Clock::now() + std::chrono::microseconds(dice() % 150);
    while (Operation::Clock::now() < end && !operation.done()) {
    }
    operation.cancel();
    const auto error = outcome(operation);
    ASSERT_TRUE(cancelled_or_well(error)) << "round " << round << ": " << error->what();
  }
  EXPECT_EQ(rig.handle.stats().operations, rounds) << "an operation completed twice, or never";
}

TEST_P(Lifetime, a_cancel_from_many_threads_ends_an_operation_once) {
  Handle handle(options());
  const File file = File::open(path_, Access::read);
  for (int run = 0; run < 3 * runs(); ++run) {
    GuardedMemory buffer(file_bytes);
    const Operation operation = handle.read(buffer.bytes(), file, 0);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back([&] { operation.cancel(); });
    const auto error = outcome(operation);
    for (std::thread& thread : threads) thread.join();
    ASSERT_TRUE(cancelled_or_well(error)) << error->what();
  }
  EXPECT_EQ(handle.stats().operations, 3U * static_cast<unsigned>(runs()));
}

// ---- fork ---------------------------------------------------------------------------------------

// Uses in the child everything that it inherits. Returns "" if all is well.
std::string inherited_fault(std::unique_ptr<Handle>& handle, Traffic& traffic, const File& file) {
  GuardedMemory buffer(operation_bytes);
  if (!thrown_by([&] { (void)handle->read(buffer.bytes(), file, 0); })) {
    return "the parent's handle took a read";
  }
  if (!thrown_by([&] { handle->write_now(buffer.bytes().first(4096), file, 0); })) {
    return "the parent's handle took an inline write";
  }
  if (!thrown_by([&] { (void)handle->sync(file); })) return "the parent's handle took a sync";
  for (Operation& operation : traffic.operations()) {
    operation.cancel();
    if (operation.done()) continue;
    if (!thrown_by([&] { operation.wait(); })) return "waited for the parent's operation";
  }
  (void)handle->stats();
  handle.reset();
  return {};
}

TEST_P(Lifetime, fork_with_io_in_flight_leaves_the_parent_whole_and_the_child_safe) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const auto child = run_in_child(
      [&]() -> std::string {
        for (int run = 0; run < runs(); ++run) {
          auto handle = std::make_unique<Handle>(options());
          const File file = File::open(path_, Access::read_write);
          Traffic traffic(static_cast<std::size_t>(run));
          traffic.start(*handle, file);
          const auto inner = run_in_child([&] { return inherited_fault(handle, traffic, file); },
                                          std::chrono::seconds(20));
          if (!inner.passed()) {
            return "child of run " + std::to_string(run) + (inner.hung ? " hung: " : ": ") +
                   inner.text + ", signal " + std::to_string(inner.signal);
          }
          if (auto fault = traffic.complete_fault(); !fault.empty()) return "parent: " + fault;
        }
        return pattern_fault(read_whole_file(path_), 0, seed);
      },
      std::chrono::seconds(300));
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(Lifetime, a_forked_child_opens_a_handle_of_its_own) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const auto child = run_in_child(
      [&]() -> std::string {
        for (int run = 0; run < runs(); ++run) {
          auto handle = std::make_unique<Handle>(options());
          const File file = File::open(path_, Access::read_write);
          Traffic traffic(static_cast<std::size_t>(run));
          traffic.start(*handle, file);
          const auto inner = run_in_child(
              [&]() -> std::string {
                Handle own(options());
                Traffic own_traffic(static_cast<std::size_t>(run) + 1);
                own_traffic.start(own, file);  // an inherited File works as any other
                if (auto fault = own_traffic.complete_fault(); !fault.empty()) return fault;
                PinnedBuffer pinned(1 * MiB);
                own.read(pinned.bytes(), File::open(path_, Access::read), 0).wait();
                return pattern_fault(pinned.bytes(), 0, seed);
              },
              std::chrono::seconds(30));
          if (!inner.passed()) {
            return "child of run " + std::to_string(run) + (inner.hung ? " hung: " : ": ") +
                   inner.text + ", signal " + std::to_string(inner.signal);
          }
          if (auto fault = traffic.complete_fault(); !fault.empty()) return "parent: " + fault;
        }
        return {};
      },
      std::chrono::seconds(300));
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(Lifetime, fork_while_many_threads_use_a_handle_leaves_the_child_safe) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  const auto child = run_in_child(
      [&]() -> std::string {
        auto handle = std::make_unique<Handle>(options());
        const File file = File::open(path_, Access::read_write);
        std::atomic<bool> stop{false};
        std::atomic<int> bad{0};
        std::vector<std::thread> threads;
        for (std::size_t t = 0; t < 3; ++t) {
          threads.emplace_back([&, t] {
            while (!stop) {
              Traffic traffic(t);
              traffic.start(*handle, file);
              PinnedBuffer pinned(64 * KiB);
              if (!traffic.complete_fault().empty()) ++bad;
            }
          });
        }
        std::string complaint;
        for (int run = 0; run < runs() && complaint.empty(); ++run) {
          Traffic traffic(3);
          traffic.start(*handle, file);
          const auto inner = run_in_child([&] { return inherited_fault(handle, traffic, file); },
                                          std::chrono::seconds(20));
          if (!inner.passed()) {
            complaint = "child of run " + std::to_string(run) + (inner.hung ? " hung: " : ": ") +
                        inner.text + ", signal " + std::to_string(inner.signal);
          }
          if (complaint.empty()) complaint = traffic.complete_fault();
        }
        stop = true;
        for (std::thread& thread : threads) thread.join();
        if (complaint.empty() && bad > 0) complaint = "the parent's operations were disturbed";
        return complaint;
      },
      std::chrono::seconds(300));
  EXPECT_TRUE(child.passed()) << child;
}

// ---- exit ---------------------------------------------------------------------------------------

enum class Keeping : std::uint8_t { leaked, as_static, used_by_threads };

// Starts I/O and calls exit(), as a program does that returns from main().
[[noreturn]] void exit_in_mid_flight(const HandleOptions& options, const std::string& path,
                                     Keeping keeping, int run) {
  leaving_in_mid_flight = true;
  static std::unique_ptr<Handle> kept_as_static;
  auto* traffic = new Traffic(3);
  auto handle = std::make_unique<Handle>(options);
  Handle* raw = handle.get();
  const File file = File::open(path, Access::read_write);
  traffic->start(*raw, file);
  if (keeping == Keeping::as_static) {
    kept_as_static = std::move(handle);
  } else {
    [[maybe_unused]] const Handle* const left_behind = handle.release();
  }
  if (keeping == Keeping::used_by_threads) {
    for (std::size_t t = 0; t < 3; ++t) {
      std::thread([raw, path, t] {
        for (;;) {
          // Leaked on purpose: the memory must outlast exit(), because the kernel may use it.
          auto* more = new Traffic(t);
          more->start(*raw, File::open(path, Access::read_write));
          (void)more->complete_fault();
          PinnedBuffer pinned(64 * KiB);
          delete more;
        }
      }).detach();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(run % 7));
  }
  std::exit(0);
}

class Exit : public ::testing::TestWithParam<std::tuple<EngineKind, Keeping>> {};

std::string keeping_name(Keeping keeping) {
  switch (keeping) {
    case Keeping::leaked:
      return "leaked";
    case Keeping::as_static:
      return "static";
    case Keeping::used_by_threads:
      break;
  }
  return "used_by_threads";
}

INSTANTIATE_TEST_SUITE_P(Engines, Exit,
                         ::testing::Combine(all_engines,
                                            ::testing::Values(Keeping::leaked, Keeping::as_static,
                                                              Keeping::used_by_threads)),
                         [](const auto& tested) {
                           return std::string(to_string(std::get<0>(tested.param))) + "_" +
                                  keeping_name(std::get<1>(tested.param));
                         });

TEST_P(Exit, with_io_in_flight_the_process_ends_in_bounded_time) {
  const auto [engine, keeping] = GetParam();
  const support::TempDir dir;
  const std::string path = dir.file("data");
  write_whole_file(path, pattern(file_bytes, 0, seed));
  const HandleOptions options{
      .engine = engine, .block_bytes = 128 * KiB, .queue_depth = 8, .workers = 2};
  for (int run = 0; run < runs(); ++run) {
    const auto child = run_in_child(
        [&, how = keeping]() -> std::string { exit_in_mid_flight(options, path, how, run); },
        std::chrono::seconds(30));
    ASSERT_FALSE(child.hung) << "run " << run;
    ASSERT_EQ(child.signal, 0) << "run " << run;
    ASSERT_EQ(child.exit_code, 0) << "run " << run;
  }
  EXPECT_EQ(pattern_fault(read_whole_file(path), 0, seed), "");
}

}  // namespace
}  // namespace tensorferry::faults
