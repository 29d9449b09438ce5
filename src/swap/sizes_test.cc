// Sizes that no drive and no memory has: all are refused, none wraps.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "base/alignment.h"
#include "handle/handle_fixture.h"
#include "support/temp_dir.h"
#include "swap/swap_fixture.h"
#include "tensorferry/swap_space.h"

namespace tensorferry {
namespace {

using handle::error_of;
using handle::Memory;
using support::pattern_fault;

constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();

class SwapSizes : public ::testing::Test {
 protected:
  [[nodiscard]] SwapOptions options() const { return swap::options_in(dir, MiB); }

  // The mappings of files in this test's directory, one line each.
  [[nodiscard]] std::vector<std::string> mapped_files() const {
    std::vector<std::string> found;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find(dir.path()) != std::string::npos) found.push_back(line);
    }
    return found;
  }

  support::TempDir dir;
};

TEST_F(SwapSizes, parts_of_a_view_whose_sum_wraps_are_refused_before_anything_is_mapped) {
  SwapSpace space(options());
  const Memory memory = Memory::with_pattern(2 * MiB, 0, 1);
  space.put("t", memory.bytes()).wait();
  const std::uint64_t quarter = std::uint64_t{1} << 62;
  const std::vector<std::vector<SwapPart>> wrapping = {
      {{"t", 0, 2 * MiB}, {"t", 0, most - 2 * MiB + 1 + page_bytes()}},
      {{"t", 0, 2 * MiB}, {"t", 0, most - 2 * MiB + 1}},
      {{"t", 0, 2 * MiB},
       {"t", 0, quarter},
       {"t", 0, quarter},
       {"t", 0, quarter},
       {"t", 0, quarter - 2 * MiB + page_bytes()}},
      {{"t", 0, align_down(most, page_bytes())}},
      {{"t", align_down(most, page_bytes()), page_bytes()}},
      {{"t", page_bytes(), align_down(most, page_bytes())}},
  };
  // All of it is ours, so that we see a file that is mapped over it.
  Memory live = Memory::with_pattern(64 * MiB, 0, 7);
  for (std::size_t i = 0; i < wrapping.size(); ++i) {
    EXPECT_EQ(error_of([&] { (void)space.view(wrapping[i]); }).code(), EINVAL) << "case " << i;
    ASSERT_EQ(mapped_files(), std::vector<std::string>()) << "case " << i;
    ASSERT_EQ(pattern_fault(live.bytes(), 0, 7), "") << "case " << i;
  }
}

TEST_F(SwapSizes, room_that_no_drive_has_is_refused) {
  SwapSpace space(options());
  const std::uint64_t before = space.stats().file_bytes;
  for (const std::uint64_t bytes :
       {most, most - 1, most - 4095, most - 4096, bytes_max + 1, bytes_max, bytes_max - 4096}) {
    const Error error = error_of([&] { space.reserve(bytes); });
    EXPECT_EQ(error.code(), ENOSPC) << bytes;
    EXPECT_NE(std::string(error.what()).find("needed " + std::to_string(bytes)), std::string::npos)
        << error.what();
    EXPECT_EQ(space.stats().file_bytes, before) << bytes;
  }
}

TEST_F(SwapSizes, room_that_several_drives_do_not_have_is_refused) {
  const support::TempDir second;
  SwapOptions two = options();
  two.directories = {dir.path(), second.path()};
  SwapSpace space(two);
  for (const std::uint64_t bytes : {most, most - 4096, bytes_max + 1, bytes_max}) {
    EXPECT_EQ(error_of([&] { space.reserve(bytes); }).code(), ENOSPC) << bytes;
  }
  EXPECT_EQ(space.stats().file_bytes, 0U);
}

TEST_F(SwapSizes, a_tensor_of_a_size_that_wraps_is_not_taken_for_an_empty_one) {
  SwapSpace space(options());
  Memory memory(4096);
  for (const std::uint64_t bytes : {most, most - 4094, bytes_max + 1, bytes_max}) {
    // Its size is refused before anybody touches the memory.
    const std::span<const std::byte> claimed(memory.bytes().data(), bytes);
    EXPECT_EQ(error_of([&] { (void)space.put("t", claimed); }).code(), ENOSPC) << bytes;
    EXPECT_EQ(space.size("t"), std::nullopt) << bytes;
  }
}

TEST_F(SwapSizes, buffers_that_no_machine_has_are_refused) {
  for (const SwapMemory kind : {SwapMemory::page_locked, SwapMemory::ordinary}) {
    for (const std::size_t bytes : {most, most - 4094, bytes_max + 1, bytes_max}) {
      SwapOptions large = options();
      large.memory = kind;
      large.buffer_bytes = bytes;
      EXPECT_EQ(error_of([&] { const SwapSpace space(large); }).code(), ENOMEM) << bytes;
    }
  }
}

TEST_F(SwapSizes, memory_whose_end_wraps_lies_in_no_buffer) {
  SwapSpace space(options());
  const auto buffer = space.take(64 * KiB);
  EXPECT_TRUE(in_swap_buffer(buffer->bytes()));
  for (const std::size_t bytes : {most, most - 100, most - 64 * KiB + 1, bytes_max}) {
    EXPECT_FALSE(in_swap_buffer({buffer->bytes().data() + 4096, bytes})) << bytes;
  }
}

}  // namespace
}  // namespace tensorferry
