#include "checkpoint/checksums.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <vector>

namespace tensorferry::checkpoint {
namespace {

// Three chunks, one, and none.
const Header chunked{.tensors = {{.name = "a", .begin = 0, .end = 2 * checksum_chunk_bytes + 1},
                                 {.name = "b\"",
                                  .begin = 2 * checksum_chunk_bytes + 1,
                                  .end = 3 * checksum_chunk_bytes + 1},
                                 {.name = "c",
                                  .begin = 3 * checksum_chunk_bytes + 1,
                                  .end = 3 * checksum_chunk_bytes + 1}},
                     .metadata = {}};

constexpr const char* entry_text =
    R"({"a":"00000000000000010123456789abcdefffffffffffffffff","b\"":"8000000000000000","c":""})";

TEST(Checksums, are_written_in_fixed_width) {
  const Digests a{1, 0x0123456789abcdef, UINT64_MAX};
  const Digests b{std::uint64_t{1} << 63U};
  const std::vector<TensorDigests> tensors{{"a", a}, {"b\"", b}, {"c", {}}};
  EXPECT_EQ(write_checksums(tensors), entry_text);
  EXPECT_EQ(write_checksums({}), "{}");
}

TEST(Checksums, are_read_as_they_were_written) {
  const auto found = read_checksums(entry_text, chunked, "file");
  ASSERT_TRUE(found.ok()) << found.error().what();
  EXPECT_EQ(found.value().at("a"), (Digests{1, 0x0123456789abcdef, UINT64_MAX}));
  EXPECT_EQ(found.value().at("b\""), Digests{std::uint64_t{1} << 63U});
  EXPECT_EQ(found.value().at("c"), Digests{});
}

TEST(Checksums, may_be_there_for_some_tensors_only) {
  const auto found = read_checksums(R"({"c":""})", chunked, "file");
  ASSERT_TRUE(found.ok()) << found.error().what();
  EXPECT_EQ(found.value().size(), 1U);
  EXPECT_TRUE(read_checksums("{}", chunked, "file").ok());
}

TEST(Checksums, that_do_not_fit_the_file_are_refused) {
  for (const char* value :
       {"", "null", "[]", "{", R"({"b\"":1})", R"({"b\"":"800000000000000"})",
        R"({"b\"":"80000000000000000"})", R"({"b\"":""})", R"({"b\"":"800000000000000A"})",
        R"({"b\"":"-800000000000000"})", R"({"b\"":"0x80000000000000"})",
        R"({"b\"":"80000000000000008000000000000000"})", R"({"c":"8000000000000000"})",
        R"({"d":""})", R"({"c":"","c":""})", R"({"c":""} x)", "{\"\xff\":\"\"}"}) {
    const auto found = read_checksums(value, chunked, "file");
    ASSERT_FALSE(found.ok()) << value;
    EXPECT_EQ(found.error().code(), EBADMSG) << value;
    EXPECT_NE(found.error().hint().find("tensorferry.xxh3"), std::string::npos) << value;
  }
}

TEST(Checksums, a_tensor_has_a_chunk_for_each_16_mib_that_it_begins) {
  EXPECT_EQ(chunk_count(0), 0U);
  EXPECT_EQ(chunk_count(1), 1U);
  EXPECT_EQ(chunk_count(16 * MiB), 1U);
  EXPECT_EQ(chunk_count(16 * MiB + 1), 2U);
  EXPECT_EQ(chunk_count(UINT64_MAX), std::uint64_t{1} << 40U);
}

}  // namespace
}  // namespace tensorferry::checkpoint
