// Memory that several rings register together: the kernel pins it once, as long as one of them uses
// it.
#include <fstream>
#include <thread>

#include "support/child.h"
#include "support/engine_contract.h"
#include "support/seccomp.h"

namespace tensorferry::engines {
namespace {

constexpr unsigned clone_buffers = 30;  // IORING_REGISTER_CLONE_BUFFERS
constexpr std::size_t memory_bytes = 4 * MiB;
constexpr std::size_t slack_bytes = 512 * KiB;

class SharedBuffers : public EngineContract {
 protected:
  void SetUp() override {
    EngineContract::SetUp();
    if (IsSkipped()) return;
    ASSERT_TRUE(pinned_falls_to(0)) << "what the last test had";
    const auto engine = open();
    if (engine->capabilities().buffers_max == 0) GTEST_SKIP() << "registers no buffers";
    engines_can_share_ = shares();
  }

  // The bytes that the kernel has pinned for this process.
  static std::size_t pinned_bytes() {
    std::ifstream lines("/proc/self/status");
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("VmPin:")) return std::stoull(line.substr(6)) * KiB;
    }
    return 0;
  }

  // The kernel lets go of what a ring had registered some time after the ring's end.
  static bool pinned_falls_to(std::size_t bytes) {
    const auto deadline = Clock::now() + hang_limit;
    while (pinned_bytes() > bytes) {
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  static bool shares() {
    const std::size_t before = pinned_bytes();
    const Memory memory(memory_bytes);
    const auto one = open();
    const auto other = open();
    EXPECT_EQ(one->share_buffer(0, memory.bytes(), 1), 0);
    EXPECT_EQ(other->share_buffer(0, memory.bytes(), 1), 0);
    const bool once = pinned_bytes() < before + 2 * memory_bytes;
    one->unregister_buffer(0);
    EXPECT_GE(pinned_bytes(), before + memory_bytes) << "the other still uses it";
    other->unregister_buffer(0);
    EXPECT_LE(pinned_bytes(), before + slack_bytes) << "at once";
    return once;
  }

  // Whether the engine reads into the memory as a registered buffer.
  ::testing::AssertionResult reads_into(Engine& engine, const Memory& memory, int index) {
    std::memset(memory.at(0), 0, 64 * KiB);
    Request read = request(RequestKind::read, memory.at(0), 64 * KiB, 128 * KiB);
    read.buffer_index = index;
    if (const int result = run(engine, read); result != 64 * KiB) {
      return ::testing::AssertionFailure() << result;
    }
    return holds(memory.at(0), 64 * KiB, 128 * KiB, seed);
  }

  bool engines_can_share_ = false;
};

INSTANTIATE_TEST_SUITE_P(Engines, SharedBuffers,
                         ::testing::Values(Tested{EngineKind::io_uring},
                                           Tested{EngineKind::io_uring, Polling::submission},
                                           Tested{EngineKind::io_uring, Polling::completion}),
                         ::testing::PrintToStringParamName());

TEST_P(SharedBuffers, are_pinned_once_until_the_last_engine_lets_go) {
  if (!engines_can_share_) GTEST_SKIP() << "the kernel is older than Linux 6.13";
  const std::size_t before = pinned_bytes();
  const Memory memory(memory_bytes);
  std::vector<std::unique_ptr<Engine>> engines;
  for (unsigned i = 0; i < 8; ++i) {
    engines.push_back(open());
    ASSERT_EQ(engines.back()->share_buffer(i, memory.bytes(), 7), 0);
    EXPECT_GE(pinned_bytes(), before + memory_bytes);
    EXPECT_LE(pinned_bytes(), before + memory_bytes + slack_bytes) << "engine " << i;
  }
  for (unsigned i = 0; i < 8; ++i)
    EXPECT_TRUE(reads_into(*engines[i], memory, static_cast<int>(i)));
  engines[0]->unregister_buffer(0);
  EXPECT_FALSE(reads_into(*engines[0], memory, 0)) << "an index that was let go";
  for (unsigned i = 1; i < 7; ++i) engines[i].reset();  // without letting go
  EXPECT_TRUE(reads_into(*engines[7], memory, 7));
  engines[7]->unregister_buffer(7);
  EXPECT_TRUE(pinned_falls_to(before + slack_bytes)) << pinned_bytes();
}

TEST_P(SharedBuffers, of_one_address_and_two_ids_are_two) {
  const std::size_t before = pinned_bytes();
  const auto one = open();
  const auto other = open();
  const Memory memory(memory_bytes);
  ASSERT_EQ(one->share_buffer(0, memory.bytes(), 8), 0);
  ASSERT_EQ(other->share_buffer(0, memory.bytes(), 9), 0);
  EXPECT_GE(pinned_bytes(), before + 2 * memory_bytes);
  EXPECT_TRUE(reads_into(*one, memory, 0));
  EXPECT_TRUE(reads_into(*other, memory, 0));
}

TEST_P(SharedBuffers, have_indexes_below_the_limit) {
  const auto engine = open();
  const Memory memory(memory_bytes);
  EXPECT_LT(engine->share_buffer(engine->capabilities().buffers_max, memory.bytes(), 10), 0);
  const UntouchedMemory large(registered_buffer_bytes_max + 4096);
  EXPECT_LT(engine->share_buffer(0, large.bytes(), 11), 0);
}

TEST_P(SharedBuffers, outlive_the_engine_that_registered_first_while_it_reads) {
  auto first = open();
  const auto second = open();
  const Memory memory(depth * 256 * KiB);
  ASSERT_EQ(first->share_buffer(0, memory.bytes(), 12), 0);
  ASSERT_EQ(second->share_buffer(5, memory.bytes(), 12), 0);
  std::vector<Request> requests = reads(memory, 256 * KiB);
  for (Request& read : requests) read.buffer_index = 5;
  ASSERT_EQ(second->submit(requests).taken, depth);
  first.reset();
  second->unregister_buffer(5);
  for (const Completion& done : reap_all(*second, depth)) EXPECT_EQ(done.result, 256 * KiB);
  EXPECT_TRUE(holds(memory.at(0), depth * 256 * KiB, 0, seed));
}

TEST_P(SharedBuffers, are_registered_by_each_engine_where_the_kernel_cannot_share) {
  const auto child = support::run_in_child([this]() -> std::string {
    if (auto fault = support::refuse_ring_registration(clone_buffers, EINVAL); !fault.empty()) {
      return fault;
    }
    if (shares()) return "the memory is shared all the same";
    const std::size_t before = pinned_bytes();
    const Memory memory(memory_bytes);
    const auto one = open();
    const auto other = open();
    if (one->share_buffer(0, memory.bytes(), 13) != 0) return "the first is refused";
    if (other->share_buffer(1, memory.bytes(), 13) != 0) return "the second is refused";
    if (!reads_into(*one, memory, 0) || !reads_into(*other, memory, 1)) return "wrong bytes";
    one->unregister_buffer(0);
    other->unregister_buffer(1);
    return pinned_bytes() <= before + slack_bytes ? "" : "memory stays pinned";
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(SharedBuffers, of_a_parent_are_none_of_its_child) {
  const auto parents = open();
  const Memory memory(memory_bytes);
  ASSERT_EQ(parents->share_buffer(0, memory.bytes(), 14), 0);
  const auto child = support::run_in_child([this]() -> std::string {
    const std::size_t before = pinned_bytes();
    const Memory own(memory_bytes);
    const auto engine = open();
    if (const int refused = engine->share_buffer(0, own.bytes(), 15); refused != 0) {
      return std::to_string(refused);
    }
    if (pinned_bytes() < before + memory_bytes) return "the child pins nothing";
    return reads_into(*engine, own, 0) ? "" : "wrong bytes";
  });
  EXPECT_TRUE(child.passed()) << child;
  EXPECT_TRUE(reads_into(*parents, memory, 0));
}

}  // namespace
}  // namespace tensorferry::engines
