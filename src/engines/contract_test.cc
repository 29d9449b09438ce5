// The contract of engines/engine.h, run on every engine over real files with O_DIRECT. An engine
// that passes can be used by the conductor.
#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <utility>

#include "support/engine_contract.h"

namespace tensorferry::engines {
namespace {

using namespace std::chrono_literals;

INSTANTIATE_TEST_SUITE_P(Engines, EngineContract,
                         ::testing::Values(Tested{EngineKind::io_uring},
                                           Tested{EngineKind::io_uring, Polling::submission},
                                           Tested{EngineKind::io_uring, Polling::completion},
                                           Tested{EngineKind::libaio}, Tested{EngineKind::threads}),
                         ::testing::PrintToStringParamName());

// ---- bytes and errors ---------------------------------------------------------------------------

TEST_P(EngineContract, what_is_written_is_read_back) {
  const auto engine = open();
  const Memory out(256 * KiB);
  const Memory in(256 * KiB);
  fill(out.at(0), 256 * KiB, 64 * KiB, 9);
  EXPECT_EQ(run(*engine, request(RequestKind::write, out.at(0), 256 * KiB, 64 * KiB)), 256 * KiB);
  EXPECT_EQ(run(*engine, request(RequestKind::read, in.at(0), 256 * KiB, 64 * KiB)), 256 * KiB);
  EXPECT_TRUE(holds(in.at(0), 256 * KiB, 64 * KiB, 9));
  EXPECT_EQ(run(*engine, request(RequestKind::read, in.at(0), 64 * KiB, 0)), 64 * KiB);
  EXPECT_TRUE(holds(in.at(0), 64 * KiB, 0, seed)) << "a write changed bytes beside it";
}

TEST_P(EngineContract, buffered_descriptors_work_at_any_alignment) {
  const auto engine = open();
  const Memory memory(8 * KiB);
  Request read = request(RequestKind::read, memory.at(8), 4096, 1000);
  read.fd = buffered_fd_;
  EXPECT_EQ(run(*engine, read), 4096);
  EXPECT_TRUE(holds(memory.at(8), 4096, 1000, seed));
  fill(memory.at(24), 80, 16, 11);
  Request write = request(RequestKind::write, memory.at(24), 80, 16);
  write.fd = buffered_fd_;
  EXPECT_EQ(run(*engine, write), 80);
  read = request(RequestKind::read, memory.at(0), 4096, 0);
  EXPECT_EQ(run(*engine, read), 4096);
  EXPECT_TRUE(holds(memory.at(16), 80, 16, 11)) << "direct and buffered descriptors disagree";
  EXPECT_TRUE(holds(memory.at(96), 4000, 96, seed));
}

TEST_P(EngineContract, a_bad_descriptor_is_ebadf) {
  const auto engine = open();
  const Memory memory(4096);
  for (const RequestKind kind :
       {RequestKind::read, RequestKind::write, RequestKind::sync_data, RequestKind::sync_full}) {
    Request bad = request(kind, memory.at(0), 4096, 0);
    bad.fd = 1'000'000;
    EXPECT_EQ(run(*engine, bad), -EBADF);
  }
  EXPECT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 4096, 0)), 4096)
      << "the engine is not usable after an error";
}

TEST_P(EngineContract, a_bad_request_does_not_hold_up_those_beside_it) {
  const auto engine = open();
  const Memory memory(depth * 4096);
  std::vector<Request> requests = reads(memory, 4096, 1);
  requests.resize(3);
  requests[1].fd = 1'000'000;
  std::map<std::uint64_t, int> results;
  std::size_t in_flight = 0;
  for (std::size_t next = 0; next < requests.size();) {
    const Submitted sent = engine->submit(std::span(requests).subspan(next));
    next += sent.taken;
    in_flight += sent.taken;
    if (sent.error != 0) {
      ASSERT_EQ(sent.error, EBADF);
      results[requests[next++].tag] = -sent.error;
    }
  }
  for (const Completion& done : reap_all(*engine, in_flight)) results[done.tag] = done.result;
  EXPECT_EQ(results, (std::map<std::uint64_t, int>{{1, 4096}, {2, -EBADF}, {3, 4096}}));
}

