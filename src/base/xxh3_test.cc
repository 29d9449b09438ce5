#include "base/xxh3.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace tensorferry {
namespace {

TEST(Xxh3, is_that_of_the_specification) {
  EXPECT_EQ(xxh3("", 0), 0x2d06800538d394c2U);
  EXPECT_EQ(xxh3("abc", 3), 0x78af5f94892f3950U);
}

TEST(Xxh3, is_the_same_by_every_way_for_any_length_and_place) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") == 0) GTEST_SKIP() << "this processor has no AVX2";
  std::vector<std::byte> bytes(70'000);
  std::uint64_t word = 1;
  for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    word = word * 6364136223846793005U + 1442695040888963407U;
    std::memcpy(bytes.data() + i, &word, 8);
  }
  for (std::size_t length = 0; length < 66'000; length += 1 + length / 7) {
    for (const std::size_t begin : {0U, 1U, 7U, 64U}) {
      const std::byte* piece = bytes.data() + begin;
      const std::uint64_t plain = xxh3_plain(piece, length);
      ASSERT_EQ(xxh3_avx2(piece, length), plain) << length << " bytes at " << begin;
      ASSERT_EQ(xxh3(piece, length), plain);
    }
  }
#else
  GTEST_SKIP() << "there is one way on this processor";
#endif
}

}  // namespace
}  // namespace tensorferry
