// F4: the handle repeats a submission that the kernel refuses, a bounded number of times, and sends
// no request twice. Completions may come late and in any order.
#include <map>

#include "rig.h"

namespace tensorferry::faults::submission {
namespace {

using engines::Request;
using engines::RequestKind;
using support::Fault;
using support::pattern;
using support::read_whole_file;
using support::write_whole_file;

constexpr std::size_t request_count = 10'000;
constexpr std::size_t file_bytes = request_count * 4096;
constexpr std::uint32_t seed = 41;

class Submission : public ::testing::TestWithParam<EngineKind> {
 protected:
  static HandleOptions options(unsigned workers = 1) {
    return {.engine = GetParam(), .block_bytes = 4096, .queue_depth = 32, .workers = workers};
  }

  static void expect_each_once(const support::EngineFaults& faults, RequestKind kind) {
    std::map<std::uint64_t, int> times;
    for (const auto& taken : faults.log()) {
      if (taken.kind == kind) ++times[taken.offset];
    }
    EXPECT_EQ(times.size(), request_count);
    for (const auto& [offset, count] : times) ASSERT_EQ(count, 1) << "offset " << offset;
  }

  support::TempDir dir_;
  std::string path_ = dir_.file("data");
};

INSTANTIATE_TEST_SUITE_P(Engines, Submission, all_engines, engine_name);

TEST_P(Submission, refused_requests_are_offered_again_and_sent_exactly_once) {
  for (const unsigned workers : {1U, 3U}) {
    Rig rig(options(workers), workers);
    rig.engine.refuse_probability = 0.2;
    rig.engine.refuse_errors = {EAGAIN, EBUSY, ENOMEM};
    rig.engine.log_requests = true;
    const File file = rig.open_file(path_);
    GuardedMemory buffer(file_bytes);
    buffer.fill(0, seed);
    ASSERT_ENDED_WELL(rig.handle.write(buffer.bytes(), file, 0));
    EXPECT_EQ(pattern_fault(read_whole_file(path_), 0, seed), "");
    expect_each_once(rig.engine, RequestKind::write);
    EXPECT_GT(rig.engine.refusals(), request_count / 10);
    EXPECT_GT(rig.handle.stats().refused_submissions, request_count / 10) << "not counted";

    rig.engine.reset_counts();
    buffer.clear();
    ASSERT_ENDED_WELL(rig.handle.read(buffer.bytes(), file, 0));
    EXPECT_EQ(buffer.fault(0, seed), "");
    expect_each_once(rig.engine, RequestKind::read);
    EXPECT_LE(rig.engine.in_flight_max(), 32U);
  }
}

TEST_P(Submission, many_operations_survive_refusals_delays_and_disorder) {
  write_whole_file(path_, pattern(4 * MiB, 0, seed));
  Rig rig({.engine = GetParam(), .block_bytes = 64 * KiB, .queue_depth = 8, .workers = 2}, 7);
  rig.engine.refuse_probability = 0.2;
  rig.engine.refuse_errors = {EAGAIN, EBUSY, ENOMEM};
  rig.engine.delay_max = std::chrono::microseconds(300);
  rig.engine.reorder = true;
  const File file = rig.open_file(path_, Access::read);
  std::vector<GuardedMemory> buffers;
  for (std::size_t i = 0; i < 200; ++i) buffers.emplace_back(20'000 + i * 13, i % 40);
  std::vector<Operation> operations;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    operations.push_back(rig.handle.read(buffers[i].bytes(), file, i * 20'000));
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    ASSERT_ENDED_WELL(operations[i]);
    ASSERT_EQ(buffers[i].fault(i * 20'000, seed), "") << i;
  }
  EXPECT_LE(rig.engine.in_flight_max(), 8U);
}

TEST_P(Submission, a_kernel_that_always_refuses_is_an_error_in_the_end) {
  write_whole_file(path_, pattern(1 * MiB, 0, seed));
  Rig rig({.engine = GetParam(), .block_bytes = 256 * KiB, .queue_depth = 8});
  const File file = rig.open_file(path_, Access::read);
  GuardedMemory buffer(1 * MiB);
  for (const int code : {EAGAIN, EBUSY, ENOMEM}) {
    rig.engine.refuse_probability = 1;
    rig.engine.refuse_errors = {code};
    const auto error = outcome(rig.handle.read(buffer.bytes(), file, 0));
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), code);
    EXPECT_EQ(error->path(), path_);
    EXPECT_FALSE(error->hint().empty());
    rig.engine.refuse_probability = 0;
    ASSERT_ENDED_WELL(rig.handle.read(buffer.bytes(), file, 0));
    EXPECT_EQ(buffer.fault(0, seed), "");
  }
}

TEST_P(Submission, a_request_that_can_never_be_taken_fails_its_own_operation_only) {
  write_whole_file(path_, pattern(4 * MiB, 0, seed));
  Rig rig({.engine = GetParam(), .block_bytes = 64 * KiB, .queue_depth = 8});
  rig.engine.refuse_probability = 0.02;
  rig.engine.refuse_errors = {EBADF};
  const File file = rig.open_file(path_, Access::read);
  int failed = 0;
  for (int round = 0; round < 100; ++round) {
    std::vector<GuardedMemory> buffers;
    for (int i = 0; i < 8; ++i) buffers.emplace_back(512 * KiB);
    std::vector<Operation> operations;
    for (std::size_t i = 0; i < 8; ++i) {
      operations.push_back(rig.handle.read(buffers[i].bytes(), file, i * 512 * KiB));
    }
    for (std::size_t i = 0; i < 8; ++i) {
      const auto error = outcome(operations[i]);
      if (!error) {
        ASSERT_EQ(buffers[i].fault(i * 512 * KiB, seed), "");
        continue;
      }
      ASSERT_EQ(error->code(), EBADF);
      ++failed;
    }
  }
  EXPECT_GT(failed, 0);
  EXPECT_LT(failed, 800) << "a refusal failed operations of other requests";
}

TEST_P(Submission, eagain_and_eintr_completions_are_retried_with_a_bound) {
  write_whole_file(path_, pattern(1 * MiB, 0, seed));
  Rig rig({.engine = GetParam(), .block_bytes = 64 * KiB, .queue_depth = 8});
  const File file = rig.open_file(path_);
  GuardedMemory buffer(1 * MiB);
  for (const int code : {EAGAIN, EINTR}) {
    rig.engine.judge = [code](const Request&, std::uint64_t index) -> Fault {
      return index % 3 != 2 ? Fault{Fault::Kind::fail, 0, code} : Fault{};
    };
    rig.engine.reset_counts();
    buffer.clear();
    const std::uint64_t before = rig.handle.stats().retries;
    ASSERT_ENDED_WELL(rig.handle.read(buffer.bytes(), file, 0));
    ASSERT_EQ(buffer.fault(0, seed), "");
    EXPECT_GT(rig.handle.stats().retries, before);
    ASSERT_ENDED_WELL(rig.handle.write(buffer.bytes(), file, 0));

    rig.engine.judge = [code](const Request&, std::uint64_t) -> Fault {
      return {Fault::Kind::fail, 0, code};
    };
    EXPECT_EQ(outcome_code(rig.handle.read(buffer.bytes(), file, 0)), code);
  }
  EXPECT_EQ(pattern_fault(read_whole_file(path_), 0, seed), "");
}

}  // namespace
}  // namespace tensorferry::faults::submission
