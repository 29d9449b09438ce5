// What each completion means, and that every sequence of completions ends.
#include "handle/retry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/alignment.h"

namespace tensorferry::handle {

// GoogleTest finds it by its argument, so in no other namespace.
// NOLINTNEXTLINE(misc-use-anonymous-namespace)
static std::ostream& operator<<(std::ostream& out, Verdict verdict) {
  switch (verdict) {
    case Verdict::done:
      return out << "done";
    case Verdict::resume:
      return out << "resume";
    case Verdict::retry:
      return out << "retry";
    case Verdict::ended:
      return out << "ended";
    case Verdict::fail:
      return out << "fail";
  }
  return out << "unknown";
}

namespace {

using engines::RequestKind;
constexpr RequestKind read = RequestKind::read;
constexpr RequestKind write = RequestKind::write;
constexpr RequestKind sync_data = RequestKind::sync_data;
constexpr RequestKind sync_full = RequestKind::sync_full;

// The most attempts in a row that may move no byte.
constexpr unsigned attempts_bound = 1000;

struct Case {
  const char* claim;
  Attempt before;
  std::int32_t result;
  Verdict verdict;
  int code;
  std::uint32_t done;  // after it
};

Attempt attempt(RequestKind kind, std::uint32_t bytes, std::uint32_t needed,
                std::uint32_t alignment, std::uint32_t done = 0, std::uint32_t reached = 0) {
  return {.kind = kind,
          .bytes = bytes,
          .needed = needed,
          .alignment = alignment,
          .done = done,
          .reached = reached};
}

class Judge : public ::testing::TestWithParam<Case> {};

TEST_P(Judge, comes_to_the_verdict) {
  const Case& given = GetParam();
  Attempt judged = given.before;
  const Judgement judgement = judge(judged, given.result);
  EXPECT_EQ(judgement.verdict, given.verdict);
  EXPECT_EQ(judgement.code, given.code);
  EXPECT_EQ(judged.done, given.done);
  EXPECT_GE(judged.reached, given.before.reached);
}

const std::vector<Case> cases{
    // Complete.
    {"a_whole_read_is_done", attempt(read, 4096, 4096, 512), 4096, Verdict::done, 0, 4096},
    {"a_whole_write_is_done", attempt(write, 4096, 4096, 512), 4096, Verdict::done, 0, 4096},
    {"a_read_of_what_is_needed_is_done", attempt(read, 4096, 1000, 512), 1000, Verdict::done, 0,
     1000},
    {"a_read_of_more_than_is_needed_is_done", attempt(read, 4096, 1000, 512), 1001, Verdict::done,
     0, 1000},
    {"a_resumed_read_is_done", attempt(read, 4096, 4096, 512, 1024, 1024), 3072, Verdict::done, 0,
     4096},
    {"a_resumed_write_is_done", attempt(write, 4096, 4096, 1, 4095, 4095), 1, Verdict::done, 0,
     4096},
    {"a_request_of_one_byte_is_done", attempt(read, 1, 1, 1), 1, Verdict::done, 0, 1},
    {"the_largest_request_is_done", attempt(read, 1U << 30, 1U << 30, 4096), 1 << 30, Verdict::done,
     0, 1U << 30},

    // Short.
    {"a_short_read_goes_on", attempt(read, 4096, 4096, 512), 1024, Verdict::resume, 0, 1024},
    {"a_short_write_goes_on", attempt(write, 4096, 4096, 512), 512, Verdict::resume, 0, 512},
    {"a_buffered_read_goes_on_at_any_byte", attempt(read, 4096, 4096, 1), 1, Verdict::resume, 0, 1},
    {"a_buffered_write_goes_on_at_any_byte", attempt(write, 4096, 4096, 1), 4095, Verdict::resume,
     0, 4095},
    {"a_ragged_read_goes_on_at_the_alignment", attempt(read, 4096, 4096, 512), 1025,
     Verdict::resume, 0, 1024},
    {"a_ragged_write_goes_on_at_the_alignment", attempt(write, 8192, 8192, 4096), 8191,
     Verdict::resume, 0, 4096},
    {"one_byte_short_of_what_is_needed_goes_on", attempt(read, 4096, 4095, 1), 4094,
     Verdict::resume, 0, 4094},
    {"a_second_short_read_goes_on_from_the_first", attempt(read, 4096, 4096, 512, 512, 512), 1024,
     Verdict::resume, 0, 1536},
    {"a_read_shorter_than_the_alignment_is_tried_again", attempt(read, 4096, 4096, 512), 100,
     Verdict::retry, EIO, 0},
    {"a_write_shorter_than_the_alignment_is_tried_again", attempt(write, 4096, 4096, 512), 100,
     Verdict::retry, EIO, 0},
    {"a_write_that_stops_at_the_same_place_is_tried_again",
     attempt(write, 4096, 4096, 512, 512, 700), 188, Verdict::retry, EIO, 512},

    // The end of the file.
    {"nothing_read_is_the_end", attempt(read, 4096, 4096, 512), 0, Verdict::ended, ENODATA, 0},
    {"nothing_read_after_something_is_the_end", attempt(read, 4096, 4096, 512, 1024, 1024), 0,
     Verdict::ended, ENODATA, 1024},
    {"the_same_ragged_place_twice_is_the_end", attempt(read, 4096, 4096, 512, 512, 1000), 488,
     Verdict::ended, ENODATA, 512},
    {"a_ragged_place_before_the_farthest_is_the_end", attempt(read, 4096, 4096, 512, 512, 1000),
     100, Verdict::ended, ENODATA, 512},
    {"a_ragged_place_farther_on_is_not_the_end", attempt(read, 4096, 4096, 512, 512, 600), 400,
     Verdict::retry, EIO, 512},
    {"nothing_written_is_tried_again", attempt(write, 4096, 4096, 512), 0, Verdict::retry, EIO, 0},

    // Errors.
    {"an_interrupted_read_is_tried_again", attempt(read, 4096, 4096, 512), -EINTR, Verdict::retry,
     EINTR, 0},
    {"an_interrupted_write_is_tried_again", attempt(write, 4096, 4096, 512), -EINTR, Verdict::retry,
     EINTR, 0},
    {"a_read_refused_for_now_is_tried_again", attempt(read, 4096, 4096, 512, 512, 512), -EAGAIN,
     Verdict::retry, EAGAIN, 512},
    {"a_read_error_fails", attempt(read, 4096, 4096, 512), -EIO, Verdict::fail, EIO, 0},
    {"a_bad_sector_is_not_the_end_of_the_file", attempt(read, 4096, 4096, 512), -ENODATA,
     Verdict::fail, EIO, 0},
    {"a_drive_that_does_not_answer_is_not_a_deadline", attempt(write, 4096, 4096, 512), -ETIMEDOUT,
     Verdict::fail, EIO, 0},
    {"a_write_error_fails", attempt(write, 4096, 4096, 512), -EIO, Verdict::fail, EIO, 0},
    {"a_full_disk_fails", attempt(write, 4096, 4096, 512, 1024, 1024), -ENOSPC, Verdict::fail,
     ENOSPC, 1024},
    {"a_bad_address_fails", attempt(read, 4096, 4096, 512), -EFAULT, Verdict::fail, EFAULT, 0},
    {"a_cancelled_request_fails", attempt(read, 4096, 4096, 512), -ECANCELED, Verdict::fail,
     ECANCELED, 0},
    {"an_unknown_errno_fails", attempt(read, 4096, 4096, 512), -4000, Verdict::fail, 4000, 0},

    // Syncs.
    {"a_data_sync_is_done", attempt(sync_data, 0, 0, 1), 0, Verdict::done, 0, 0},
    {"a_full_sync_is_done", attempt(sync_full, 0, 0, 1), 0, Verdict::done, 0, 0},
    {"an_interrupted_sync_fails", attempt(sync_data, 0, 0, 1), -EINTR, Verdict::fail, EINTR, 0},
    {"a_sync_refused_for_now_fails", attempt(sync_full, 0, 0, 1), -EAGAIN, Verdict::fail, EAGAIN,
     0},
    {"a_sync_that_loses_data_fails", attempt(sync_data, 0, 0, 1), -EIO, Verdict::fail, EIO, 0},
    {"a_full_sync_that_loses_data_fails", attempt(sync_full, 0, 0, 1), -EIO, Verdict::fail, EIO, 0},
    {"a_sync_without_space_fails", attempt(sync_full, 0, 0, 1), -ENOSPC, Verdict::fail, ENOSPC, 0},
};

INSTANTIATE_TEST_SUITE_P(retry, Judge, ::testing::ValuesIn(cases),
                         [](const auto& given) { return std::string(given.param.claim); });

// --- Bounds ----------------------------------------------------------------------------------

// Gives the same result again and again. Returns the attempts until it fails, or 0 if it never
// does.
unsigned attempts_until_failure(Attempt& judged, std::int32_t result, int code) {
  for (unsigned i = 1; i <= attempts_bound; ++i) {
    const Judgement judgement = judge(judged, result);
    EXPECT_EQ(judgement.code, code);
    if (judgement.verdict == Verdict::fail) return i;
    EXPECT_EQ(judgement.verdict, Verdict::retry);
  }
  return 0;
}

TEST(Retry, fruitless_attempts_are_many_but_bounded) {
  for (const auto& [kind, result, code] :
       std::vector<std::tuple<RequestKind, int, int>>{{read, -EINTR, EINTR},
                                                      {read, -EAGAIN, EAGAIN},
                                                      {write, -EINTR, EINTR},
                                                      {write, -EAGAIN, EAGAIN},
                                                      {write, 0, EIO},
                                                      {write, 100, EIO}}) {
    Attempt judged = attempt(kind, 4096, 4096, 512);
    EXPECT_GT(attempts_until_failure(judged, result, code), 20U) << code;
  }
}

TEST(Retry, progress_resets_the_count_of_fruitless_attempts) {
  Attempt fresh = attempt(read, 1 << 20, 1 << 20, 512);
  Attempt judged = fresh;
  const unsigned bound = attempts_until_failure(fresh, -EAGAIN, EAGAIN);
  ASSERT_GT(bound, 1U);
  for (unsigned round = 0; round < 5; ++round) {
    for (unsigned i = 1; i < bound; ++i) {
      ASSERT_EQ(judge(judged, -EAGAIN).verdict, Verdict::retry) << i;
    }
    ASSERT_EQ(judge(judged, 512).verdict, Verdict::resume);
    ASSERT_EQ(judged.fruitless, 0U);
  }
}

TEST(Retry, different_fruitless_results_share_one_count) {
  Attempt judged = attempt(write, 4096, 4096, 512);
  const std::int32_t results[] = {-EINTR, 0, -EAGAIN, 100};
  unsigned i = 0;
  while (i < attempts_bound && judge(judged, results[i % 4]).verdict != Verdict::fail) ++i;
  EXPECT_LT(i, attempts_bound);
}

TEST(Retry, the_end_of_a_ragged_file_is_found_after_two_attempts) {
  // A file of 1000 bytes, a direct request for 4096.
  Attempt judged = attempt(read, 4096, 4096, 512);
  EXPECT_EQ(judge(judged, 1000).verdict, Verdict::resume);
  EXPECT_EQ(judged.done, 512U);
  EXPECT_EQ(judge(judged, 488).verdict, Verdict::ended);
  EXPECT_EQ(judged.reached, 1000U);
}

TEST(Retry, the_end_of_a_file_shorter_than_the_alignment_is_found) {
  Attempt judged = attempt(read, 4096, 4096, 512);
  EXPECT_EQ(judge(judged, 100).verdict, Verdict::retry);
  EXPECT_EQ(judge(judged, 100).verdict, Verdict::ended);
  EXPECT_EQ(judged.reached, 100U);
}

TEST(Retry, delays_start_at_nothing_and_grow_to_ten_milliseconds) {
  using namespace std::chrono_literals;
  EXPECT_EQ(retry_delay(0), 0ns);
  EXPECT_EQ(retry_delay(1), 0ns);
  EXPECT_GT(retry_delay(2), 0ns);
  for (unsigned i = 1; i < 200; ++i) {
    EXPECT_GE(retry_delay(i), retry_delay(i - 1)) << i;
    EXPECT_LE(retry_delay(i), 10ms) << i;
  }
  EXPECT_EQ(retry_delay(200), 10ms);
  EXPECT_EQ(retry_delay(~0U), 10ms);
}

TEST(Retry, all_attempts_together_last_about_a_second) {
  Attempt judged = attempt(read, 4096, 4096, 512);
  std::chrono::nanoseconds sum{};
  while (judge(judged, -EAGAIN).verdict == Verdict::retry) sum += retry_delay(judged.fruitless);
  EXPECT_GT(sum, std::chrono::milliseconds(500));
  EXPECT_LT(sum, std::chrono::milliseconds(2000));
}

TEST(Refusal, passing_shortages_are_retried_with_a_bound) {
  for (const int code : {EAGAIN, EBUSY, ENOMEM, EINTR}) {
    EXPECT_EQ(judge_refusal(code, 0), Verdict::retry) << code;
    EXPECT_EQ(judge_refusal(code, 1), Verdict::retry) << code;
    EXPECT_EQ(judge_refusal(code, 20), Verdict::retry) << code;
    EXPECT_EQ(judge_refusal(code, attempts_bound), Verdict::fail) << code;
  }
}

TEST(Refusal, anything_else_fails_at_once) {
  const std::set<int> passing{EAGAIN, EBUSY, ENOMEM, EINTR};
  for (int code = 1; code < 140; ++code) {
    if (passing.contains(code)) continue;
    EXPECT_EQ(judge_refusal(code, 0), Verdict::fail) << code;
    EXPECT_EQ(judge_refusal(code, 1), Verdict::fail) << code;
  }
}

TEST(Hint, the_common_failures_come_with_advice) {
  for (const int code :
       {EIO, EDQUOT, EFBIG, EBADF, EFAULT, EINVAL, EAGAIN, EINTR, EBUSY, ENOMEM, EROFS}) {
    EXPECT_FALSE(hint_for(code).empty()) << code;
  }
  EXPECT_EQ(hint_for(4000), "");
}

// --- A simulated device ----------------------------------------------------------------------

class Dice {
 public:
  explicit Dice(std::uint32_t seed) : engine_(seed) {}
  std::uint32_t below(std::uint32_t limit) {
    return std::uniform_int_distribution<std::uint32_t>(0, limit - 1)(engine_);
  }
  bool coin() { return below(2) == 0; }