TEST_P(EngineContract, a_read_over_the_end_is_short_and_past_it_is_zero) {
  const auto engine = open();
  const Memory memory(64 * KiB);
  ASSERT_EQ(::ftruncate(buffered_fd_, 20'000), 0);
  EXPECT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 64 * KiB, 0)), 20'000);
  EXPECT_TRUE(holds(memory.at(0), 20'000, 0, seed));
  EXPECT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 4096, 1 * MiB)), 0);
}

// On allocated data: holes are read at any alignment.
TEST_P(EngineContract, an_unaligned_direct_request_is_einval) {
  const auto engine = open();
  const Memory memory(8 * KiB);
  EXPECT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 4096, 1)), -EINVAL);
  EXPECT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 511, 0)), -EINVAL);
  EXPECT_EQ(run(*engine, request(RequestKind::write, memory.at(0), 511, 0)), -EINVAL);
  EXPECT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 4096, 0)), 4096);
}

TEST_P(EngineContract, a_write_without_permission_is_an_error) {
  const auto engine = open();
  const Memory memory(4096);
  Request write = request(RequestKind::write, memory.at(0), 4096, 0);
  write.fd = ::open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  EXPECT_EQ(run(*engine, write), -EBADF);
  ::close(write.fd);
}

TEST_P(EngineContract, offsets_reach_past_2_and_4_gib_and_1_tib) {
  const auto engine = open();
  const Memory out(8 * KiB);
  const Memory in(8 * KiB);
  for (const std::uint64_t edge : {2 * GiB, 4 * GiB, std::size_t{1} << 40}) {
    const std::uint64_t offset = edge - 4 * KiB;
    fill(out.at(0), 8 * KiB, offset, 13);
    ASSERT_EQ(run(*engine, request(RequestKind::write, out.at(0), 8 * KiB, offset)), 8 * KiB);
    ASSERT_EQ(run(*engine, request(RequestKind::read, in.at(0), 8 * KiB, offset)), 8 * KiB);
    EXPECT_TRUE(holds(in.at(0), 8 * KiB, offset, 13));
  }
  EXPECT_EQ(run(*engine, request(RequestKind::read, in.at(0), 8 * KiB, 0)), 8 * KiB);
  EXPECT_TRUE(holds(in.at(0), 8 * KiB, 0, seed)) << "an offset wrapped round";
}

TEST_P(EngineContract, the_longest_request_is_a_gibibyte) {
  const auto engine = open();
  const UntouchedMemory memory(GiB);
  ASSERT_EQ(::ftruncate(buffered_fd_, 2 * GiB), 0);
  EXPECT_EQ(run(*engine, request(RequestKind::read, memory.at(0), GiB, 0)), GiB);
  EXPECT_TRUE(holds(memory.at(0), file_bytes, 0, seed));
}

TEST_P(EngineContract, sync_data_and_sync_full_return_zero) {
  const auto engine = open();
  const Memory memory(4096);
  EXPECT_EQ(run(*engine, request(RequestKind::write, memory.at(0), 4096, 0)), 4096);
  EXPECT_EQ(run(*engine, request(RequestKind::sync_data, nullptr, 0, 0)), 0);
  EXPECT_EQ(run(*engine, request(RequestKind::sync_full, nullptr, 0, 0)), 0);
  Request buffered = request(RequestKind::sync_full, nullptr, 0, 0);
  buffered.fd = buffered_fd_;
  EXPECT_EQ(run(*engine, buffered), 0);
}

TEST_P(EngineContract, a_directory_can_be_synced) {
  const auto engine = open();
  Request sync = request(RequestKind::sync_full, nullptr, 0, 0);
  sync.fd = ::open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_GE(sync.fd, 0);
  EXPECT_EQ(run(*engine, sync), 0);
  ::close(sync.fd);
}

