// Page-locked memory: its size and pages, who knows it, and its end.
#include "tensorferry/pinned_buffer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/alignment.h"
#include "memory/region.h"
#include "os/system.h"
#include "support/child.h"
#include "support/faulty_system.h"
#include "support/numa_system.h"
#include "support/sanitizers.h"
#include "support/seccomp.h"
#include "support/thrown.h"
#include "tensorferry/error.h"

namespace tensorferry::memory {
namespace {

int code_of_free(PinnedBuffer& buffer) {
  try {
    buffer.free();
  } catch (const Error& error) {
    return error.code();
  }
  return 0;
}

bool is_mapped(const std::byte* page) {
  return ::msync(const_cast<std::byte*>(page), page_bytes(), MS_ASYNC) == 0;
}

bool is_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

// The lines of /proc/self/smaps for the mappings of `bytes`, without their `name:`.
std::vector<std::string> smaps_lines(std::span<const std::byte> bytes, const std::string& name) {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  const std::uintptr_t end = begin + bytes.size();
  std::ifstream lines("/proc/self/smaps");
  std::vector<std::string> found;
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    std::uintptr_t from = 0;
    std::uintptr_t to = 0;
    char dash = 0;
    std::istringstream words(line);
    if (words >> std::hex >> from >> dash >> to && dash == '-') {
      inside = from < end && to > begin;
    } else if (inside && line.starts_with(name + ":")) {
      found.push_back(line.substr(name.size() + 1));
    }
  }
  return found;
}

std::uint64_t smaps_kib(std::span<const std::byte> bytes, const std::string& name) {
  std::uint64_t sum = 0;
  for (const std::string& line : smaps_lines(bytes, name)) sum += std::stoull(line);
  return sum;
}

std::uint64_t status_kib(const std::string& name) {
  std::ifstream lines("/proc/self/status");
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name + ":")) return std::stoull(line.substr(name.size() + 1));
  }
  return 0;
}

const std::vector<std::size_t> sizes{
    1,       100,     4095,        4096,    4097,        65'537,           MiB - 1,
    MiB,     MiB + 1, 2 * MiB - 1, 2 * MiB, 2 * MiB + 1, 3 * MiB + 12'345, 17 * MiB + 1,
    64 * MiB};

// --- Allocation ------------------------------------------------------------------------------

TEST(PinnedBuffer, is_zeroed_starts_a_page_and_is_as_long_as_asked) {
  for (const std::size_t bytes : sizes) {
    const PinnedBuffer buffer(bytes);
    EXPECT_EQ(buffer.size(), bytes);
    EXPECT_EQ(buffer.bytes().size(), bytes);
    EXPECT_TRUE(is_aligned(buffer.data(), page_bytes())) << bytes;
    ASSERT_TRUE(is_zero(buffer.bytes())) << bytes;
    std::fill(buffer.bytes().begin(), buffer.bytes().end(), std::byte{1});
  }
}

TEST(PinnedBuffer, takes_whole_pages_and_hardly_more_than_asked) {
  for (const std::size_t bytes : sizes) {
    const auto region = Region::create(bytes, os::System::real()).or_throw();
    const std::size_t mapped = region->mapped().size();
    EXPECT_EQ(mapped % page_bytes(), 0U);
    EXPECT_GE(mapped, bytes);
    EXPECT_LT(mapped, bytes + page_bytes());
    if (bytes >= MiB) {
      EXPECT_LE(static_cast<double>(mapped), 1.01 * static_cast<double>(bytes)) << bytes;
    }
  }
}

// Checks the address space and the resident memory of the process, not only what the Region says.
TEST(PinnedBuffer, grows_the_process_by_hardly_more_than_asked) {
  if (const char* why = support::no_memory_figures()) GTEST_SKIP() << why;
  for (const std::size_t bytes : {MiB, 3 * MiB + 4096, 33 * MiB + 1, 100 * MiB}) {
    const auto result = support::run_in_child([bytes]() -> std::string {
      const PinnedBuffer first(MiB);  // allocates what the process allocates only once
      const std::uint64_t size_before = status_kib("VmSize");
      const std::uint64_t resident_before = status_kib("VmRSS");
      const PinnedBuffer buffer(bytes);
      const std::uint64_t size_kib = status_kib("VmSize") - size_before;
      const std::uint64_t resident_kib = status_kib("VmRSS") - resident_before;
      const auto asked_kib = static_cast<double>(bytes) / KiB;
      // The kernel counts resident pages in batches: allow for some.
      if (static_cast<double>(size_kib) > 1.01 * asked_kib + 4) {
        return std::to_string(size_kib) + " KiB mapped";
      }
      if (static_cast<double>(resident_kib) > 1.01 * asked_kib + 1024) {
        return std::to_string(resident_kib) + " KiB resident";
      }
      return {};
    });
    EXPECT_TRUE(result.passed()) << bytes << ": " << result;
  }
}

