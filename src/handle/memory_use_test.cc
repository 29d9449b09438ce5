// The memory that a handle uses: slots within their bounds; page-locked memory registered once and
// unregistered when it is freed.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "handle/handle_fixture.h"
#include "memory/region.h"
#include "support/child.h"
#include "support/faulty_system.h"
#include "support/sanitizers.h"

namespace tensorferry::handle {
namespace {

using std::chrono::milliseconds;

bool is_mapped(const std::byte* page) {
  return ::msync(const_cast<std::byte*>(page), page_bytes(), MS_ASYNC) == 0;
}

// The memory that the kernel keeps pinned for this process, in KiB.
std::uint64_t pinned_kib() { return kernel_figure("/proc/self/status", "VmPin"); }

// Whether that falls to `limit_kib` before the hang limit. The worker unregisters memory by itself.
bool pinned_falls_to(std::uint64_t limit_kib) {
  const auto deadline = Operation::Clock::now() + hang_limit;
  while (pinned_kib() > limit_kib) {
    if (Operation::Clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

class MemoryUse : public HandleTest {};

// --- Slots -----------------------------------------------------------------------------------

// Moves `bytes` from and to memory that needs slots. Returns a complaint if that took too much
// memory.
std::string move_through_slots(const HandleOptions& options, const std::string& path,
                               std::size_t bytes) {
  Memory memory(bytes, 1);
  std::fill(memory.bytes().begin(), memory.bytes().end(), std::byte{1});
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak counts from here
  const std::uint64_t before = kernel_figure("/proc/self/status", "VmHWM");
  Handle handle(options);
  handle.write(memory.bytes(), path).wait();
  handle.read(memory.bytes(), path).wait();
  if (handle.stats().bounced_bytes < 2 * bytes - 4 * page_bytes()) return "not through slots";
  if (handle.stats().bounced_bytes > 2 * bytes) return "copied more than once";
  const std::uint64_t after = kernel_figure("/proc/self/status", "VmHWM");
  // Beside the slots: stacks, rings, the engine's own tables.
  const std::size_t slots = options.slot_bytes > 0 ? options.slot_bytes : 64 * MiB;
  const std::uint64_t limit = slots / KiB + 8 * KiB;
  if (after - before <= limit) return {};
  return "took " + std::to_string(after - before) + " KiB, more than " + std::to_string(limit);
}

TEST_P(MemoryUse, ordinary_memory_of_any_size_moves_through_bounded_slots) {
  if (const char* why = support::no_memory_figures()) GTEST_SKIP() << why;
  const std::vector<HandleOptions> all{
      {.engine = GetParam()},
      {.engine = GetParam(), .workers = 4},
      {.engine = GetParam(), .block_bytes = 8 * MiB, .queue_depth = 256},
      {.engine = GetParam(), .slot_bytes = 4 * MiB},
  };
  for (const HandleOptions& options : all) {
    const auto result = support::run_in_child(
        [&] { return move_through_slots(options, dir.file("data"), 512 * MiB); });
    EXPECT_TRUE(result.passed()) << result;
  }
}

TEST_P(MemoryUse, aligned_memory_needs_no_slots) {
  Handle handle(options());
  const PinnedBuffer memory(8 * MiB);
  handle.write(memory.bytes(), dir.file("data")).wait();
  handle.read(memory.bytes(), dir.file("data")).wait();
  EXPECT_EQ(handle.stats().bounced_bytes, 0U);
}

// A virtual disk handles each page by itself; others take any aligned memory as it is.
TEST_P(MemoryUse, aligned_memory_in_small_pages_needs_slots_on_virtual_disks_alone) {
  make_file("data", 1, 1);
  const Device device = device_of(dir.path());
  const bool direct = File::open(dir.file("data"), Access::read).direct();
  const std::uint64_t expected = direct && device.prefers_huge_pages ? 8 * MiB : 0;
  const support::UntouchedMemory mapped(12 * MiB);
  const auto first =
      align_up(reinterpret_cast<std::uintptr_t>(mapped.bytes().data()), huge_page_bytes);
  const std::span<std::byte> memory{reinterpret_cast<std::byte*>(first), 8 * MiB};
  const auto bounced = [&](std::span<std::byte> bytes) {
    Handle handle(options());
    support::fill_pattern(bytes, 0, 2);
    handle.write(bytes, dir.file("data")).wait();
    const std::uint64_t written = handle.stats().bounced_bytes;
    std::ranges::fill(bytes, std::byte{0});
    handle.read(bytes, dir.file("data")).wait();
    EXPECT_EQ(support::pattern_fault(bytes, 0, 2), "");
    EXPECT_EQ(handle.stats().bounced_bytes, 2 * written);
    return written;
  };
  ::madvise(memory.data(), memory.size(), MADV_NOHUGEPAGE);
  EXPECT_EQ(bounced(memory), expected);
  EXPECT_EQ(bounced(memory.first(256 * KiB)), 0U) << "a short transfer goes in place";
  ::madvise(memory.data(), memory.size(), MADV_DONTNEED);
  ::madvise(memory.data(), memory.size(), MADV_HUGEPAGE);
  support::fill_pattern(memory, 0, 2);
  const auto huge = os::System::real().huge_bytes(memory.data(), memory.size());
  if (huge < static_cast<std::int64_t>(memory.size())) GTEST_SKIP() << "no huge pages";
  EXPECT_EQ(bounced(memory), 0U);
}

// --- Fresh memory ----------------------------------------------------------------------------

// Notes which pages the handle made ahead of a read.
class CountsPages : public os::System {
 public:
  int advise(std::byte* memory, std::size_t bytes, int advice) override {
    constexpr int collapse = 25;  // MADV_COLLAPSE
    const bool lasts = advice == MADV_HUGEPAGE || advice == MADV_NOHUGEPAGE;
    if (lasts && memory >= users.data() && memory < users.data() + users.size()) ++lasting;
    if (advice != collapse) return 0;
    if (memory >= unfit.data() && memory < unfit.data() + unfit.size()) {
      ++refused;
      return -EINVAL;
    }
    for (std::size_t at = 0; at < bytes; at += huge_page_bytes) made.push_back(memory + at);
    std::fill_n(memory, bytes, std::byte{0});
    return 0;
  }
  int resident(std::byte* page) override {
    ++asked;
    return System::resident(page);
  }
  std::span<std::byte> users;
  std::span<std::byte> unfit;  // can have no huge pages
  std::vector<std::byte*> made;
  int refused = 0;
  int lasting = 0;  // advice that stays on the memory
  int asked = 0;    // whether a page is in memory
};

// In any order of the blocks: a small page that something touched first stays small.
TEST(FreshMemory, has_each_of_its_huge_pages_made_once_whatever_the_order) {
  constexpr std::size_t pages = 8;
  const support::TempDir dir;
  CountsPages system;
  for (const std::size_t skew : {std::size_t{0}, std::size_t{64}}) {  // in place; through slots
    for (const bool newest_first : {false, true}) {
      std::byte* const mapped = os::System::real().map((pages + 2) * huge_page_bytes);
      ASSERT_NE(mapped, nullptr);
      const auto first = align_up(reinterpret_cast<std::uintptr_t>(mapped), huge_page_bytes);
      auto* const begin = reinterpret_cast<std::byte*>(first) + 4 * KiB + skew;
      const std::span<std::byte> memory{begin, pages * huge_page_bytes};  // 7 of them whole
      support::write_whole_file(dir.file("data"), support::pattern(memory.size(), 0, 1));
      system.users = memory;
      system.made.clear();
      system.asked = 0;
      Gate gate;
      gate.newest_first = newest_first;
      gate.open();
      {
        Handle handle = gate.open_handle({.block_bytes = 512 * KiB}, &system);
        handle.read(memory, dir.file("data")).wait();
      }
      EXPECT_EQ(support::pattern_fault(memory, 0, 1), "");
      std::ranges::sort(system.made);
      EXPECT_EQ(system.made.size(), pages - 1)
          << "skew " << skew << (newest_first ? ", newest" : "");
      EXPECT_EQ(std::ranges::adjacent_find(system.made), system.made.end()) << "one was made twice";
      EXPECT_EQ(system.lasting, 0);
      EXPECT_LE(system.asked, 1) << "of one read";
      os::System::real().unmap(mapped, (pages + 2) * huge_page_bytes);
    }
  }
}

TEST(FreshMemory, that_can_have_no_huge_pages_leaves_them_to_other_memory) {
  constexpr std::size_t bytes = 4 * huge_page_bytes;
  const support::TempDir dir;
  support::write_whole_file(dir.file("data"), support::pattern(bytes, 0, 1));
  CountsPages system;
  std::byte* const mapped = os::System::real().map(3 * bytes);
  ASSERT_NE(mapped, nullptr);
  const auto first = align_up(reinterpret_cast<std::uintptr_t>(mapped), huge_page_bytes);
  const std::span<std::byte> both{reinterpret_cast<std::byte*>(first), 2 * bytes};
  system.unfit = both.first(bytes);
  Gate gate;
  gate.open();
  {
    Handle handle = gate.open_handle({.block_bytes = 512 * KiB}, &system);
    handle.read(both.first(bytes), dir.file("data")).wait();
    EXPECT_EQ(system.refused, 1) << "of one read";
    handle.read(both.last(bytes), dir.file("data")).wait();
  }
  EXPECT_EQ(system.made.size(), bytes / huge_page_bytes);
  EXPECT_EQ(support::pattern_fault(both.first(bytes), 0, 1), "");
  EXPECT_EQ(support::pattern_fault(both.last(bytes), 0, 1), "");
  os::System::real().unmap(mapped, 3 * bytes);
}

// The line of /proc/self/smaps with the flags of the mapping that holds this address.
std::string mapping_flags(const void* address) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream lines("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    if (std::istringstream(line) >> std::hex >> begin >> dash >> end && dash == '-') {
      inside = begin <= wanted && wanted < end;
    } else if (inside && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return "";
}

TEST_P(MemoryUse, fresh_memory_keeps_no_advice) {
  constexpr std::size_t bytes = 32 * MiB;
  const std::string path = make_file("data", bytes, 1);
  const std::unique_ptr<std::byte[]> memory(new std::byte[bytes]);
  Handle handle(options());
  handle.read({memory.get(), bytes}, path).wait();
  EXPECT_EQ(support::pattern_fault({memory.get(), bytes}, 0, 1), "");
  const std::string flags = mapping_flags(memory.get() + bytes / 2);
  ASSERT_NE(flags, "");
  EXPECT_EQ(flags.find(" hg "), std::string::npos) << flags;
  EXPECT_EQ(flags.find(" nh "), std::string::npos) << flags;
}

// --- Page-locked memory ----------------------------------------------------------------------

TEST_P(MemoryUse, page_locked_memory_is_registered_where_the_engine_can) {
  const std::string path = make_file("data", 8 * MiB, 1);
  Handle handle({.engine = GetParam(), .workers = 2});
  PinnedBuffer buffer(8 * MiB);
  for (int i = 0; i < 3; ++i) {
    handle.read(buffer.bytes(), path).wait();
    handle.write(buffer.bytes(), path).wait();
  }
  EXPECT_EQ(support::pattern_fault(buffer.bytes(), 0, 1), "");
  const Stats stats = handle.stats();
  const bool refused = std::ranges::any_of(stats.fallback_reasons, [](const std::string& reason) {
    return reason.find("is not registered with the ring") != std::string::npos;
  });
  if (GetParam() == EngineKind::io_uring && !refused) {
    EXPECT_EQ(stats.fixed_requests, stats.requests);
  } else {
    EXPECT_EQ(stats.fixed_requests, 0U);
  }
}

TEST_P(MemoryUse, parts_of_page_locked_memory_are_exact) {
  const std::string path = make_file("data", 4 * MiB, 1);
  Handle handle(options());
  PinnedBuffer buffer(4 * MiB + 3 * page_bytes());
  Dice dice(1);
  for (int i = 0; i < 50; ++i) {
    const std::size_t begin = dice.coin() ? align_down(dice.below(MiB), 512) : dice.below(MiB);
    const std::uint64_t offset = dice.coin() ? align_down(dice.below(MiB), 512) : dice.below(MiB);
    const auto part = buffer.bytes().subspan(begin, dice.between(1, 3 * MiB));
    handle.read(part, path, offset).wait();
    ASSERT_EQ(support::pattern_fault(part, offset, 1), "");
  }
}

TEST_P(MemoryUse, an_idle_handle_lets_go_of_freed_memory) {
  constexpr std::size_t bytes = 64 * MiB;
  const std::string path = make_file("data", bytes, 1);
  Handle handle({.engine = GetParam(), .workers = 2});
  Memory warm(MiB, 1);
  handle.read(warm.bytes(), path).wait();  // the slots stay
  const std::uint64_t before = pinned_kib();
  for (int round = 0; round < 5; ++round) {
    PinnedBuffer buffer(bytes);
    handle.read(buffer.bytes(), path).wait();
    const std::byte* data = buffer.data();
    if (handle.stats().fixed_requests > 2) {
      EXPECT_GE(pinned_kib(), before + bytes / KiB);
    }
    EXPECT_TRUE(is_mapped(data));
    if (round % 2 == 0) {
      buffer.free();
    } else {
      const PinnedBuffer dropped(std::move(buffer));
    }
    ASSERT_TRUE(pinned_falls_to(before + MiB / KiB)) << pinned_kib() << " KiB stay pinned";
  }
}

TEST_P(MemoryUse, only_the_pieces_of_page_locked_memory_that_are_used_are_registered) {
  constexpr std::size_t piece_bytes = 64 * MiB;
  const std::string path = make_file("data", MiB, 1);
  const File file = File::open(path, Access::read);
  Handle handle({.engine = GetParam(), .workers = 1});
  const PinnedBuffer buffer(3 * piece_bytes);
  const std::uint64_t before = pinned_kib();
  for (const std::size_t begin :
       {std::size_t{0}, 2 * MiB, 2 * piece_bytes, 3 * piece_bytes - MiB}) {
    handle.read(buffer.bytes().subspan(begin, MiB), file).wait();
    EXPECT_EQ(support::pattern_fault(buffer.bytes().subspan(begin, MiB), 0, 1), "");
    const std::uint64_t pieces = begin < piece_bytes ? 1 : 2;
    if (handle.stats().fixed_requests == 0) continue;
    EXPECT_GE(pinned_kib(), before + pieces * piece_bytes / KiB);
    EXPECT_LT(pinned_kib(), before + (pieces * piece_bytes + 4 * MiB) / KiB);
  }
  const auto over_the_edge = buffer.bytes().subspan(piece_bytes - 100 * KiB, MiB);
  handle.read(over_the_edge, file).wait();
  EXPECT_EQ(support::pattern_fault(over_the_edge, 0, 1), "");
}

TEST_P(MemoryUse, more_buffers_than_the_ring_has_places_come_and_go) {
  const std::string path = make_file("data", page_bytes(), 1);
  const File file = File::open(path, Access::read);
  Handle handle(options());
  for (int i = 0; i < 4500; ++i) {
    PinnedBuffer buffer(page_bytes());
    handle.read(buffer.bytes(), file).wait();
    ASSERT_EQ(support::pattern_fault(buffer.bytes(), 0, 1), "");
  }
  const Stats stats = handle.stats();
  EXPECT_EQ(stats.fallbacks, 0U) << stats.fallback_reasons.front();
  EXPECT_EQ(stats.fixed_requests, GetParam() == EngineKind::io_uring ? stats.requests : 0);
}

TEST_P(MemoryUse, more_buffers_than_the_ring_has_places_at_once_all_work) {
  const std::string path = make_file("data", page_bytes(), 1);
  const File file = File::open(path, Access::read);
  Handle handle(options());
  std::vector<PinnedBuffer> buffers;
  for (int i = 0; i < 4200; ++i) {
    buffers.emplace_back(page_bytes());
    handle.read(buffers.back().bytes(), file).wait();
  }
  for (const PinnedBuffer& buffer : buffers) {
    ASSERT_EQ(support::pattern_fault(buffer.bytes(), 0, 1), "");
  }
  const Stats stats = handle.stats();
  if (GetParam() == EngineKind::io_uring && stats.fallbacks > 0) {
    EXPECT_NE(stats.fallback_reasons.front().find("registered"), std::string::npos);
  }
}

TEST_P(MemoryUse, that_is_not_of_huge_pages_is_told_of_once_for_each_ring) {
  if (GetParam() != EngineKind::io_uring) GTEST_SKIP() << "nothing is registered";
  const std::string path = make_file("data", 4 * MiB, 1);
  support::FaultySystem refuses;
  refuses.add({.call = support::Call::advise, .times = 2, .error = EINVAL});
  const auto region = memory::Region::create(4 * MiB, refuses).or_throw();
  memory::list_region(region, KnownToCuda::yes);
  Handle handle({.engine = GetParam(), .workers = 1});
  for (int i = 0; i < 3; ++i) handle.read(region->mapped(), path).wait();
  memory::unlist_region(*region);
  EXPECT_EQ(support::pattern_fault(region->mapped(), 0, 1), "");
  const Stats stats = handle.stats();
  ASSERT_EQ(stats.fallbacks, 1U);
  EXPECT_NE(stats.fallback_reasons.front().find("huge pages"), std::string::npos);
}

// Many buffers, used by two handles and freed in random order while both are busy.
TEST_P(MemoryUse, buffers_freed_while_handles_are_busy_disturb_nobody) {
  const std::string path = make_file("data", MiB, 1);
  const File file = File::open(path, Access::read);
  Handle handles[] = {Handle(options()), Handle(options())};
  std::vector<std::string> faults(4);
  std::vector<std::thread> users;
  for (std::size_t user = 0; user < faults.size(); ++user) {
    users.emplace_back([&, user] {
      Dice dice(user);
      for (int i = 0; i < 60 && faults[user].empty(); ++i) {
        PinnedBuffer buffer(dice.between(1, MiB));
        PinnedBuffer kept(KiB);
        Handle& handle = handles[dice.below(2)];
        const Operation doomed = handle.read(buffer.bytes(), file);
        const Operation watched = handle.read(kept.bytes(), file, KiB);
        if (dice.coin()) buffer.free();
        if (dice.coin()) doomed.cancel();
        const int code = outcome_code(doomed);
        if (code != 0 && code != ECANCELED) faults[user] = doomed.error()->what();
        if (const auto error = outcome(watched)) faults[user] = error->what();
        faults[user] += support::pattern_fault(kept.bytes(), KiB, 1);
      }
    });
  }
  for (std::thread& user : users) user.join();
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
}

TEST(FreedInFlight, the_memory_stays_until_the_operation_is_done) {
  const support::TempDir dir;
  support::write_whole_file(dir.file("data"), support::pattern(MiB, 0, 1));
  Gate gate;
  Handle handle = gate.open_handle({});
  PinnedBuffer buffer(MiB);
  const std::byte* data = buffer.data();
  const Operation operation = handle.read(buffer.bytes(), dir.file("data"));
  ASSERT_TRUE(gate.holds(1));
  buffer.free();
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_FALSE(is_pinned({data, 1}));
  ASSERT_TRUE(is_mapped(data));
  EXPECT_EQ(error_of([&] { buffer.free(); }).code(), EINVAL);
  gate.open();
  EXPECT_EQ(outcome_code(operation), 0);
  EXPECT_FALSE(is_mapped(data));
}

TEST(FreedInFlight, the_memory_of_every_part_of_many_stays) {
  const support::TempDir dir;
  support::write_whole_file(dir.file("data"), support::pattern(MiB, 0, 1));
  const File file = File::open(dir.file("data"), Access::read);
  Gate gate;
  Handle handle = gate.open_handle({});
  std::vector<PinnedBuffer> buffers;
  std::vector<ReadTransfer> reads;
  for (std::uint64_t i = 0; i < 20; ++i) {
    buffers.emplace_back(KiB);
    reads.push_back({buffers.back().bytes(), file, i * KiB});
  }
  std::vector<const std::byte*> places;
  for (const PinnedBuffer& buffer : buffers) places.push_back(buffer.data());
  const Operation operation = handle.read_many(reads);
  ASSERT_TRUE(gate.holds(1));
  buffers.clear();
  for (const std::byte* place : places) ASSERT_TRUE(is_mapped(place));
  gate.open();
  EXPECT_EQ(outcome_code(operation), 0);
  for (const std::byte* place : places) EXPECT_FALSE(is_mapped(place));
}

TEST_P(MemoryUse, what_was_freed_while_it_was_written_is_written) {
  Handle handle(options());
  for (std::uint32_t round = 0; round < 10; ++round) {
    PinnedBuffer buffer(8 * MiB);
    support::fill_pattern(buffer.bytes(), 0, round);
    const Operation operation = handle.write(buffer.bytes(), dir.file("data"));
    buffer.free();
    ASSERT_EQ(outcome_code(operation), 0);
    ASSERT_EQ(support::pattern_fault(support::read_whole_file(dir.file("data")), 0, round), "");
  }
}

TENSORFERRY_ON_EVERY_ENGINE(MemoryUse);

// The most requests of one large read that were under way at a time.
std::size_t most_under_way(const HandleOptions& options, std::span<std::byte> memory,
                           const std::string& path) {
  Gate gate;
  gate.open();
  {
    Handle handle = gate.open_handle(options);
    handle.read(memory, path).wait();
  }
  std::size_t under_way = 0, most = 0;
  for (const Gate::Event& event : gate.events()) {
    event.kind == Gate::Event::Kind::submitted ? ++under_way : --under_way;
    most = std::max(most, under_way);
  }
  return most;
}

// Uses large blocks, so that an ordinary cache is the limit and not the depth.
class SlotsInCache : public testing::Test {
 protected:
  static constexpr std::size_t bytes = 64 * MiB;

  void SetUp() override {
    support::write_whole_file(path, support::pattern(bytes, 0, 1));
    if (!File::open(path, Access::read).direct()) GTEST_SKIP() << "nothing goes through slots";
    const Device device = device_of(path);
    depth = std::max(device.queue_depth, 8U);
    blocks = std::max<std::size_t>(os::last_level_cache_bytes() / 2 / MiB, 8 * device.disks);
    if (blocks >= std::min<std::size_t>(depth, 32)) GTEST_SKIP() << "the cache holds all of it";
  }

  support::TempDir dir;
  std::string path = dir.file("data");
  std::size_t depth = 0;
  std::size_t blocks = 0;  // that the cache should hold
};

TEST_F(SlotsInCache, under_way_take_half_of_it_unless_their_size_is_chosen) {
  Memory skewed(bytes, 5);
  EXPECT_EQ(most_under_way({.block_bytes = MiB}, skewed.bytes(), path), blocks);
  EXPECT_EQ(support::pattern_fault(skewed.bytes(), 0, 1), "");
  const HandleOptions deep{.block_bytes = MiB, .queue_depth = 20};
  EXPECT_EQ(most_under_way(deep, skewed.bytes(), path), std::min<std::size_t>(blocks, 20));
  const HandleOptions large{.block_bytes = MiB, .queue_depth = 20, .slot_bytes = 64 * MiB};
  EXPECT_EQ(most_under_way(large, skewed.bytes(), path), 20U);
  EXPECT_EQ(most_under_way({.block_bytes = MiB, .queue_depth = 2}, skewed.bytes(), path), 2U);
  const HandleOptions small{.block_bytes = 64 * KiB};
  EXPECT_EQ(most_under_way(small, skewed.bytes(), path), depth) << "bytes count, not slots";
  const PinnedBuffer in_place(bytes);
  EXPECT_EQ(most_under_way({.block_bytes = MiB}, in_place.bytes(), path),
            std::min<std::size_t>(depth, bytes / MiB));
}

TEST_F(SlotsInCache, two_that_wait_for_it_take_turns) {
  const std::string other_path = dir.file("other");
  support::write_whole_file(other_path, support::pattern(bytes, 0, 2));
  Memory first(bytes, 5), second(bytes, 5);
  Gate gate;
  const auto room = static_cast<unsigned>(blocks + 4);
  Handle handle = gate.open_handle({.block_bytes = MiB, .queue_depth = room});
  const Operation early = handle.read(first.bytes(), path);
  ASSERT_TRUE(gate.holds(blocks));
  const Operation late = handle.read(second.bytes(), other_path);
  gate.open();
  early.wait();
  late.wait();
  const auto events = gate.events();
  const auto of_late = std::ranges::find_if(
      events, [&](const Gate::Event& event) { return event.request.fd != events[0].request.fd; });
  const auto before = std::count_if(events.begin(), of_late, [](const Gate::Event& event) {
    return event.kind == Gate::Event::Kind::submitted;
  });
  EXPECT_LE(before, room + turn_blocks) << "of " << bytes / MiB;
  EXPECT_EQ(support::pattern_fault(second.bytes(), 0, 2), "");
}

TEST_F(SlotsInCache, what_waits_for_it_does_not_hold_up_what_goes_in_place) {
  Gate gate;
  Handle handle = gate.open_handle({.block_bytes = MiB});
  Memory skewed(bytes, 5);
  const PinnedBuffer in_place(4 * MiB);
  const Operation large = handle.read(skewed.bytes(), path);
  ASSERT_TRUE(gate.holds(blocks));
  const Operation small = handle.read(in_place.bytes(), path);
  EXPECT_TRUE(gate.holds(blocks + 4));
  gate.open();
  large.wait();
  small.wait();
  EXPECT_EQ(support::pattern_fault(skewed.bytes(), 0, 1), "");
  EXPECT_EQ(support::pattern_fault(in_place.bytes(), 0, 1), "");
}

}  // namespace
}  // namespace tensorferry::handle
