// copy() and every streaming variant, against guard bytes: all short lengths, all misalignments.
#include "tensorferry/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>

#include "base/alignment.h"
#include "memory/copy_variants.h"
#include "support/memory.h"

namespace tensorferry {
namespace {

constexpr std::size_t line = 64;
constexpr std::size_t guard_bytes = 320;  // more than one step of a streaming loop
constexpr std::byte guard{0xA5};

// A source of random bytes that never equal a guard, and a destination between guards.
class Arena {
 public:
  explicit Arena(std::size_t bytes_max)
      : source_(bytes_max + line), room_(bytes_max + 2 * guard_bytes + line) {
    std::mt19937 random(20240607);
    for (std::byte& value : source_.bytes()) {
      do {
        value = static_cast<std::byte>(random() & 0xFF);
      } while (value == guard);
    }
    std::ranges::fill(room_.bytes(), guard);
    guards_.fill(guard);
  }

  // Whether `copy_bytes(to, from)` copies `bytes` bytes and touches nothing else. Leaves guards
  // everywhere again.
  template <class Copy>
  bool copies(std::size_t bytes, std::size_t to_misalignment, std::size_t from_misalignment,
              Copy copy_bytes) {
    std::byte* const to = room_.at(guard_bytes + to_misalignment);
    const std::byte* const from = source_.at(from_misalignment);
    copy_bytes(to, from);
    const bool same = bytes == 0 || std::memcmp(to, from, bytes) == 0;
    const bool intact = std::memcmp(to - guard_bytes, guards_.data(), guard_bytes) == 0 &&
                        std::memcmp(to + bytes, guards_.data(), guard_bytes) == 0;
    std::memset(to - guard_bytes, static_cast<int>(guard), bytes + 2 * guard_bytes);
    return same && intact;
  }

 private:
  support::Memory source_;
  support::Memory room_;
  std::array<std::byte, guard_bytes> guards_{};
};

std::string where(const char* who, std::size_t bytes, std::size_t to, std::size_t from) {
  return std::string(who) + ": " + std::to_string(bytes) + " bytes, destination + " +
         std::to_string(to) + ", source + " + std::to_string(from);
}

constexpr std::array both_destinations{Destination::any, Destination::cold};
constexpr std::array<std::size_t, 3> few_misalignments{0, 1, 36};

TEST(CopyVariants, stream_every_length_up_to_4096_to_every_misalignment) {
  Arena arena(4096);
  for (const memory::CopyVariant& variant : memory::copy_variants()) {
    for (std::size_t bytes = 0; bytes <= 4096; ++bytes) {
      for (std::size_t to = 0; to < line; ++to) {
        for (const std::size_t from : few_misalignments) {
          ASSERT_TRUE(arena.copies(bytes, to, from, [&](std::byte* t, const std::byte* f) {
            memory::stream_copy(variant, t, f, bytes);
          })) << where(variant.instructions, bytes, to, from);
        }
      }
    }
  }
}

TEST(CopyVariants, stream_between_all_pairs_of_misalignments) {
  Arena arena(70'000);
  for (const memory::CopyVariant& variant : memory::copy_variants()) {
    for (const std::size_t bytes : {1u, 63u, 64u, 65u, 255u, 256u, 257u, 320u, 1023u, 8192u}) {
      for (std::size_t to = 0; to < line; ++to) {
        for (std::size_t from = 0; from < line; ++from) {
          ASSERT_TRUE(arena.copies(bytes, to, from, [&](std::byte* t, const std::byte* f) {
            memory::stream_copy(variant, t, f, bytes);
          })) << where(variant.instructions, bytes, to, from);
        }
      }
    }
  }
}

TEST(CopyVariants, end_with_the_baseline_that_everyone_has) {
  ASSERT_FALSE(memory::copy_variants().empty());
  EXPECT_STREQ(memory::copy_variants().back().instructions, "baseline");
  EXPECT_STREQ(memory::copy_variants().front().instructions, copy_instructions());
}

TEST(Copy, copies_every_length_up_to_4096) {
  Arena arena(4096);
  for (const Destination destination : both_destinations) {
    for (std::size_t bytes = 0; bytes <= 4096; ++bytes) {
      for (const std::size_t to : few_misalignments) {
        for (const std::size_t from : few_misalignments) {
          ASSERT_TRUE(arena.copies(bytes, to, from, [&](std::byte* t, const std::byte* f) {
            copy({t, bytes}, {f, bytes}, destination);
          })) << where("copy", bytes, to, from);
        }
      }
    }
  }
}

TEST(Copy, copies_around_the_lengths_where_it_changes_its_way) {
  Arena arena(21 * MiB);
  for (const Destination destination : both_destinations) {
    for (const std::size_t about : {32 * KiB, 64 * KiB, 1 * MiB, 16 * MiB, 20 * MiB}) {
      for (const std::size_t bytes : {about - 1, about, about + 1, about + 333}) {
        for (const std::size_t to : {0u, 1u, 63u}) {
          ASSERT_TRUE(arena.copies(bytes, to, 7, [&](std::byte* t, const std::byte* f) {
            copy({t, bytes}, {f, bytes}, destination);
          })) << where("copy", bytes, to, 7);
        }
      }
    }
  }
}

TEST(Copy, takes_the_smaller_of_two_sizes) {
  Arena arena(200 * KiB);
  for (const Destination destination : both_destinations) {
    EXPECT_TRUE(arena.copies(100 * KiB, 3, 5, [&](std::byte* t, const std::byte* f) {
      copy({t, 100 * KiB}, {f, 150 * KiB}, destination);
    }));
    EXPECT_TRUE(arena.copies(100 * KiB, 3, 5, [&](std::byte* t, const std::byte* f) {
      copy({t, 150 * KiB}, {f, 100 * KiB}, destination);
    }));
  }
}

TEST(Copy, of_empty_spans_does_nothing) {
  for (const Destination destination : both_destinations) copy({}, {}, destination);
}

}  // namespace
}  // namespace tensorferry