TEST(PinnedBuffer, large_memory_is_made_of_huge_pages_or_says_why_not) {
  const PinnedBuffer buffer(64 * MiB);
  const std::uint64_t huge_kib = smaps_kib(buffer.bytes(), "AnonHugePages");
  EXPECT_TRUE(huge_kib >= 64 * KiB * 9 / 10 || !buffer.huge_page_reason().empty())
      << huge_kib << " KiB are huge";
  if (os::read_text("/sys/kernel/mm/transparent_hugepage/enabled").empty()) return;
  for (const std::string& flags : smaps_lines(buffer.bytes(), "VmFlags")) {
    EXPECT_NE(flags.find(" hg"), std::string::npos) << "the kernel was not asked for them";
  }
  EXPECT_NE(PinnedBuffer(MiB).huge_page_reason(), "") << "smaller than a huge page";
}

// Whether each page of the memory is in RAM right after the one before; nullopt if the kernel does
// not show this process where pages are.
std::optional<bool> is_one_piece_of_ram(std::span<const std::byte> bytes) {
  const auto first_page = reinterpret_cast<std::uintptr_t>(bytes.data()) / page_bytes();
  std::vector<std::uint64_t> entries(bytes.size() / page_bytes());
  const std::size_t entries_bytes = entries.size() * sizeof(std::uint64_t);
  const int pagemap = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  const ssize_t read = ::pread(pagemap, entries.data(), entries_bytes,
                               static_cast<off_t>(first_page * sizeof(std::uint64_t)));
  ::close(pagemap);
  constexpr std::uint64_t frame = (std::uint64_t{1} << 55) - 1;
  if (read != static_cast<ssize_t>(entries_bytes) || (entries.front() & frame) == 0) {
    return std::nullopt;
  }
  const auto not_next = [](std::uint64_t a, std::uint64_t b) {
    return (a & frame) + 1 != (b & frame);
  };
  return std::ranges::adjacent_find(entries, not_next) == entries.end();
}

TEST(PinnedBuffer, half_a_megabyte_is_one_piece_of_ram) {
  const PinnedBuffer large(2 * MiB);
  if (!large.huge_page_reason().empty()) GTEST_SKIP() << large.huge_page_reason();
  for (const std::size_t bytes : {256 * KiB, 512 * KiB, MiB, 2 * MiB - page_bytes()}) {
    const PinnedBuffer buffer(bytes);
    const std::optional<bool> one_piece = is_one_piece_of_ram(buffer.bytes());
    if (!one_piece) GTEST_SKIP() << "the kernel does not show where pages are";
    EXPECT_TRUE(*one_piece) << bytes;
  }
}

TEST(PinnedBuffer, of_less_than_a_huge_page_shares_one_with_others) {
  const auto result = support::run_in_child([]() -> std::string {
    const PinnedBuffer first(512 * KiB);
    auto second = std::make_unique<PinnedBuffer>(512 * KiB);
    const PinnedBuffer third(512 * KiB);
    if (second->data() != first.data() + 512 * KiB) return "the second lies elsewhere";
    if (third.data() != second->data() + 512 * KiB) return "the third lies elsewhere";
    std::ranges::fill(first.bytes(), std::byte{1});
    std::ranges::fill(third.bytes(), std::byte{3});
    second.reset();
    if (first.bytes().back() != std::byte{1} || third.bytes().front() != std::byte{3}) {
      return "the end of one touched its neighbours";
    }
    // The child has not got the rest of the page and must take another.
    const auto child = support::run_in_child([]() -> std::string {
      const PinnedBuffer own(512 * KiB);
      return is_zero(own.bytes()) ? "" : "it is not zeroed";
    });
    return child.passed() ? "" : "in a child it does not work";
  });
  EXPECT_TRUE(result.passed()) << result;
}

