// Polling, as far as the kernel's own rules go. The suite of contract_test.cc has the rest.
#include "os/system.h"
#include "support/engine_contract.h"

namespace tensorferry::engines {
namespace {

class CompletionPolling : public EngineContract {};

INSTANTIATE_TEST_SUITE_P(Engines, CompletionPolling,
                         ::testing::Values(Tested{EngineKind::io_uring}),
                         ::testing::PrintToStringParamName());

TEST_P(CompletionPolling, serves_the_page_cache_and_syncs_on_any_device) {
  const auto engine = open_uring_engine(depth, Polling::completion).or_throw();
  ASSERT_EQ(engine->attach(), 0);
  const Memory memory(64 * KiB);
  const int read = run(*engine, request(RequestKind::read, memory.at(0), 64 * KiB, 0));
  EXPECT_TRUE(read == 64 * KiB || read == -EOPNOTSUPP) << read;
  Request buffered = request(RequestKind::read, memory.at(0), 64 * KiB, 64 * KiB);
  buffered.fd = buffered_fd_;
  EXPECT_EQ(run(*engine, buffered), 64 * KiB);
  EXPECT_TRUE(holds(memory.at(0), 64 * KiB, 64 * KiB, seed));
  EXPECT_EQ(run(*engine, request(RequestKind::sync_data, nullptr, 0, 0)), 0);
  expect_nothing_more(*engine);
}

class SubmissionPolling : public EngineContract {};

INSTANTIATE_TEST_SUITE_P(Engines, SubmissionPolling,
                         ::testing::Values(Tested{EngineKind::io_uring, Polling::submission}),
                         ::testing::PrintToStringParamName());

TEST_P(SubmissionPolling, counts_the_time_of_the_kernels_thread) {
  const auto engine = open();
  const Memory memory(64 * KiB);
  const auto deadline = Clock::now() + hang_limit;
  while (engine->cpu_seconds() == 0) {
    ASSERT_LT(Clock::now(), deadline);
    ASSERT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 64 * KiB, 0)), 64 * KiB);
  }
}

}  // namespace
}  // namespace tensorferry::engines
