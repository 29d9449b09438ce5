#include "checkpoint/json.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace tensorferry::checkpoint {
namespace {

bool is_json(std::string_view text) {
  JsonReader json(text);
  json.skip();
  return json.finish();
}

TEST(Json, a_walk_sees_keys_and_values_in_their_order) {
  JsonReader json(R"( {"b" : [1 , 2], "a":"x", "b":null} )");
  std::string key;
  std::string text;
  std::uint64_t number = 0;
  ASSERT_TRUE(json.enter_object());
  ASSERT_TRUE(json.next_member(key));
  EXPECT_EQ(key, "b");
  EXPECT_EQ(json.key_offset(), 2U);
  ASSERT_TRUE(json.enter_array());
  ASSERT_TRUE(json.next_element() && json.read_unsigned(number));
  EXPECT_EQ(number, 1U);
  ASSERT_TRUE(json.next_element() && json.read_unsigned(number));
  EXPECT_EQ(number, 2U);
  EXPECT_FALSE(json.next_element());
  ASSERT_TRUE(json.next_member(key) && json.read_string(text));
  EXPECT_EQ(text, "x");
  ASSERT_TRUE(json.next_member(key) && json.read_null());
  EXPECT_FALSE(json.next_member(key));
  EXPECT_TRUE(json.finish());
}

TEST(Json, the_first_problem_stays_and_stops_all_calls) {
  JsonReader json(R"({"a" 1})");
  std::string key;
  ASSERT_TRUE(json.enter_object());
  EXPECT_FALSE(json.next_member(key));
  EXPECT_EQ(json.offset(), 5U);
  EXPECT_EQ(json.failure(), "another character where ':' must be");
  json.fail("later");
  EXPECT_FALSE(json.skip());
  EXPECT_FALSE(json.enter_array());
  EXPECT_FALSE(json.finish());
  EXPECT_EQ(json.failure(), "another character where ':' must be");
  EXPECT_EQ(json.offset(), 5U);
}

TEST(Json, strings_are_unescaped) {
  JsonReader json(R"("\"\\\/\b\f\n\r\t\u0000\u00e9\u20AC\ud83d\ude00")");
  std::string text;
  ASSERT_TRUE(json.read_string(text)) << json.failure();
  EXPECT_EQ(text, std::string("\"\\/\b\f\n\r\t\0é€😀", 18));
}

TEST(Json, strings_come_back_as_they_were_written) {
  std::string all;
  for (int code = 0; code < 128; ++code) all += static_cast<char>(code);
  all += "é€😀";
  std::string written;
  append_json_string(written, all);
  EXPECT_EQ(written.substr(0, 15), R"("\u0000\u0001\u)");
  JsonReader json(written);
  std::string text;
  ASSERT_TRUE(json.read_string(text) && json.finish()) << json.failure();
  EXPECT_EQ(text, all);
}

TEST(Json, what_is_no_json_is_refused) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[",
                           "[1",
                           "[1,",
                           "[1,]",
                           "[,1]",
                           "[1 2]",
                           "{1:2}",
                           R"({"a"})",
                           R"({"a":})",
                           R"({"a":1,})",
                           "tru",
                           "nulll",
                           "True",
                           "'a'",
                           "\"a",
                           R"("\x41")",
                           R"("\ud800")",
                           "\"\n\"",
                           "01",
                           "-",
                           "+1",
                           ".5",
                           "1.",
                           "1e",
                           "1e+",
                           "0x1",
                           "NaN",
                           "1e309",
                           "[{]}",
                           "1 1",
                           "\xff",
                           "\"\xc0\x80\"",
                           "\"\xed\xa0\x80\""}) {
    EXPECT_FALSE(is_json(text)) << text;
  }
}

TEST(Json, all_kinds_of_values_are_stepped_over) {
  for (const char* text :
       {"0", "-0", "1.5e-3", "1e308", "0e999", "1e-999", "true", "false", "null", R"("a\n")", "[]",
        "{}", R"([{"a":[{},[],{"b":[null,true,-1.5,"x"]}]},[[]]])", " \t\r\n1 \t\r\n"}) {
    EXPECT_TRUE(is_json(text)) << text;
  }
}

TEST(Json, numbers_must_be_whole_and_within_64_bits) {
  const auto number = [](std::string_view text) {
    JsonReader json(text);
    std::uint64_t value = 0;
    return json.read_unsigned(value) && json.finish() ? std::to_string(value) : "refused";
  };
  EXPECT_EQ(number("0"), "0");
  EXPECT_EQ(number("18446744073709551615"), "18446744073709551615");
  for (const char* text : {"18446744073709551616", "-1", "-0", "1.0", "1e0", "\"1\"", "null"}) {
    EXPECT_EQ(number(text), "refused") << text;
  }
}

TEST(Json, nesting_has_a_limit) {
  const auto nested = [](std::size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(is_json(nested(JsonReader::depth_max)));
  EXPECT_FALSE(is_json(nested(JsonReader::depth_max + 1)));
  EXPECT_FALSE(is_json(std::string(1'000'000, '[')));
}

TEST(Json, names_in_messages_are_short_and_on_one_line) {
  EXPECT_EQ(shown("a\nb"), R"("a\nb")");
  EXPECT_LT(shown(std::string(100'000, 'x')).size(), 300U);
  EXPECT_EQ(shown(std::string(199, 'x') + "é and more"), '"' + std::string(199, 'x') + "...\"");
}

}  // namespace
}  // namespace tensorferry::checkpoint