TEST(PinnedBuffer, is_locked_or_says_why_not) {
  if (const char* why = support::no_mlock()) GTEST_SKIP() << why;
  const PinnedBuffer buffer(4 * MiB);
  EXPECT_EQ(buffer.locked(), buffer.lock_reason().empty());
  const std::uint64_t locked_kib = smaps_kib(buffer.bytes(), "Locked");
  EXPECT_EQ(buffer.locked(), locked_kib == 4 * MiB / KiB) << locked_kib;
}

TEST(PinnedBuffer, of_no_bytes_works) {
  PinnedBuffer buffer(0);
  EXPECT_EQ(buffer.size(), 0U);
  EXPECT_NE(buffer.data(), nullptr);
  EXPECT_TRUE(buffer.bytes().empty());
  EXPECT_FALSE(is_pinned(buffer.bytes()));
  EXPECT_FALSE(is_pinned({buffer.data(), 1}));
  EXPECT_EQ(code_of_free(buffer), 0);
}

TEST(PinnedBuffer, more_than_there_is_is_an_error) {
  for (const std::size_t bytes :
       {std::size_t{1} << 47, std::size_t{1} << 62, (std::size_t{1} << 62) + 1, ~std::size_t{0}}) {
    try {
      const PinnedBuffer buffer(bytes);
      ADD_FAILURE() << bytes << " bytes were had";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ENOMEM);
      EXPECT_EQ(error.length(), bytes);
      EXPECT_FALSE(error.operation().empty());
      EXPECT_FALSE(error.hint().empty());
    }
  }
}

// --- Limits and refusals ---------------------------------------------------------------------

TEST(PinnedBuffer, over_the_memlock_limit_it_works_unlocked_and_says_how_to_raise_it) {
  if (const char* why = support::no_mlock()) GTEST_SKIP() << why;
  const auto result = support::run_in_child([]() -> std::string {
    constexpr std::size_t limit = 64 * KiB;
    if (std::string reason = support::limit_locked_memory(limit); !reason.empty()) return reason;
    PinnedBuffer large(8 * MiB);
    if (large.locked()) return "8 MiB are locked";
    std::fill(large.bytes().begin(), large.bytes().end(), std::byte{7});
    if (!is_pinned(large.bytes())) return "it does not count as page-locked memory";
    for (const char* word : {"65536", "ulimit -l", "8388608"}) {
      if (large.lock_reason().find(word) == std::string::npos) {
        return std::string(word) + " is not in: " + large.lock_reason();
      }
    }
    const PinnedBuffer small(16 * KiB);
    if (!small.locked()) return "16 KiB are not locked: " + small.lock_reason();
    return {};
  });
  EXPECT_TRUE(result.passed()) << result;
}

TEST(Region, refusals_of_the_kernel_are_reasons_and_not_errors) {
  support::FaultySystem system;
  system.add({.call = support::Call::lock, .error = EINVAL});
  system.add({.call = support::Call::advise, .times = 2, .error = EINVAL});
  const auto region = Region::create(4 * MiB, system).or_throw();
  EXPECT_NE(region->lock_reason().find("EINVAL"), std::string::npos) << region->lock_reason();
  EXPECT_NE(region->huge_page_reason().find("EINVAL"), std::string::npos);
  EXPECT_TRUE(is_zero(region->mapped()));
}

TEST(Region, without_memory_it_is_an_error) {
  support::FaultySystem system;
  system.add({.call = support::Call::map, .error = ENOMEM});
  const auto region = Region::create(4 * MiB, system);
  ASSERT_FALSE(region.ok());
  EXPECT_EQ(region.error().code(), ENOMEM);
}

// --- NUMA ------------------------------------------------------------------------------------

// Which of them come first: the policy of a mapping does not move pages that exist.
class NumaOrder : public support::NumaSystem {
 public:
  using NumaSystem::NumaSystem;
  int lock(std::byte* memory, std::size_t bytes) override {
    asked_before_lock = asked();
    return NumaSystem::lock(memory, bytes);
  }
  std::vector<std::string> asked_before_lock;
};