// ---- exactly once, whatever the order -----------------------------------------------------------

TEST_P(EngineContract, every_request_completes_exactly_once_at_full_depth) {
  constexpr std::size_t total = 3000;
  constexpr std::size_t slot_bytes = 64 * KiB;
  const auto engine = open();
  const Memory memory(depth * slot_bytes);
  std::mt19937_64 dice(3);
  std::map<std::uint64_t, Request> in_flight;
  std::vector<std::size_t> free_slots(depth);
  for (std::size_t i = 0; i < depth; ++i) free_slots[i] = i;
  std::vector<Completion> done(depth);
  std::size_t offered = 0;
  std::size_t completed = 0;
  const auto deadline = Clock::now() + hang_limit;
  while (completed < total) {
    ASSERT_LT(Clock::now(), deadline) << completed << " of " << total;
    std::vector<Request> batch;
    while (!free_slots.empty() && offered < total) {
      const std::size_t bytes = (1 + dice() % 16) * 4096;
      const std::uint64_t offset = dice() % (file_bytes / 4096 - 16) * 4096;
      std::byte* place = memory.at(free_slots.back() * slot_bytes);
      free_slots.pop_back();
      const bool write = dice() % 4 == 0;
      if (write) fill(place, bytes, offset, seed);  // the same bytes, so order does not matter
      if (!write) std::memset(place, 0, bytes);
      batch.push_back(request(write ? RequestKind::write : RequestKind::read, place, bytes, offset,
                              1000 + offered++));
    }
    for (std::size_t next = 0; next < batch.size();) {
      const Submitted sent = engine->submit(std::span(batch).subspan(next));
      ASSERT_GT(sent.taken, 0U) << sent.error;
      for (std::size_t i = 0; i < sent.taken; ++i, ++next) {
        in_flight[batch[next].tag] = batch[next];
      }
    }
    const int got = reap(*engine, done, Engine::forever);
    ASSERT_GE(got, 0);
    for (int i = 0; i < got; ++i) {
      const auto [tag, result] = done[static_cast<std::size_t>(i)];
      const auto found = in_flight.find(tag);
      ASSERT_NE(found, in_flight.end()) << "tag " << tag << " twice or never asked for";
      const Request& asked = found->second;
      ASSERT_EQ(result, static_cast<int>(asked.bytes));
      ASSERT_TRUE(holds(asked.memory, asked.bytes, asked.offset, seed));
      free_slots.push_back(static_cast<std::size_t>(asked.memory - memory.at(0)) / slot_bytes);
      in_flight.erase(found);
      ++completed;
    }
  }
  expect_nothing_more(*engine);
}

TEST_P(EngineContract, submit_takes_no_more_than_depth) {
  const auto engine = open();
  constexpr std::uint64_t total = 3 * depth + 1;
  const Memory memory(total * 4096);
  std::vector<Request> requests;
  for (std::uint64_t i = 0; i < total; ++i) {
    requests.push_back(request(RequestKind::read, memory.at(i * 4096), 4096, 0, i));
  }
  std::vector<bool> seen(requests.size());
  for (std::size_t next = 0; next < requests.size();) {
    const Submitted sent = engine->submit(std::span(requests).subspan(next));
    ASSERT_GT(sent.taken, 0U);
    ASSERT_LE(sent.taken, depth);
    if (sent.taken < requests.size() - next) {
      EXPECT_GT(sent.error, 0) << "a refusal says why";
    } else {
      EXPECT_EQ(sent.error, 0);
    }
    const Submitted more = engine->submit(std::span(requests).subspan(next + sent.taken));
    EXPECT_LE(sent.taken + more.taken, depth);
    next += sent.taken + more.taken;
    for (const Completion& done : reap_all(*engine, sent.taken + more.taken)) {
      ASSERT_LT(done.tag, seen.size());
      EXPECT_FALSE(seen[done.tag]) << "twice";
      seen[done.tag] = true;
      EXPECT_EQ(done.result, 4096);
    }
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), static_cast<long>(requests.size()));
  expect_nothing_more(*engine);
}

