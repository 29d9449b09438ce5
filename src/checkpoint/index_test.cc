#include "checkpoint/index.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <string_view>
#include <vector>

namespace tensorferry::checkpoint {
namespace {

Result<Index> parse_text(std::string_view json) {
  return parse_index(std::as_bytes(std::span(json)), "model.safetensors.index.json");
}

TEST(ShardIndex, says_which_file_has_which_tensor) {
  const auto index = parse_text(
      R"({"metadata": {"total_size": 1.5e3, "by": "a\u0062", "more": {"x": [1, 2]}},
          "weight_map": {"b": "2.safetensors", "a": "1.safetensors", "c": "2.safetensors"},
          "other": [{}]})");
  ASSERT_TRUE(index.ok()) << index.error().what();
  EXPECT_EQ(index.value().files, (std::vector<std::string>{"1.safetensors", "2.safetensors"}));
  ASSERT_EQ(index.value().tensors.size(), 3U);
  EXPECT_EQ(index.value().tensors[0].name, "a");
  EXPECT_EQ(index.value().tensors[0].file, 0U);
  EXPECT_EQ(index.value().tensors[1].name, "b");
  EXPECT_EQ(index.value().tensors[1].file, 1U);
  EXPECT_EQ(index.value().tensors[2].file, 1U);
  EXPECT_EQ(index.value().metadata,
            (Metadata{{"by", "ab"}, {"more", R"({"x": [1, 2]})"}, {"total_size", "1.5e3"}}));
}

TEST(ShardIndex, needs_no_metadata) {
  EXPECT_EQ(parse_text(R"({"weight_map":{}})").value().metadata, std::nullopt);
  EXPECT_EQ(parse_text(R"({"weight_map":{},"metadata":null})").value().metadata, std::nullopt);
}

TEST(ShardIndex, the_last_entry_of_a_name_counts) {
  const Index index = parse_text(R"({"weight_map":{"a":"1","b":"3","a":"2"}})").or_throw();
  EXPECT_EQ(index.files, (std::vector<std::string>{"2", "3"}));
}

TEST(ShardIndex, files_elsewhere_are_refused) {
  for (const char* file : {"", ".", "..", "/etc/passwd", "../a", "a/b", "a/", R"(a\/b)",
                           R"(a\u0000b)", R"(\u002e\u002e)"}) {
    const auto index = parse_text(R"({"weight_map":{"a":")" + std::string(file) + "\"}}");
    ASSERT_FALSE(index.ok()) << file;
    EXPECT_EQ(index.error().code(), EBADMSG);
    EXPECT_EQ(index.error().offset(), 15U);
    EXPECT_NE(index.error().hint().find("same folder"), std::string::npos);
  }
  EXPECT_TRUE(parse_text(R"({"weight_map":{"a":"..."}})").ok());
}

TEST(ShardIndex, what_is_no_index_is_refused) {
  for (const char* json :
       {"", "{}", "[]", "null", R"({"metadata":{}})", R"({"weight_map":null})",
        R"({"weight_map":[]})", R"({"weight_map":{"a":1}})", R"({"weight_map":{"a":null}})",
        R"({"weight_map":{},"weight_map":{}})", R"({"weight_map":{},"metadata":[]})",
        R"({"weight_map":{},"metadata":{},"metadata":{}})", R"({"weight_map":{}} x)",
        R"({"weight_map":{},"metadata":{"a":NaN}})", "{\"weight_map\":{\"\xff\":\"a\"}}"}) {
    const auto index = parse_text(json);
    ASSERT_FALSE(index.ok()) << json;
    EXPECT_EQ(index.error().code(), EBADMSG) << json;
    EXPECT_EQ(index.error().path(), "model.safetensors.index.json");
  }
}

TEST(ShardIndex, a_longer_one_than_a_header_is_refused) {
  const std::string_view index = R"({"weight_map":{}})";
  std::string json(index_bytes_max, ' ');
  json.replace(0, index.size(), index);
  EXPECT_TRUE(parse_text(json).ok());
  json += ' ';
  EXPECT_EQ(parse_text(json).error().code(), EBADMSG);
}

}  // namespace
}  // namespace tensorferry::checkpoint
