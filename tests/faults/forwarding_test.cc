// Reads of a tensor from the memory of its write, onto a GPU with slow streams: only the reader
// waits for the streams. The GPU is tests/fake_cuda.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <future>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "handle/handle_fixture.h"
#include "support/faulty_system.h"
#include "support/pattern.h"
#include "support/temp_dir.h"
#include "swap/space.h"
#include "tensorferry/swap_space.h"

namespace tensorferry::faults::forwarding {
namespace {

using handle::Gate;
using handle::Memory;
using handle::outcome_code;
using support::pattern_fault;

constexpr std::size_t tensor_bytes = MiB;

// The fake library of the driver.
class FakeCuda {
 public:
  static FakeCuda& get() {
    static FakeCuda one;
    return one;
  }

  // Work of the user that ends when the test says so.
  void hold(bool held) { call<int(void*, int)>("fake_cuda_hold")(stream, held ? 1 : 0); }
  void hold_copies(bool held) { call<int(int)>("fake_cuda_hold_copies")(held ? 1 : 0); }
  void await_waiting(unsigned threads) { call<int(unsigned)>("fake_cuda_await_waiting")(threads); }

  std::span<std::byte> memory;
  void* stream = nullptr;

 private:
  FakeCuda() : library_(dlopen(FAKE_CUDA_LIBRARY, RTLD_NOW)) {
    if (library_ == nullptr) return;
    call<int(unsigned)>("cuInit")(0);
    void* begin = nullptr;
    if (call<int(void**, std::size_t)>("fake_cuda_memory")(&begin, tensor_bytes) != 0) return;
    memory = {static_cast<std::byte*>(begin), tensor_bytes};
    call<int(void**, unsigned)>("cuStreamCreate")(&stream, 0);
  }

  template <class Function>
  [[nodiscard]] Function* call(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(library_, name));
  }

  void* library_;
};

class Forwarding : public ::testing::Test {
 protected:
  Forwarding() {
    SwapOptions options;
    options.directories = {dir.path()};
    options.buffer_bytes = 4 * MiB;
    options.handle = Gate::settings({.queue_depth = 1});
    space.emplace(options, swap::Seams{gate.seams(&system)});
  }
  ~Forwarding() override {
    cuda.hold(false);
    cuda.hold_copies(false);
    gate.open();
    if (reader.joinable()) reader.join();
  }
  void SetUp() override {
    ASSERT_FALSE(cuda.memory.empty()) << "tests/fake_cuda cannot be loaded";
    std::memset(cuda.memory.data(), 0, cuda.memory.size());
  }

  // Reads the tensor onto the GPU, on another thread. When this returns, that thread waits for the
  // GPU.
  void start_reader(const char* key) {
    reader = std::thread([this, key] {
      space->get(key, cuda.memory, 0, {cuda.stream}).wait();
      read = true;
    });
    cuda.await_waiting(1);
  }

  support::TempDir dir;
  support::FaultySystem system;
  FakeCuda& cuda = FakeCuda::get();
  Gate gate;
  std::optional<SwapSpace> space;
  std::thread reader;
  std::atomic<bool> read{false};
  Memory source = Memory::with_pattern(tensor_bytes, 0, 1);
  Memory other = Memory::with_pattern(tensor_bytes, 0, 2);
};

TEST_F(Forwarding, a_stream_may_wait_for_the_write_whose_memory_is_to_be_read_behind_it) {
  cuda.hold(true);
  const Operation put = space->put("t", source.bytes());
  ASSERT_TRUE(gate.holds(1));
  start_reader("t");
  gate.open();
  // The work on the stream ends after the write.
  EXPECT_EQ(outcome_code(put), 0)
      << "the write waits for its reader, and the reader for the stream";
  EXPECT_FALSE(read);
  cuda.hold(false);
  reader.join();
  EXPECT_TRUE(read);
  EXPECT_EQ(pattern_fault(cuda.memory, 0, 1), "");
}

TEST_F(Forwarding, a_worker_goes_on_while_somebody_reads_what_it_has_written) {
  cuda.hold_copies(true);
  const Operation put = space->put("t", source.bytes());
  ASSERT_TRUE(gate.holds(1));
  start_reader("t");
  gate.open();
  EXPECT_EQ(outcome_code(space->put("other", other.bytes())), 0) << "the worker waits for a reader";
  EXPECT_FALSE(put.done()) << "its memory is being read";
  cuda.hold_copies(false);
  reader.join();
  EXPECT_EQ(outcome_code(put), 0);
  EXPECT_EQ(pattern_fault(cuda.memory, 0, 1), "");
}

TEST_F(Forwarding, a_write_is_done_once_when_its_last_reader_has_left) {
  cuda.hold_copies(true);
  const Operation put = space->put("t", source.bytes());
  std::atomic<int> ends{0};
  put.when_done([&] { ++ends; });
  ASSERT_TRUE(gate.holds(1));
  start_reader("t");
  std::thread second([&] { space->get("t", cuda.memory, 0, {cuda.stream}).wait(); });
  cuda.await_waiting(2);
  gate.open();
  EXPECT_EQ(outcome_code(space->put("other", other.bytes())), 0);
  EXPECT_EQ(ends, 0);
  cuda.hold_copies(false);
  reader.join();
  second.join();
  EXPECT_EQ(outcome_code(put), 0);
  EXPECT_EQ(ends, 1);
  std::memset(source.bytes().data(), 0, tensor_bytes);  // the test owns it again
  Memory back(tensor_bytes);
  EXPECT_EQ(outcome_code(space->get("t", back.bytes())), 0);
  EXPECT_EQ(pattern_fault(back.bytes(), 0, 1), "");
}

TEST_F(Forwarding, a_write_that_fails_is_not_done_before_its_reader_has_left) {
  cuda.hold_copies(true);
  const Operation put = space->put("t", source.bytes());
  ASSERT_TRUE(gate.holds(1));
  start_reader("t");
  system.add({.call = support::Call::pwrite, .error = EIO});
  gate.open();
  EXPECT_EQ(outcome_code(space->put("other", other.bytes())), 0);
  EXPECT_EQ(system.struck(), 1U);
  EXPECT_FALSE(put.done()) << "its memory is being read";
  cuda.hold_copies(false);
  reader.join();
  EXPECT_EQ(pattern_fault(cuda.memory, 0, 1), "");
  EXPECT_EQ(outcome_code(put), EIO);
  EXPECT_EQ(space->size("t"), std::nullopt);
}

TEST_F(Forwarding, cancelling_a_write_does_not_wait_for_its_reader) {
  cuda.hold_copies(true);
  const Operation first = space->put("other", other.bytes());
  ASSERT_TRUE(gate.holds(1));
  const Operation put = space->put("t", source.bytes());
  start_reader("t");
  // No worker has claimed a block of it, so it ends on the thread that cancels it.
  const auto cancelled = std::async(std::launch::async, [&] { put.cancel(); });
  EXPECT_EQ(cancelled.wait_for(handle::hang_limit), std::future_status::ready);
  EXPECT_FALSE(put.done()) << "its memory is being read";
  cuda.hold_copies(false);
  reader.join();
  EXPECT_EQ(outcome_code(put), ECANCELED);
  gate.open();
  EXPECT_EQ(outcome_code(first), 0);
}

}  // namespace
}  // namespace tensorferry::faults::forwarding