TEST_P(EngineContract, submitting_nothing_takes_nothing) {
  const auto engine = open();
  const Submitted sent = engine->submit({});
  EXPECT_EQ(sent.taken, 0U);
  EXPECT_EQ(sent.error, 0);
}

TEST_P(EngineContract, completions_that_do_not_fit_come_with_the_next_reap) {
  const auto engine = open();
  const Memory memory(depth * 4096);
  const std::vector<Request> requests = reads(memory, 4096);
  ASSERT_EQ(engine->submit(requests).taken, depth);
  std::vector<bool> seen(depth);
  const auto deadline = Clock::now() + hang_limit;
  for (unsigned count = 0; count < depth && Clock::now() < deadline;) {
    Completion one;
    const int got = reap(*engine, std::span(&one, 1), 1s);
    ASSERT_GE(got, 0);
    ASSERT_LE(got, 1);
    if (got == 0) continue;
    EXPECT_FALSE(seen.at(one.tag));
    seen.at(one.tag) = true;
    ++count;
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), false), 0);
}

TEST_P(EngineContract, a_depth_of_one_works) {
  const auto engine = open(1);
  const Memory memory(4096);
  for (std::uint64_t i = 0; i < 100; ++i) {
    ASSERT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 4096, i * 4096, i)), 4096);
    ASSERT_TRUE(holds(memory.at(0), 4096, i * 4096, seed));
  }
}

// ---- waiting and waking -------------------------------------------------------------------------

TEST_P(EngineContract, reap_with_a_zero_limit_does_not_wait) {
  const auto engine = open();
  std::vector<Completion> some(depth);
  for (int i = 0; i < 100; ++i) ASSERT_EQ(reap(*engine, some, 0ns), 0);
}

TEST_P(EngineContract, reap_returns_when_its_limit_has_passed) {
  const auto engine = open();
  std::vector<Completion> some(depth);
  const auto begin = Clock::now();
  while (Clock::now() - begin < 50ms) ASSERT_EQ(reap(*engine, some, 10ms), 0);
  const auto one = Clock::now();
  EXPECT_EQ(reap(*engine, some, 1500ms), 0);
  EXPECT_GE(Clock::now() - one, 1400ms) << "returned for no reason";
  EXPECT_LT(Clock::now() - one, hang_limit);
}

TEST_P(EngineContract, a_zero_limit_finds_what_has_completed) {
  const auto engine = open();
  const Memory memory(4096);
  const Request read = request(RequestKind::read, memory.at(0), 4096, 0);
  ASSERT_EQ(engine->submit(std::span(&read, 1)).taken, 1U);
  Completion done;
  const auto deadline = Clock::now() + hang_limit;
  while (reap(*engine, std::span(&done, 1), 0ns) == 0) ASSERT_LT(Clock::now(), deadline);
  EXPECT_EQ(done.result, 4096);
}

TEST_P(EngineContract, wake_ends_a_reap_that_waits_for_ever) {
  const auto engine = open();
  std::vector<Completion> some(depth);
  for (int round = 0; round < 20; ++round) {
    std::thread waker([&] {
      std::this_thread::sleep_for(2ms);
      engine->wake();
    });
    EXPECT_EQ(reap(*engine, some, Engine::forever), 0);
    waker.join();
  }
}

TEST_P(EngineContract, a_wake_before_reap_is_not_lost) {
  const auto engine = open();
  const Memory memory(4096);
  std::vector<Completion> some(depth);
  for (int round = 0; round < 100; ++round) {
    engine->wake();
    EXPECT_EQ(reap(*engine, some, Engine::forever), 0);
  }
  for (int round = 0; round < 100; ++round) {
    const Request read = request(RequestKind::read, memory.at(0), 4096, 0);
    engine->wake();
    ASSERT_EQ(engine->submit(std::span(&read, 1)).taken, 1U);
    int got = 0;
    for (int calls = 0; got == 0 && calls < 1000; ++calls) got = reap(*engine, some, 1s);
    ASSERT_EQ(got, 1);
    engine->wake();
    while (reap(*engine, some, Engine::forever) != 0) FAIL() << "a completion from nowhere";
  }
}

