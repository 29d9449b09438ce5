// Handles that poll: what is refused, with the reason, and exact bytes where it works.
#include <gtest/gtest.h>

#include "handle/handle_fixture.h"
#include "tensorferry/device.h"

namespace tensorferry::handle {
namespace {

class PollingHandle : public ::testing::Test {
 protected:
  void SetUp() override {
    if (auto opened = engines::open_uring_engine(1, Polling::submission); !opened.ok()) {
      GTEST_SKIP() << opened.error().what();
    }
  }

  // Writes and reads files of many sizes, aligned or not, page-locked or not.
  void expect_exact_bytes(Handle& handle) {
    for (const std::size_t bytes : {std::size_t{512}, 64 * KiB, 3 * MiB + 777, 8 * MiB}) {
      for (const std::size_t skew : {0U, 3U}) {
        const Memory out = Memory::with_pattern(bytes, 0, 5, skew);
        handle.write(out.bytes(), dir_.file("data"), 0, Durability::data).wait();
        const Memory in(bytes, skew);
        handle.read(in.bytes(), dir_.file("data")).wait();
        EXPECT_EQ(support::pattern_fault(in.bytes(), 0, 5), "") << bytes << " at " << skew;
        const Memory now(bytes, skew);
        handle.read_now(now.bytes(), dir_.file("data"));
        EXPECT_EQ(support::pattern_fault(now.bytes(), 0, 5), "") << bytes << " at " << skew;
      }
    }
    const PinnedBuffer pinned(8 * MiB);
    handle.read(pinned.bytes(), dir_.file("data")).wait();
    EXPECT_EQ(support::pattern_fault(pinned.bytes(), 0, 5), "");
  }

  support::TempDir dir_;
};

TEST_F(PollingHandle, needs_io_uring) {
  for (const EngineKind engine : {EngineKind::libaio, EngineKind::threads, EngineKind::gds}) {
    for (const Polling polling : {Polling::submission, Polling::completion}) {
      const Error error =
          error_of([&] { const Handle handle({.engine = engine, .polling = polling}); });
      EXPECT_EQ(error.code(), EINVAL);
      for (const std::string_view word : {to_string(engine), to_string(polling)}) {
        EXPECT_NE(error.hint().find(word), std::string::npos) << error.what();
      }
    }
  }
}

TEST_F(PollingHandle, moves_exact_bytes_with_polling_for_submission) {
  for (const EngineKind engine : {EngineKind::automatic, EngineKind::io_uring}) {
    for (const unsigned workers : {1U, 3U}) {
      Handle handle({.engine = engine, .workers = workers, .polling = Polling::submission});
      expect_exact_bytes(handle);
      EXPECT_EQ(handle.engine(), "io_uring");
      EXPECT_NE(handle.engine_reason().find("submission"), std::string::npos)
          << handle.engine_reason();
      EXPECT_GT(handle.stats().cpu_seconds, 0);
    }
  }
}

TEST_F(PollingHandle, ends_operations_that_are_cancelled_with_polling_for_submission) {
  support::write_whole_file(dir_.file("data"), support::pattern(64 * MiB, 0, 5));
  Handle handle({.queue_depth = 8, .workers = 2, .polling = Polling::submission});
  for (int round = 0; round < 10; ++round) {
    const Memory memory(64 * MiB);
    const Operation operation = handle.read(memory.bytes(), dir_.file("data"));
    operation.cancel();
    try {
      operation.wait();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ECANCELED);
    }
  }
  handle.close();
}

// Every operation is refused, also those that the calling thread would carry out itself.
TEST_F(PollingHandle, for_completion_is_refused_on_a_device_without_polled_queues) {
  support::write_whole_file(dir_.file("data"), support::pattern(MiB, 0, 5));
  const Device device = device_of(dir_.file("data"));
  if (device.polled_queues) GTEST_SKIP() << device.name << " has polled queues";
  const File file = File::open(dir_.file("data"), Access::read_write);
  for (const EngineKind engine : {EngineKind::automatic, EngineKind::io_uring}) {
    Handle handle({.engine = engine, .polling = Polling::completion});
    const Memory memory(64 * KiB);
    for (const Error& error : {error_of([&] { handle.read(memory.bytes(), file).wait(); }),
                               error_of([&] { handle.write(memory.bytes(), file).wait(); }),
                               error_of([&] { handle.read_now(memory.bytes(), file); }),
                               error_of([&] { handle.sync(file, Durability::data).wait(); })}) {
      EXPECT_EQ(error.code(), EOPNOTSUPP) << error.what();
      EXPECT_NE(error.hint().find(device.name), std::string::npos) << error.what();
      EXPECT_NE(error.hint().find("poll_queues"), std::string::npos) << error.what();
    }
  }
}

// No device here may have polled queues: the ring that is polled is an ordinary one.
TEST_F(PollingHandle, moves_exact_bytes_where_the_engine_polls_for_completions) {
  const auto open = [](EngineKind, unsigned depth,
                       os::System&) -> Result<std::unique_ptr<engines::Engine>> {
    return engines::make_polling_engine(engines::open_uring_engine(depth, Polling::off).or_throw(),
                                        engines::open_uring_engine(depth, Polling::off).or_throw(),
                                        depth);
  };
  Handle handle = make_handle({.engine = EngineKind::io_uring, .workers = 2},
                              {.system = nullptr, .open_engine = open});
  expect_exact_bytes(handle);
}

}  // namespace
}  // namespace tensorferry::handle