 private:
  std::mt19937 engine_;
};

// A file of `bytes` bytes that moves any part of a request, and sometimes nothing.
class Whimsical {
 public:
  Whimsical(std::uint32_t seed, std::uint64_t bytes, RequestKind kind, std::uint32_t error_percent)
      : dice_(seed), bytes_(bytes), kind_(kind), error_percent_(error_percent) {}

  std::int32_t answer(std::uint64_t offset, std::uint32_t wanted) {
    if (dice_.below(100) < error_percent_) {
      if (dice_.below(100) == 0) return -EIO;
      return dice_.coin() ? -EINTR : -EAGAIN;
    }
    const std::uint64_t there =
        kind_ == read ? (offset < bytes_ ? std::min<std::uint64_t>(bytes_ - offset, wanted) : 0)
                      : wanted;
    // As kernels do: mostly all, sometimes some whole sectors, sometimes a ragged rest.
    const auto all = static_cast<std::uint32_t>(there);
    switch (dice_.below(4)) {
      case 0:
        return static_cast<std::int32_t>(dice_.below(all + 1));
      case 1:
        return static_cast<std::int32_t>(align_down(dice_.below(all + 1), 512));
      default:
        return static_cast<std::int32_t>(all);
    }
  }

 private:
  Dice dice_;
  std::uint64_t bytes_;
  RequestKind kind_;
  std::uint32_t error_percent_;
};

struct Simulated {
  Verdict verdict = Verdict::retry;
  unsigned steps = 0;
  bool covered = false;  // every byte that is needed was moved, and none was skipped
  bool failed = false;   // the device gave an error that is final
};

Simulated simulate(Whimsical& device, Attempt judged) {
  Simulated run;
  std::uint32_t moved = 0;  // bytes [0, moved) have been moved
  run.covered = true;
  while (run.verdict == Verdict::retry || run.verdict == Verdict::resume) {
    if (++run.steps > 100 * attempts_bound) return run;
    if (judged.done % judged.alignment != 0 || judged.done > moved) run.covered = false;
    const std::int32_t result = device.answer(judged.done, judged.bytes - judged.done);
    if (result == -EIO) run.failed = true;
    if (result > 0) moved = std::max(moved, judged.done + static_cast<std::uint32_t>(result));
    run.verdict = judge(judged, result).verdict;
  }
  if (run.verdict == Verdict::done && moved < judged.needed) run.covered = false;
  return run;
}

TEST(Simulation, every_request_ends_and_done_means_every_byte) {
  Dice dice(7);
  unsigned ended_count = 0;
  unsigned done_count = 0;
  for (std::uint32_t round = 0; round < 20'000; ++round) {
    const RequestKind kind = dice.coin() ? read : write;
    const std::uint32_t alignment = std::array<std::uint32_t, 3>{1, 512, 4096}[dice.below(3)];
    const std::uint32_t bytes = alignment * (1 + dice.below(64));
    const std::uint32_t needed = kind == read ? 1 + dice.below(bytes) : bytes;
    const std::uint64_t file_bytes = dice.coin() ? bytes : dice.below(bytes + 1);
    const std::uint32_t error_percent = dice.coin() ? 0 : 30;
    Whimsical device(round, file_bytes, kind, error_percent);
    const Simulated run = simulate(device, attempt(kind, bytes, needed, alignment));
    ASSERT_LT(run.steps, 100 * attempts_bound) << "round " << round;
    ASSERT_TRUE(run.covered) << "round " << round;
    ASSERT_TRUE(!run.failed || run.verdict == Verdict::fail) << "round " << round;
    ended_count += run.verdict == Verdict::ended ? 1 : 0;
    done_count += run.verdict == Verdict::done ? 1 : 0;
    if (run.verdict == Verdict::done && kind == read) {
      ASSERT_LE(needed, file_bytes) << "round " << round;
    }
  }
  EXPECT_GT(ended_count, 1000U);
  EXPECT_GT(done_count, 1000U);
}

// Devices that give whole sectors while they have any: every existing byte is read.
TEST(Simulation, an_honest_device_is_read_to_the_last_byte_or_to_its_end) {
  Dice dice(8);
  for (int round = 0; round < 20'000; ++round) {
    const std::uint32_t alignment = std::array<std::uint32_t, 3>{1, 512, 4096}[dice.below(3)];
    const std::uint32_t bytes = alignment * (1 + dice.below(64));
    const std::uint32_t needed = 1 + dice.below(bytes);
    const std::uint32_t file_bytes = dice.below(2 * bytes);
    Attempt judged = attempt(read, bytes, needed, alignment);
    Verdict verdict = Verdict::resume;
    for (unsigned steps = 0; verdict == Verdict::resume || verdict == Verdict::retry; ++steps) {
      ASSERT_LT(steps, 4 * attempts_bound);
      const std::uint32_t left = file_bytes > judged.done ? file_bytes - judged.done : 0;
      const std::uint32_t there = std::min(left, judged.bytes - judged.done);
      // Up to the end, or to some whole sectors before it.
      const bool whole = there <= alignment || dice.coin();
      const std::uint32_t given = whole ? there : alignment * (1 + dice.below(there / alignment));
      verdict = judge(judged, static_cast<std::int32_t>(given)).verdict;
    }
    ASSERT_EQ(verdict, needed <= file_bytes ? Verdict::done : Verdict::ended)
        << "round " << round << ": file of " << file_bytes << ", needed " << needed;
    if (verdict == Verdict::ended) {
      ASSERT_EQ(std::max(judged.done, judged.reached), file_bytes);
    }
  }
}

}  // namespace
}  // namespace tensorferry::handle