TEST(Region, pages_come_from_the_node) {
  NumaOrder system({{0, {0}}, {1, {1}}});
  const auto region = Region::create(MiB, system, 1).or_throw();
  EXPECT_EQ(region->numa_reason(), "");
  EXPECT_EQ(system.asked_before_lock, std::vector<std::string>{"1048576 bytes prefer 1"});
  EXPECT_EQ(system.asked(), system.asked_before_lock);
}

TEST(Region, asks_nothing_without_a_node_or_on_one_node) {
  support::NumaSystem two({{0, {0}}, {1, {1}}});
  EXPECT_TRUE(Region::create(MiB, two).ok());
  support::NumaSystem one({{0, {0, 1}}});
  EXPECT_TRUE(Region::create(MiB, one, 0).ok());
  EXPECT_TRUE(two.asked().empty());
  EXPECT_TRUE(one.asked().empty());
}

TEST(Region, works_and_says_why_if_the_kernel_refuses_the_node) {
  support::NumaSystem system({{0, {0}}, {1, {1}}});
  system.error = EPERM;
  const auto region = Region::create(MiB, system, 1).or_throw();
  EXPECT_NE(region->numa_reason().find("mbind for NUMA node 1: EPERM"), std::string::npos)
      << region->numa_reason();
  EXPECT_TRUE(is_zero(region->mapped()));
}

TEST(Region, a_hint_of_a_node_that_does_not_exist_is_ignored) {
  support::NumaSystem system({{0, {0}}, {2, {1}}});
  EXPECT_TRUE(Region::create(MiB, system, 1).ok());
  EXPECT_TRUE(system.asked().empty());
}

TEST(NumaNode, that_does_not_exist_is_an_error_that_names_the_nodes) {
  support::NumaSystem system({{0, {0}}, {2, {1}}});
  for (const int node : {-1, 0, 2}) EXPECT_TRUE(check_numa_node(node, system).ok()) << node;
  for (const int node : {-2, 1, 3}) {
    const Status checked = check_numa_node(node, system);
    ASSERT_FALSE(checked.ok());
    EXPECT_EQ(checked.error().code(), EINVAL);
    EXPECT_NE(std::string(checked.error().what()).find("the nodes of this machine: 0, 2"),
              std::string::npos)
        << checked.error().what();
  }
}

TEST(PinnedBuffer, takes_a_node_of_this_machine_and_no_other) {
  const std::vector<os::NumaNode> nodes = os::System::real().numa_nodes();
  PinnedBuffer buffer(MiB, {.numa_node = nodes.front().number});
  EXPECT_TRUE(is_zero(buffer.bytes()));
  const auto error = support::error_of(
      [&] { const PinnedBuffer none(MiB, {.numa_node = nodes.back().number + 1}); });
  EXPECT_EQ(error.code(), EINVAL);
}

// --- The end ---------------------------------------------------------------------------------

TEST(PinnedBuffer, can_be_freed_in_any_order) {
  std::mt19937 dice(1);
  std::vector<PinnedBuffer> buffers;
  for (int round = 0; round < 2000; ++round) {
    if (buffers.size() < 20 || dice() % 2 == 0) {
      buffers.emplace_back(1 + dice() % (256 * KiB));
      buffers.back().bytes().back() = std::byte{1};
    } else {
      std::swap(buffers[dice() % buffers.size()], buffers.back());
      const std::byte* data = buffers.back().data();
      ASSERT_TRUE(is_pinned({data, 1}));
      if (dice() % 2 == 0) buffers.back().free();
      buffers.pop_back();
      ASSERT_FALSE(is_pinned({data, 1}));
    }
  }
}

TEST(PinnedBuffer, gives_its_pages_back) {
  PinnedBuffer freed(MiB);
  auto dropped = std::make_unique<PinnedBuffer>(MiB);
  const std::byte* freed_data = freed.data();
  const std::byte* dropped_data = dropped->data();
  EXPECT_TRUE(is_mapped(freed_data) && is_mapped(dropped_data));
  freed.free();
  EXPECT_FALSE(is_mapped(freed_data));
  dropped.reset();
  EXPECT_FALSE(is_mapped(dropped_data));
}

