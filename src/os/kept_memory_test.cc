// Memory that children of fork() do not get: what the child and the parent see.
#include "os/kept_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <optional>
#include <string>
#include <thread>

#include "base/alignment.h"
#include "support/child.h"
#include "support/faulty_system.h"
#include "support/sanitizers.h"

namespace tensorferry::os {
namespace {

class KeptMemory : public ::testing::Test {
 protected:
  ~KeptMemory() override { System::real().unmap(memory.data(), memory.size()); }

  const std::size_t bytes = 4 * page_bytes();
  const std::span<std::byte> memory{System::real().map(bytes), bytes};
};

void* map_at(std::span<std::byte> memory) {
  return ::mmap(memory.data(), memory.size(), PROT_READ,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
}

bool faults(const support::ChildResult& result) {
  return support::sanitized ? result.exit_code > 0 && result.text.empty()
                            : result.signal == SIGSEGV;
}

TEST_F(KeptMemory, is_not_in_a_child_which_faults_where_it_touches_it) {
  memory.front() = std::byte{42};
  const KeptFromChildren kept(System::real(), memory);
  const volatile std::byte* const last = &memory.back();
  EXPECT_TRUE(faults(support::run_in_child([last]() -> std::string {
    (void)*last;
    return "it read what is not there";
  })));
  EXPECT_EQ(memory.front(), std::byte{42});
}

TEST_F(KeptMemory, has_its_addresses_taken_in_a_child_for_good) {
  std::optional<KeptFromChildren> kept(std::in_place, System::real(), memory);
  const auto result = support::run_in_child([&]() -> std::string {
    for (const bool ended : {false, true}) {
      if (ended) kept.reset();
      if (map_at(memory) != MAP_FAILED) return "something else is at its addresses";
      if (errno != EEXIST) return "errno " + std::to_string(errno);
      if (!kept_by_parent(memory)) return "nobody knows of it";
    }
    const auto grandchild = support::run_in_child([this]() -> std::string {
      if (map_at(memory) != MAP_FAILED) return "a grandchild has its addresses free";
      return kept_by_parent(memory) ? "" : "a grandchild does not know of it";
    });
    return grandchild.passed() ? "" : grandchild.text;
  });
  EXPECT_TRUE(result.passed()) << result;
}

TEST_F(KeptMemory, is_known_by_any_of_its_bytes_and_only_in_a_child) {
  const std::size_t page = page_bytes();
  const auto middle = memory.subspan(page, 2 * page);
  const KeptFromChildren kept(System::real(), middle);
  EXPECT_FALSE(kept_by_parent(middle));
  const auto result = support::run_in_child([&]() -> std::string {
    std::array<std::byte, 1> other{};
    if (kept_by_parent(other)) return "other memory";
    if (kept_by_parent(memory.first(page))) return "the page before";
    if (kept_by_parent(memory.last(page))) return "the page after";
    if (kept_by_parent(middle.first(0))) return "no memory at all";
    for (const auto part : {memory, memory.first(page + 1), memory.last(page + 1), middle,
                            middle.first(1), middle.last(1), middle.subspan(5, 7)}) {
      if (!kept_by_parent(part)) return "a part is not known";
    }
    return {};
  });
  EXPECT_TRUE(result.passed()) << result;
}

TEST_F(KeptMemory, that_is_kept_no_more_is_any_memory) {
  memory.front() = std::byte{42};
  // Normally the owner unmaps the memory then; this test undoes the advice instead.
  std::optional<KeptFromChildren> kept(std::in_place, System::real(), memory);
  kept.reset();
  ASSERT_EQ(System::real().advise(memory.data(), memory.size(), MADV_DOFORK), 0);
  const auto result = support::run_in_child([this]() -> std::string {
    if (kept_by_parent(memory)) return "it counts as kept";
    return memory.front() == std::byte{42} ? "" : "the bytes are others";
  });
  EXPECT_TRUE(result.passed()) << result;
}

TEST_F(KeptMemory, that_the_kernel_does_not_keep_is_inherited_and_not_said_to_be_kept) {
  support::FaultySystem system;
  system.add({.call = support::Call::advise, .error = EINVAL});
  const KeptFromChildren refused(system, memory);
  memory.front() = std::byte{42};
  const auto inherits = [this]() -> std::string {
    if (kept_by_parent(memory)) return "it counts as kept";
    if (memory.front() != std::byte{42}) return "the bytes are others";
    memory.front() = std::byte{1};
    return {};
  };
  EXPECT_TRUE(support::run_in_child(inherits).passed()) << "refused";
  const KeptFromChildren taken_back(System::real(), memory);
  ASSERT_EQ(System::real().advise(memory.data(), memory.size(), MADV_DOFORK), 0);
  EXPECT_TRUE(support::run_in_child(inherits).passed()) << "taken back";
  EXPECT_EQ(memory.front(), std::byte{42});
}

TEST_F(KeptMemory, is_inherited_alone_where_only_its_neighbours_are_kept) {
  const std::size_t page = page_bytes();
  const KeptFromChildren before(System::real(), memory.first(page));
  const KeptFromChildren taken_back(System::real(), memory.subspan(page, page));
  const KeptFromChildren after(System::real(), memory.last(2 * page));
  ASSERT_EQ(System::real().advise(memory.data() + page, page, MADV_DOFORK), 0);
  memory[page] = std::byte{42};
  const auto result = support::run_in_child([&]() -> std::string {
    if (memory[page] != std::byte{42}) return "the bytes are others";
    if (kept_by_parent(memory.subspan(page, page))) return "it counts as kept";
    for (const auto kept : {memory.first(page), memory.last(2 * page)}) {
      if (!kept_by_parent(kept) || map_at(kept) != MAP_FAILED) return "a neighbour is not held";
    }
    return {};
  });
  EXPECT_TRUE(result.passed()) << result;
}

TEST_F(KeptMemory, comes_and_goes_while_others_fork) {
  if (const char* why = support::no_fork_among_busy_threads()) GTEST_SKIP() << why;
  std::atomic<bool> over{false};
  std::thread busy([&] {
    while (!over) {
      std::byte* const own = System::real().map(page_bytes());
      {
        const KeptFromChildren kept(System::real(), {own, page_bytes()});
      }
      System::real().unmap(own, page_bytes());
    }
  });
  const KeptFromChildren kept(System::real(), memory);
  for (int i = 0; i < 100; ++i) {
    const auto result = support::run_in_child([this]() -> std::string {
      const bool there = map_at(memory) != MAP_FAILED;
      return !there && kept_by_parent(memory) ? "" : "it is not held";
    });
    EXPECT_TRUE(result.passed()) << "round " << i << ": " << result;
  }
  over = true;
  busy.join();
}

}  // namespace
}  // namespace tensorferry::os