TEST_P(EngineContract, many_wakes_from_many_threads_lose_no_completion) {
  const auto engine = open();
  const Memory memory(depth * 4096);
  std::atomic<bool> stop{false};
  std::vector<std::thread> wakers;
  for (int i = 0; i < 3; ++i) {
    wakers.emplace_back([&] {
      while (!stop) {
        engine->wake();
        std::this_thread::sleep_for(20us);
      }
    });
  }
  for (std::uint64_t round = 0; round < 200; ++round) {
    const Submitted sent = engine->submit(reads(memory, 4096));
    EXPECT_EQ(sent.taken, depth);
    std::vector<int> seen(depth);
    for (const Completion& done : reap_all(*engine, sent.taken)) ++seen.at(done.tag);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), depth);
    if (HasFailure()) break;
  }
  stop = true;
  for (std::thread& waker : wakers) waker.join();
}

// ---- cancelling ---------------------------------------------------------------------------------

TEST_P(EngineContract, a_cancelled_request_still_completes_exactly_once) {
  const auto engine = open();
  const Memory memory(depth * 512 * KiB);
  for (int round = 0; round < 20; ++round) {
    const std::vector<Request> requests = reads(memory, 512 * KiB, 100);
    ASSERT_EQ(engine->submit(requests).taken, depth);
    for (const Request& asked : requests) engine->cancel(asked.tag);
    std::vector<int> seen(depth);
    for (const Completion& done : reap_all(*engine, depth)) {
      ++seen.at(done.tag - 100);
      EXPECT_TRUE(done.result == 512 * KiB || done.result == -ECANCELED || done.result == -EINTR)
          << done.result;
    }
    ASSERT_EQ(std::count(seen.begin(), seen.end(), 1), depth);
  }
  expect_nothing_more(*engine);
}

TEST_P(EngineContract, cancelling_what_is_not_there_does_nothing) {
  const auto engine = open();
  const Memory memory(4096);
  for (std::uint64_t tag = 0; tag < 4 * depth; ++tag) engine->cancel(tag);
  expect_nothing_more(*engine);
  EXPECT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 4096, 0)), 4096);
}

// ---- registration -------------------------------------------------------------------------------

TEST_P(EngineContract, capabilities_are_sane) {
  const auto engine = open();
  EXPECT_EQ(engine->kind(), GetParam().kind);
  const Capabilities facts = engine->capabilities();
  EXPECT_LE(facts.buffers_max, 1U << 14);
  EXPECT_LE(facts.files_max, 1U << 15);
  EXPECT_GE(engine->cpu_seconds(), 0);
  const Memory memory(4096);
  EXPECT_LT(engine->register_buffer(facts.buffers_max, memory.bytes()), 0) << "out of range";
  EXPECT_LT(engine->register_file(facts.files_max, fd_), 0) << "out of range";
}

TEST_P(EngineContract, registered_buffers_are_used_let_go_and_replaced) {
  const auto engine = open();
  if (engine->capabilities().buffers_max < 2) GTEST_SKIP() << "registers no buffers";
  const Memory first(1 * MiB);
  const Memory second(1 * MiB);
  for (int round = 0; round < 5; ++round) {
    ASSERT_EQ(engine->register_buffer(0, first.bytes()), 0);
    ASSERT_EQ(engine->register_buffer(1, second.bytes()), 0);
    Request read = request(RequestKind::read, first.at(8 * KiB), 64 * KiB, 128 * KiB);
    read.buffer_index = 0;
    EXPECT_EQ(run(*engine, read), 64 * KiB);
    EXPECT_TRUE(holds(first.at(8 * KiB), 64 * KiB, 128 * KiB, seed));
    fill(second.at(0), 1 * MiB, 1 * MiB, seed);
    Request write = request(RequestKind::write, second.at(0), 1 * MiB, 1 * MiB);
    write.buffer_index = 1;
    EXPECT_EQ(run(*engine, write), 1 * MiB);
    write.buffer_index = 0;
    EXPECT_LT(run(*engine, write), 0) << "the memory of another index";

    engine->unregister_buffer(0);
    EXPECT_LT(run(*engine, read), 0) << "an index that was let go";
    ASSERT_EQ(engine->register_buffer(0, second.bytes()), 0) << "the index is free again";
    read.memory = second.at(0);
    EXPECT_EQ(run(*engine, read), 64 * KiB);
    EXPECT_TRUE(holds(second.at(0), 64 * KiB, 128 * KiB, seed));
    engine->unregister_buffer(0);
    engine->unregister_buffer(1);
    engine->unregister_buffer(1);  // never fails
  }
}