TEST(PinnedBuffer, a_second_free_is_an_error_and_nothing_else) {
  PinnedBuffer buffer(KiB);
  const PinnedBuffer other(KiB);
  EXPECT_EQ(code_of_free(buffer), 0);
  EXPECT_EQ(code_of_free(buffer), EINVAL);
  EXPECT_EQ(code_of_free(buffer), EINVAL);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.size(), 0U);
  EXPECT_FALSE(buffer.locked());
  EXPECT_NE(buffer.lock_reason(), "");
  EXPECT_NE(buffer.huge_page_reason(), "");
  EXPECT_TRUE(is_pinned(other.bytes()));
}

TEST(PinnedBuffer, moves_and_leaves_nothing_behind) {
  PinnedBuffer first(KiB);
  const std::byte* data = first.data();
  PinnedBuffer second(std::move(first));
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(code_of_free(first), EINVAL);  // NOLINT(bugprone-use-after-move): that is the claim
  PinnedBuffer third(KiB);
  const std::byte* old = third.data();
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_FALSE(is_mapped(old)) << "what the target held is freed at once";
  EXPECT_EQ(code_of_free(second), EINVAL);  // NOLINT(bugprone-use-after-move)
  PinnedBuffer& same = third;
  third = std::move(same);
  EXPECT_EQ(third.data(), data);
  EXPECT_TRUE(is_pinned(third.bytes()));
}

// --- is_pinned -------------------------------------------------------------------------------

