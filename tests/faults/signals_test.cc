// F5: signals at 10 kHz change nothing. No operation is lost, none fails, every byte is right.
#include <pthread.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "rig.h"

namespace tensorferry::faults::signals {
namespace {

using support::Call;
using support::pattern;
using support::write_whole_file;

constexpr std::uint32_t seed = 51;
constexpr std::size_t file_bytes = 4 * MiB;

std::atomic<std::uint64_t> signals{0};

// Sends SIGALRM every 100 us to any thread, without SA_RESTART: it interrupts system calls.
class SignalStorm {
 public:
  SignalStorm() {
    struct sigaction action{};
    action.sa_handler = [](int) { signals.fetch_add(1, std::memory_order_relaxed); };
    ::sigaction(SIGALRM, &action, &before_);
    const itimerval timer{{0, 100}, {0, 100}};
    ::setitimer(ITIMER_REAL, &timer, nullptr);
  }
  ~SignalStorm() {
    const itimerval none{};
    ::setitimer(ITIMER_REAL, &none, nullptr);
    ::sigaction(SIGALRM, &before_, nullptr);
  }
  SignalStorm(const SignalStorm&) = delete;
  SignalStorm& operator=(const SignalStorm&) = delete;

 private:
  struct sigaction before_{};
};

class Signals : public ::testing::TestWithParam<EngineKind> {
 protected:
  Signals() { write_whole_file(path_, pattern(file_bytes, 0, seed)); }

  support::TempDir dir_;
  std::string path_ = dir_.file("data");
};

INSTANTIATE_TEST_SUITE_P(Engines, Signals, all_engines, engine_name);

TEST_P(Signals, a_storm_of_signals_loses_none_of_100000_operations) {
  Handle handle({.engine = GetParam(), .queue_depth = 32});
  const File file = File::open(path_, Access::read_write);
  constexpr std::size_t wave = 500;
  constexpr std::size_t operation_bytes = 4096;
  GuardedMemory buffer(wave * operation_bytes);
  const std::uint64_t signals_before = signals;
  {
    const SignalStorm storm;
    for (std::size_t done = 0; done < 100'000; done += wave) {
      const std::uint64_t shift = done / wave % 2 * 1 * MiB;
      buffer.clear();
      std::vector<Operation> operations;
      operations.reserve(wave);
      for (std::size_t i = 0; i < wave; ++i) {
        const std::size_t at = i * operation_bytes;
        operations.push_back(
            handle.read(buffer.bytes().subspan(at, operation_bytes), file, shift + at));
      }
      for (const Operation& operation : operations) ASSERT_ENDED_WELL(operation);
      ASSERT_EQ(buffer.fault(shift, seed), "");
    }
  }
  EXPECT_EQ(handle.stats().operations, 100'000U);
  EXPECT_EQ(handle.stats().failed_operations, 0U);
  EXPECT_GT(signals - signals_before, 100U) << "too few signals came";
}

TEST_P(Signals, an_engine_that_opens_meanwhile_is_not_refused) {
  const File file = File::open(path_, Access::read);
  GuardedMemory buffer(4096);
  const SignalStorm storm;
  for (int i = 0; i < 1000; ++i) {
    Handle handle({.engine = GetParam(), .workers = 1});
    ASSERT_NO_THROW(handle.read(buffer.bytes(), file, 0).wait()) << "handle " << i;
  }
  EXPECT_EQ(buffer.fault(0, seed), "");
}

TEST_P(Signals, synchronous_transfers_in_the_thread_that_is_struck_are_exact) {
  Handle handle({.engine = GetParam(), .queue_depth = 8});
  const File file = File::open(path_, Access::read_write);
  GuardedMemory small(4096);
  GuardedMemory large(3 * MiB, 8);
  const SignalStorm storm;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const std::uint64_t offset = i % 500 * 4096;
    handle.read_now(small.bytes(), file, offset);
    ASSERT_EQ(small.fault(offset, seed), "");
    handle.write_now(small.bytes(), file, offset);
    if (i % 100 != 0) continue;
    handle.read_now(large.bytes(), file, 11);
    ASSERT_EQ(large.fault(11, seed), "");
    handle.write_now(large.bytes(), file, 11, Durability::data);
  }
}

TEST_P(Signals, waits_with_a_limit_are_not_cut_short_by_signals) {
  Rig rig({.engine = GetParam(), .block_bytes = 4096, .queue_depth = 4});
  rig.engine.delay_max = std::chrono::milliseconds(5);
  const File file = rig.open_file(path_, Access::read);
  GuardedMemory buffer(64 * KiB);
  const SignalStorm storm;
  for (int i = 0; i < 20; ++i) {
    const Operation operation = rig.handle.read(buffer.bytes(), file, 0);
    EXPECT_TRUE(operation.wait_for(hang_limit)) << "returned early, or hangs";
    EXPECT_TRUE(operation.done());
    ASSERT_EQ(buffer.fault(0, seed), "");
  }
}

// EINTR from every system call that can give it.
TEST_P(Signals, eintr_from_the_system_is_retried) {
  Rig rig({.engine = GetParam(), .queue_depth = 4});
  for (const Call call : {Call::pread, Call::pwrite}) {
    rig.system.add(
        {.call = call, .every = 2, .times = support::SystemRule::always, .error = EINTR});
  }
  const File file = rig.open_file(path_);
  GuardedMemory buffer(64 * KiB, 5);
  for (int i = 0; i < 50; ++i) {
    rig.handle.read_now(buffer.bytes(), file, 7);
    ASSERT_EQ(buffer.fault(7, seed), "");
    rig.handle.write_now(buffer.bytes(), file, 7);
    ASSERT_ENDED_WELL(rig.handle.read(buffer.bytes(), file, 7));
    ASSERT_EQ(buffer.fault(7, seed), "");
  }
  EXPECT_GT(rig.system.struck(), 50U);
}

TEST_P(Signals, the_threads_of_a_handle_take_no_signals) {
  Handle handle({.engine = GetParam(), .queue_depth = 4, .workers = 2});
  const File file = File::open(path_, Access::read);
  GuardedMemory buffer(1 * MiB);
  ASSERT_ENDED_WELL(handle.read(buffer.bytes(), file, 0));
  static std::atomic<bool> elsewhere;
  static pthread_t here;
  elsewhere = false;
  here = ::pthread_self();
  struct sigaction action{};
  struct sigaction before{};
  action.sa_handler = [](int) {
    if (::pthread_equal(here, ::pthread_self()) == 0) elsewhere = true;
  };
  ::sigaction(SIGUSR1, &action, &before);
  // If this thread blocked it, the kernel would give the signal to another thread.
  sigset_t set;
  sigset_t old;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &set, &old);
  for (int i = 0; i < 20; ++i) {
    ::kill(::getpid(), SIGUSR1);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
  EXPECT_FALSE(elsewhere);
  ::sigaction(SIGUSR1, &before, nullptr);
}

}  // namespace
}  // namespace tensorferry::faults::signals
