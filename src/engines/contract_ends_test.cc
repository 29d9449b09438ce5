// The contract of engines/engine.h on owners and ends: which thread may call an engine, and what is
// left of it.
#include <algorithm>
#include <fstream>
#include <future>
#include <thread>

#include "support/engine_contract.h"
#include "support/sanitizers.h"

namespace tensorferry::engines {
namespace {

std::size_t entries_of(const char* folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

// Threads of this process, less the kernel's own helpers of io_uring, which come and go.
std::size_t own_threads() {
  std::size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (!name.starts_with("iou-")) ++count;
  }
  return count;
}

// The kernel may list a joined thread for a moment longer.
std::size_t settled_threads(std::size_t wanted) {
  for (int i = 0; i < 500 && own_threads() > wanted; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return own_threads();
}

TEST_P(EngineContract, another_thread_than_the_opener_can_be_the_owner) {
  auto opened = GetParam().open(depth).or_throw();
  auto used = std::async(std::launch::async, [&] {
    EXPECT_EQ(opened->attach(), 0);
    const Memory memory(64 * KiB);
    if (opened->capabilities().buffers_max > 0) {
      EXPECT_EQ(opened->register_buffer(0, memory.bytes()), 0);
    }
    EXPECT_EQ(run(*opened, request(RequestKind::read, memory.at(0), 64 * KiB, 0)), 64 * KiB);
    EXPECT_TRUE(holds(memory.at(0), 64 * KiB, 0, seed));
    opened.reset();
  });
  used.get();
}

TEST_P(EngineContract, two_engines_in_two_threads_do_not_meet) {
  const auto scan = [this](std::uint64_t first_tag) {
    const auto engine = open();
    const Memory memory(depth * 4096);
    for (std::uint64_t round = 0; round < 50; ++round) {
      const auto requests = reads(memory, 4096, first_tag, round * depth * 4096);
      EXPECT_EQ(engine->submit(requests).taken, depth);
      for (const Completion& done : reap_all(*engine, depth)) {
        EXPECT_LT(done.tag - first_tag, depth) << "a completion of the other engine";
      }
      EXPECT_TRUE(holds(memory.at(0), depth * 4096, round * depth * 4096, seed));
    }
  };
  std::thread other([&] { scan(1'000'000); });
  scan(0);
  other.join();
}

TEST_P(EngineContract, an_engine_that_ends_leaves_no_descriptor_and_no_thread) {
  const Memory memory(4096);
  {  // ThreadSanitizer starts a thread of its own with the first one, and keeps it.
    const auto warm = open();
    ASSERT_EQ(run(*warm, request(RequestKind::read, memory.at(0), 4096, 0)), 4096);
  }
  const std::size_t descriptors = entries_of("/proc/self/fd");
  const std::size_t threads = settled_threads(support::thread_sanitized ? 2 : 1);
  for (int i = 0; i < 30; ++i) {
    const auto engine = open();
    ASSERT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 4096, 0)), 4096);
  }
  for (int i = 0; i < 30; ++i) {
    auto never_attached = GetParam().open(depth).or_throw();
  }
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_EQ(settled_threads(threads), threads);
}

TEST_P(EngineContract, many_engines_together_have_few_threads) {
  const std::size_t limit = std::max(4 * std::thread::hardware_concurrency(), 64U);
  const std::size_t count = limit / depth + 4;
  const std::size_t before = own_threads();
  std::vector<Memory> memories;
  std::vector<std::unique_ptr<Engine>> engines;
  for (std::size_t i = 0; i < count; ++i) {
    memories.emplace_back(depth * 4096);
    engines.push_back(open());
    ASSERT_EQ(engines.back()->submit(reads(memories.back(), 4096)).taken, depth);
  }
  EXPECT_LE(own_threads(), before + limit + count);
  for (auto& engine : engines) {
    for (const Completion& done : reap_all(*engine, depth)) EXPECT_EQ(done.result, 4096);
  }
}

TEST_P(EngineContract, an_engine_is_closed_in_programs_it_starts) {
  const auto engine = open();
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename().string());
    const std::string target = std::filesystem::read_symlink(entry.path()).string();
    if (!target.starts_with("anon_inode:")) continue;
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0) << target;
  }
}

}  // namespace
}  // namespace tensorferry::engines
