// F10: page-locked memory stays registered with the rings, within the memlock limit of an ordinary
// user that suffices for it once: with many workers, in handles that are opened again, and after a
// refusal.
#include <grp.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <sstream>

#include "rig.h"
#include "support/child.h"
#include "support/hang_limit.h"
#include "support/seccomp.h"

namespace tensorferry::faults::registration {
namespace {

using support::run_in_child;

constexpr std::uint32_t seed = 91;
// Together within the limit that systemd gives everybody: not even root may always raise it.
constexpr std::size_t memory_bytes = 4 * MiB;
constexpr std::size_t slack_bytes = 2 * MiB;
constexpr unsigned clone_buffers = 30;  // IORING_REGISTER_CLONE_BUFFERS

// Makes this process one of a user that nobody else is: the kernel charges what a user's rings have
// registered to the user. Returns "", or why that failed.
std::string become_ordinary(std::size_t memlock_bytes) {
  if (auto fault = support::limit_locked_memory(memlock_bytes); !fault.empty()) return fault;
  if (::geteuid() != 0) return {};
  const auto user = static_cast<uid_t>(100'000 + ::getpid());
  if (::setgroups(0, nullptr) != 0 || ::setgid(user) != 0 || ::setuid(user) != 0) return "setuid";
  return {};
}

class Registration : public ::testing::Test {
 protected:
  void SetUp() override {
    support::write_whole_file(dir_.file("data"), support::pattern(memory_bytes, 0, seed));
    if (auto opened = engines::open_engine(EngineKind::io_uring, 1, os::System::real());
        !opened.ok()) {
      GTEST_SKIP() << opened.error().what();
    }
    file_.emplace(File::open(dir_.file("data"), Access::read));
    if (!file_->direct()) GTEST_SKIP() << file_->direct_reason();
  }

  // Empty if the handle reads the file, and all its requests are on registered memory.
  std::string fixed_fault(Handle& handle, const PinnedBuffer& memory) {
    handle.read(memory.bytes(), *file_).wait();
    if (auto fault = support::pattern_fault(memory.bytes(), 0, seed); !fault.empty()) return fault;
    const Stats stats = handle.stats();
    if (stats.fixed_requests == stats.requests) return {};
    std::string fault = std::to_string(stats.fixed_requests) + " of " +
                        std::to_string(stats.requests) + " requests are on registered memory";
    for (const std::string& reason : stats.fallback_reasons) fault += "; " + reason;
    return fault;
  }

  // Whether the kernel can share memory between rings: from Linux 6.13 on.
  static bool rings_share_memory() {
    struct utsname facts{};
    unsigned major = 0;
    unsigned minor = 0;
    char dot = 0;
    if (::uname(&facts) != 0 || !(std::istringstream(facts.release) >> major >> dot >> minor)) {
      return true;
    }
    return major > 6 || (major == 6 && minor >= 13);
  }

  support::TempDir dir_;
  std::optional<File> file_;
};

TEST_F(Registration, one_to_eight_workers_need_the_memlock_limit_of_the_memory_once) {
  if (!rings_share_memory()) GTEST_SKIP() << "the kernel is older than Linux 6.13";
  const auto child = run_in_child([this]() -> std::string {
    if (auto fault = become_ordinary(memory_bytes + slack_bytes); !fault.empty()) return fault;
    const PinnedBuffer memory(memory_bytes);
    for (const unsigned workers : {1U, 2U, 4U, 8U}) {
      Handle handle({.engine = EngineKind::io_uring, .block_bytes = 64 * KiB, .workers = workers});
      for (int round = 0; round < 3; ++round) {
        const std::string fault = fixed_fault(handle, memory);
        if (!fault.empty()) return std::to_string(workers) + " workers: " + fault;
      }
    }
    return {};
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(Registration, two_handles_share_the_memory) {
  if (!rings_share_memory()) GTEST_SKIP() << "the kernel is older than Linux 6.13";
  const auto child = run_in_child([this]() -> std::string {
    if (auto fault = become_ordinary(memory_bytes + slack_bytes); !fault.empty()) return fault;
    const PinnedBuffer memory(memory_bytes);
    Handle one({.engine = EngineKind::io_uring, .workers = 2});
    Handle other({.engine = EngineKind::io_uring, .workers = 2});
    const std::string fault = fixed_fault(one, memory);
    return fault.empty() ? fixed_fault(other, memory) : fault;
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(Registration, a_handle_that_is_opened_again_registers_like_the_first) {
  const auto child = run_in_child([this]() -> std::string {
    if (auto fault = become_ordinary(memory_bytes + slack_bytes); !fault.empty()) return fault;
    const unsigned workers = rings_share_memory() ? 2 : 1;
    for (int round = 0; round < 20; ++round) {
      // Also new memory: what the last one pinned must be free again.
      const PinnedBuffer memory(memory_bytes);
      for (int handles = 0; handles < 2; ++handles) {
        Handle handle({.engine = EngineKind::io_uring, .workers = workers});
        const std::string fault = fixed_fault(handle, memory);
        if (!fault.empty()) return "round " + std::to_string(round) + ": " + fault;
        handle.close();
      }
    }
    return {};
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(Registration, slots_of_a_handle_that_is_opened_again_are_registered) {
  const auto child = run_in_child([this]() -> std::string {
    if (auto fault = become_ordinary(3 * MiB); !fault.empty()) return fault;
    for (int round = 0; round < 20; ++round) {
      Handle handle({.engine = EngineKind::io_uring, .workers = 1, .slot_bytes = 4 * MiB});
      GuardedMemory skewed(memory_bytes, 3);
      handle.read(skewed.bytes(), *file_, 0).wait();
      if (auto fault = skewed.fault(0, seed); !fault.empty()) return fault;
      const Stats stats = handle.stats();
      if (stats.bounced_bytes == 0 || stats.fixed_requests != stats.requests) {
        return "round " + std::to_string(round) + ": " + std::to_string(stats.fixed_requests) +
               " of " + std::to_string(stats.requests);
      }
      handle.close();
    }
    return {};
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(Registration, what_was_refused_is_registered_when_the_limit_allows_it) {
  const auto child = run_in_child([this]() -> std::string {
    if (auto fault = become_ordinary(memory_bytes + slack_bytes); !fault.empty()) return fault;
    const auto set_limit = [](std::size_t bytes) {
      const struct rlimit limit{bytes, memory_bytes + slack_bytes};
      return ::setrlimit(RLIMIT_MEMLOCK, &limit) == 0;
    };
    const PinnedBuffer memory(memory_bytes);
    if (!set_limit(MiB)) return "setrlimit";
    Handle handle({.engine = EngineKind::io_uring, .workers = 1});
    for (int round = 0; round < 3; ++round) handle.read(memory.bytes(), *file_).wait();
    const Stats refused = handle.stats();
    if (refused.fixed_requests != 0) return "memory over the limit is registered";
    if (refused.fallbacks != 1) return std::to_string(refused.fallbacks) + " fallbacks, not 1";
    if (!set_limit(memory_bytes + slack_bytes)) return "setrlimit";
    const auto deadline = std::chrono::steady_clock::now() + support::hang_limit;
    while (handle.stats().fixed_requests == 0) {
      if (std::chrono::steady_clock::now() > deadline) return "it is never tried again";
      handle.read(memory.bytes(), *file_).wait();
      if (auto fault = support::pattern_fault(memory.bytes(), 0, seed); !fault.empty())
        return fault;
    }
    return handle.stats().fallbacks == 1 ? "" : "another fallback";
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(Registration, without_sharing_in_the_kernel_each_ring_registers_what_the_limit_allows) {
  const auto child = run_in_child([this]() -> std::string {
    if (auto fault = support::refuse_ring_registration(clone_buffers, EINVAL); !fault.empty()) {
      return fault;
    }
    const PinnedBuffer memory(memory_bytes);
    {
      Handle handle({.engine = EngineKind::io_uring, .block_bytes = 64 * KiB, .workers = 4});
      if (auto fault = fixed_fault(handle, memory); !fault.empty()) return fault;
    }
    if (auto fault = become_ordinary(memory_bytes + slack_bytes); !fault.empty()) return fault;
    Handle one({.engine = EngineKind::io_uring, .workers = 1});
    if (auto fault = fixed_fault(one, memory); !fault.empty()) return fault;
    Handle more({.engine = EngineKind::io_uring, .block_bytes = 64 * KiB, .workers = 1});
    if (fixed_fault(more, memory).find("ulimit -l") == std::string::npos) {
      return "a second ring registers too, or does not say why not: " + fixed_fault(more, memory);
    }
    return support::pattern_fault(memory.bytes(), 0, seed);
  });
  EXPECT_TRUE(child.passed()) << child;
}

}  // namespace
}  // namespace tensorferry::faults::registration