TEST(IsPinned, holds_for_views_wholly_inside_one_buffer) {
  PinnedBuffer buffer(10'000);
  const std::byte* data = buffer.data();
  EXPECT_TRUE(is_pinned(buffer.bytes()));
  EXPECT_TRUE(is_pinned({data, 1}));
  EXPECT_TRUE(is_pinned({data + 9'999, 1}));
  EXPECT_TRUE(is_pinned({data + 4'000, 6'000}));

  EXPECT_FALSE(is_pinned({}));
  EXPECT_FALSE(is_pinned({data + 5, 0}));
  EXPECT_FALSE(is_pinned({data, 10'001})) << "of the last page only what was asked for counts";
  EXPECT_FALSE(is_pinned({data + 9'999, 2}));
  EXPECT_FALSE(is_pinned({data + 10'000, 1}));
  EXPECT_FALSE(is_pinned({data - 1, 1}));
  EXPECT_FALSE(is_pinned({data - 1, 100}));
  EXPECT_FALSE(is_pinned({data, ~std::size_t{0}}));

  const std::vector<std::byte> ordinary(100);
  EXPECT_FALSE(is_pinned(ordinary));
  std::byte local{};
  EXPECT_FALSE(is_pinned({&local, 1}));
  buffer.free();
  EXPECT_FALSE(is_pinned({data, 1}));
}

TEST(IsPinned, does_not_hold_across_two_buffers) {
  std::vector<PinnedBuffer> buffers;
  for (int i = 0; i < 16; ++i) buffers.emplace_back(page_bytes());
  int neighbours = 0;
  for (const PinnedBuffer& a : buffers) {
    for (const PinnedBuffer& b : buffers) {
      if (a.data() + page_bytes() != b.data()) continue;
      ++neighbours;
      EXPECT_FALSE(is_pinned({a.data(), 2 * page_bytes()}));
    }
  }
  if (neighbours == 0) GTEST_SKIP() << "no two buffers were mapped side by side";
}

// --- The announcement of the end -------------------------------------------------------------

TEST(EndOfRegions, is_announced_once_for_each_registered_region) {
  const std::uint64_t before = ended_regions();
  std::atomic<int> heard{0};
  auto first = Region::create(KiB, os::System::real()).or_throw();
  auto second = Region::create(KiB, os::System::real()).or_throw();
  auto unregistered = Region::create(KiB, os::System::real()).or_throw();
  EXPECT_NE(first->id(), second->id());
  {
    const EndOfRegions listener([&heard] { ++heard; });
    const EndOfRegions another([&heard] { heard += 100; });
    first->mark_registered();
    first->mark_registered();
    second->mark_registered();
    unregistered.reset();
    EXPECT_EQ(heard, 0);
    const auto kept = first;
    first.reset();
    EXPECT_EQ(heard, 0) << "somebody still uses it";
  }
  EXPECT_EQ(ended_regions(), before + 1) << "the last user let go before the listeners went";
  EXPECT_EQ(heard, 101);
  second.reset();
  EXPECT_EQ(heard, 101) << "nobody listens any more";
  EXPECT_EQ(ended_regions(), before + 2);
}

TEST(EndOfRegions, comes_after_the_region_is_gone) {
  auto region = Region::create(KiB, os::System::real()).or_throw();
  const std::byte* data = region->data();
  const std::weak_ptr<Region> watched = region;
  std::optional<bool> gone;
  const EndOfRegions listener([&] { gone = watched.expired() && !is_mapped(data); });
  region->mark_registered();
  region.reset();
  EXPECT_EQ(gone, true);
}

// --- Threads and forks -----------------------------------------------------------------------

TEST(PinnedBuffer, many_threads_allocate_look_up_and_free) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint32_t seed = 0; seed < 8; ++seed) {
    threads.emplace_back([&wrong, seed] {
      std::mt19937 dice(seed);
      std::vector<PinnedBuffer> own;
      for (int i = 0; i < 500; ++i) {
        if (own.size() < 4 || dice() % 2 == 0) {
          own.emplace_back(1 + dice() % (64 * KiB));
          if (!is_zero(own.back().bytes())) ++wrong;
          std::fill(own.back().bytes().begin(), own.back().bytes().end(), std::byte{1});
        } else {
          own.erase(own.begin());
        }
        for (const PinnedBuffer& buffer : own) {
          if (!is_pinned(buffer.bytes())) ++wrong;
          if (is_pinned({buffer.data(), buffer.size() + 1})) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(PinnedBuffer, is_not_in_a_child_which_faults_where_it_touches_it) {
  if (const char* why = support::no_holes_in_children()) GTEST_SKIP() << why;
  PinnedBuffer buffer(4 * MiB);
  buffer.bytes().back() = std::byte{42};
  const volatile std::byte* const last = &buffer.bytes().back();
  const auto result = support::run_in_child([last]() -> std::string {
    (void)*last;
    return "it read what is not there";
  });
  EXPECT_TRUE(support::sanitized ? !result.passed() && result.text.empty()
                                 : result.signal == SIGSEGV)
      << result;
  EXPECT_EQ(buffer.bytes().back(), std::byte{42});
}

// A pointer from before the fork must never point to something else.
TEST(PinnedBuffer, of_the_parent_has_its_addresses_taken_in_a_child_also_when_it_is_freed) {
  PinnedBuffer buffer(4 * MiB);
  const auto bytes = buffer.bytes();
  const auto result = support::run_in_child([&]() -> std::string {
    for (const bool freed : {false, true}) {
      if (freed) buffer.free();
      void* const other = ::mmap(bytes.data(), bytes.size(), PROT_READ,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
      if (other != MAP_FAILED || errno != EEXIST) return "something else is there";
    }
    return {};
  });
  EXPECT_TRUE(result.passed()) << result;
}

TEST(PinnedBuffer, a_fork_at_any_moment_leaves_both_sides_working) {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&over] {
      while (!over) {
        auto region = Region::create(64 * KiB, os::System::real()).or_throw();
        list_region(region, KnownToCuda::yes);
        region->mark_registered();
        (void)find_region(region->mapped());
        unlist_region(*region);
      }
    });
  }
  const EndOfRegions listener([] {});
  PinnedBuffer inherited(MiB);
  inherited.bytes().front() = std::byte{42};
  for (int i = 0; i < 50; ++i) {
    const auto result = support::run_in_child([&inherited]() -> std::string {
      if (is_pinned(inherited.bytes())) return "the parent's buffer counts as the child's";
      PinnedBuffer own(MiB);
      if (!is_pinned(own.bytes())) return "a new buffer is not known";
      auto region = Region::create(KiB, os::System::real()).or_throw();
      region->mark_registered();
      region.reset();
      own.free();
      inherited.free();
      return {};
    });
    ASSERT_TRUE(result.passed()) << result;
    ASSERT_EQ(inherited.bytes().front(), std::byte{42});
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace tensorferry::memory