TEST_P(EngineContract, requests_in_flight_keep_a_buffer_that_is_let_go) {
  const auto engine = open();
  if (engine->capabilities().buffers_max == 0) GTEST_SKIP() << "registers no buffers";
  for (int round = 0; round < 20; ++round) {
    const Memory memory(depth * 256 * KiB);
    ASSERT_EQ(engine->register_buffer(3, memory.bytes()), 0);
    std::vector<Request> requests = reads(memory, 256 * KiB);
    for (Request& read : requests) read.buffer_index = 3;
    ASSERT_EQ(engine->submit(requests).taken, depth);
    engine->unregister_buffer(3);
    for (const Completion& done : reap_all(*engine, depth)) EXPECT_EQ(done.result, 256 * KiB);
    ASSERT_TRUE(holds(memory.at(0), depth * 256 * KiB, 0, seed));
  }
}

TEST_P(EngineContract, a_buffer_over_a_gibibyte_is_refused) {
  const auto engine = open();
  const UntouchedMemory memory(registered_buffer_bytes_max + 4096);
  EXPECT_LT(engine->register_buffer(0, memory.bytes()), 0);
}

TEST_P(EngineContract, a_registered_file_outlives_its_descriptor) {
  const auto engine = open();
  if (engine->capabilities().files_max == 0) GTEST_SKIP() << "registers no files";
  const Memory memory(64 * KiB);
  for (int round = 0; round < 5; ++round) {
    const int fd = ::open(path_.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
    ASSERT_EQ(engine->register_file(2, fd), 0);
    ::close(fd);
    for (const RequestKind kind : {RequestKind::read, RequestKind::write}) {
      Request through_index = request(kind, memory.at(0), 64 * KiB, 64 * KiB);
      through_index.fd = -1;
      through_index.file_index = 2;
      EXPECT_EQ(run(*engine, through_index), 64 * KiB);
    }
    EXPECT_TRUE(holds(memory.at(0), 64 * KiB, 64 * KiB, seed));
    Request sync = request(RequestKind::sync_data, nullptr, 0, 0);
    sync.fd = -1;
    sync.file_index = 2;
    EXPECT_EQ(run(*engine, sync), 0);
    engine->unregister_file(2);
    sync.kind = RequestKind::read;
    EXPECT_EQ(run(*engine, sync), -EBADF) << "an index that was let go";
    engine->unregister_file(2);  // never fails
  }
}

TEST_P(EngineContract, requests_in_flight_keep_a_file_that_is_let_go) {
  const auto engine = open();
  if (engine->capabilities().files_max == 0) GTEST_SKIP() << "registers no files";
  const Memory memory(depth * 256 * KiB);
  for (int round = 0; round < 20; ++round) {
    const int fd = ::open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    ASSERT_EQ(engine->register_file(0, fd), 0);
    ::close(fd);
    std::vector<Request> requests = reads(memory, 256 * KiB);
    for (Request& read : requests) read.file_index = 0;
    ASSERT_EQ(engine->submit(requests).taken, depth);
    engine->unregister_file(0);
    for (const Completion& done : reap_all(*engine, depth)) EXPECT_EQ(done.result, 256 * KiB);
  }
}

}  // namespace
}  // namespace tensorferry::engines
