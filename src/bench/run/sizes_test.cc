#include "bench/run/sizes.h"

#include <gtest/gtest.h>

namespace tensorferry::bench {
namespace {

TEST(sizes, are_read_as_people_write_them) {
  EXPECT_EQ(parse_size("0"), 0U);
  EXPECT_EQ(parse_size("1000"), 1000U);
  EXPECT_EQ(parse_size("4K"), 4096U);
  EXPECT_EQ(parse_size("2m"), 2 * MiB);
  EXPECT_EQ(parse_size("1G"), GiB);
  EXPECT_EQ(parse_size("16MiB"), 16 * MiB);
  EXPECT_EQ(parse_size("16MB"), 16 * MiB);
  EXPECT_EQ(parse_size("3T"), 3072 * GiB);
}

TEST(sizes, other_text_is_refused) {
  for (const char* text : {"", "M", "-1", "+1", "1.5G", "4 K", "4KK", "4X", "0x10", "9999999999T",
                           "18446744073709551616", " 4K", "4K "}) {
    EXPECT_FALSE(parse_size(text)) << text;
  }
}

TEST(sizes, counts_are_decimal) {
  EXPECT_EQ(parse_count("1000"), 1000);
  EXPECT_EQ(parse_count("70B"), 70e9);
  EXPECT_EQ(parse_count("70b"), 70e9);
  EXPECT_EQ(parse_count("7G"), 7e9);
  EXPECT_EQ(parse_count("1.5k"), 1500);
  EXPECT_EQ(parse_count("3.84T"), 3.84e12);
  EXPECT_EQ(parse_count("4e14"), 4e14);
  for (const char* text :
       {"", "B", "-1", "7GB", "7 G", "inf", "nan", "0x10", "7X", "1e999", "1e308P", "1e300B"}) {
    EXPECT_FALSE(parse_count(text)) << text;
  }
  EXPECT_EQ(rounded_count(70.6e9), "70.6 G");
  EXPECT_EQ(rounded_count(999.9), "1.00 k");
  EXPECT_EQ(rounded_count(12), "12");
  EXPECT_EQ(rounded_count(4.126), "4.13");
}

TEST(sizes, are_written_so_that_they_read_back) {
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1000},
                                    std::uint64_t{4096}, std::uint64_t{5000}, 3 * MiB, 7 * GiB}) {
    EXPECT_EQ(parse_size(size_text(bytes)), bytes);
  }
  EXPECT_EQ(size_text(2 * MiB), "2M");
}

TEST(sizes, are_rounded_for_people) {
  EXPECT_EQ(rounded_size(17), "17 bytes");
  EXPECT_EQ(rounded_size(3 * GiB / 2), "1.5 GiB");
  EXPECT_EQ(rounded_size(400 * MiB), "400 MiB");
}

}  // namespace
}  // namespace tensorferry::bench
