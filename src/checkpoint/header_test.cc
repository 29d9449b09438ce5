#include "checkpoint/header.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <string_view>
#include <vector>

namespace tensorferry::checkpoint {
namespace {

Result<Header> read_json(std::string_view json, std::uint64_t data_bytes = 8) {
  return parse_header(std::as_bytes(std::span(json)), data_bytes, "model.safetensors");
}

// The Error, or one of code 0.
Error refusal_of(std::string_view json, std::uint64_t data_bytes = 8) {
  const Result<Header> read = read_json(json, data_bytes);
  return read.ok() ? Error({}) : read.error();
}

void expect_refused(std::string_view json, std::string_view hint) {
  const Error error = refusal_of(json);
  EXPECT_EQ(error.code(), EBADMSG) << json;
  EXPECT_NE(error.hint().find(hint), std::string::npos) << json << "\n" << error.what();
}

Result<std::uint64_t> length_of(std::vector<unsigned char> first, std::uint64_t file_bytes) {
  return header_json_bytes(std::as_bytes(std::span(first)), file_bytes, "model.safetensors");
}

TEST(HeaderLength, is_little_endian_and_fits_the_file) {
  EXPECT_EQ(length_of({2, 1, 0, 0, 0, 0, 0, 0}, 8 + 258).value(), 258U);
  EXPECT_EQ(length_of({0, 0, 0, 0, 0, 0, 0, 0}, 8).value(), 0U);
  EXPECT_EQ(length_of({0, 0xE1, 0xF5, 5, 0, 0, 0, 0}, 1'000'000'000).value(), 100'000'000U);
}

TEST(HeaderLength, of_a_broken_file_is_refused) {
  for (const Result<std::uint64_t>& length :
       {length_of({}, 0), length_of({1, 0, 0, 0, 0, 0, 0}, 7),
        length_of({2, 1, 0, 0, 0, 0, 0, 0}, 8 + 257),
        length_of({1, 0xE1, 0xF5, 5, 0, 0, 0, 0}, 1'000'000'000),
        length_of({255, 255, 255, 255, 255, 255, 255, 255}, UINT64_MAX)}) {
    ASSERT_FALSE(length.ok());
    EXPECT_EQ(length.error().code(), EBADMSG);
    EXPECT_EQ(length.error().offset(), 0U);
    EXPECT_EQ(length.error().path(), "model.safetensors");
  }
}

TEST(Header, tensors_come_by_their_offset_and_with_all_they_have) {
  const auto header = read_json(
      R"({"b":{"dtype":"F32","shape":[1,2],"data_offsets":[4,12]},"__metadata__":{"k":"v"},)"
      R"("c":{"dtype":"I8","shape":[0],"data_offsets":[4,4]},)"
      R"("a":{"dtype":"F4","shape":[8],"data_offsets":[0,4],"more":[1.5,{}]}}  )",
      12);
  ASSERT_TRUE(header.ok()) << header.error().what();
  const std::vector<HeaderTensor>& tensors = header.value().tensors;
  ASSERT_EQ(tensors.size(), 3U);
  EXPECT_EQ(tensors[0].name, "a");
  EXPECT_EQ(tensors[0].dtype, DType::f4);
  EXPECT_EQ(tensors[1].name, "c");
  EXPECT_EQ(tensors[2].name, "b");
  EXPECT_EQ(tensors[2].shape, (std::vector<std::uint64_t>{1, 2}));
  EXPECT_EQ(tensors[2].begin, 4U);
  EXPECT_EQ(tensors[2].end, 12U);
  EXPECT_EQ(header.value().metadata, (Metadata{{"k", "v"}}));
}

TEST(Header, tells_no_metadata_from_empty_metadata) {
  EXPECT_EQ(read_json("{}", 0).value().metadata, std::nullopt);
  EXPECT_EQ(read_json(R"({"__metadata__":null})", 0).value().metadata, std::nullopt);
  EXPECT_EQ(read_json(R"({"__metadata__":{}})", 0).value().metadata, Metadata{});
}

TEST(Header, the_last_tensor_of_a_name_counts) {
  const auto header = read_json(R"({"a":["U8",[9],[3,12]],"\u0061":["F32",[2],[0,8]]})");
  ASSERT_TRUE(header.ok()) << header.error().what();
  ASSERT_EQ(header.value().tensors.size(), 1U);
  EXPECT_EQ(header.value().tensors[0].dtype, DType::f32);
}

TEST(Header, a_refusal_names_the_rule_and_the_tensor) {
  expect_refused(R"({"a":["F33",[2],[0,8]]})", R"(tensor "a": dtype "F33" is unknown)");
  expect_refused(R"({"a":["F32",[-2],[0,8]]})", R"(tensor "a": a number that is not a whole one)");
  expect_refused(R"({"a":["F32",[2],[0,8,9]]})", "data_offsets does not have two numbers");
  expect_refused(R"({"a":["F32",[2],[0]]})", "data_offsets does not have two numbers");
  expect_refused(R"({"a":["F32",[2],[0,8],1]})", "more than three parts");
  expect_refused(R"({"a":["F32"]})", "fewer than three parts");
  expect_refused(R"({"a":{"dtype":"F32","shape":[2]}})", R"(tensor "a": data_offsets is missing)");
  expect_refused(R"({"a":{"shape":[2],"shape":[2]}})", R"(tensor "a": shape appears twice)");
  expect_refused(R"({"a":["F32",[2],[0,8]],"b":["F32",[1],[4,8]]})", R"(tensor "b": data_offsets)");
  expect_refused(R"({"a":["F32",[2],[0,8]],"b":["F32",[1],[4,8]]})", "overlap the bytes up to 8");
  expect_refused(R"({"a":["F32",[1],[4,8]]})", "leave a hole after the bytes up to 0");
  expect_refused(R"({"a":["F32",[2],[8,0]]})", "end before they begin");
  expect_refused(R"({"a":["F32",[3],[0,8]]})", "have 8 bytes where F32 of shape [3] has 12");
  expect_refused(R"({"a":["F32",[4294967296,4294967296],[0,8]]})", "than 64 bits can count");
  expect_refused(R"({"a":["U8",[2305843009213693960],[0,8]]})", "than 64 bits can count");
  expect_refused(R"({"a":["F4",[15],[0,8]]})", "does not end on a byte");
  expect_refused(R"({"a":["F32",[1],[0,4]]})", "its tensors have 4 bytes, but 8 follow the header");
  expect_refused(R"({"__metadata__":{"a":1}})", "a value of __metadata__ is not a string");
  expect_refused(R"({"__metadata__":{},"__metadata__":{}})", "__metadata__ appears twice");
  expect_refused("{\"a\xff\":1}", "not UTF-8");
  expect_refused("", "the text ends where '{' must be");
}

TEST(Header, a_refusal_has_the_offset_in_the_file) {
  EXPECT_EQ(refusal_of(R"({"a":["F32",[2],[0,8]]} x)").offset(), 8 + 24U);
  EXPECT_EQ(refusal_of(R"({"a":["F33",[2],[0,8]]})").offset(), 8 + 6U);
  EXPECT_EQ(refusal_of(R"({"a":["F32",[2],[0,8]],  "b":["U8",[1],[0,1]]})").offset(), 8 + 1U)
      << "b comes first, so a is the one that overlaps";
  EXPECT_EQ(refusal_of(R"({"a":["F32",[2],[0,8]]})", 9).offset(), 8 + 23 + 8U);
  EXPECT_EQ(refusal_of(R"({"a":["F32",[2],[0,8]]})", 3).offset(), 8 + 23 + 3U);
}

// Each takes hours if some step looks at all others, and ends the test by its limit.
TEST(Header, hostile_headers_take_no_more_time_than_long_ones) {
  constexpr int count = 200'000;
  std::string same = "{";
  std::string numbered = "{\"__metadata__\":{\"\":\"\"";
  for (int i = 0; i < count; ++i) numbered += ",\"" + std::to_string(i) + "\":\"\"";
  numbered += '}';
  for (int i = 0; i < count; ++i) {
    same += (i > 0 ? "," : "") + std::string(R"("a":["U8",[0],[0,0]])");
    numbered += ",\"" + std::to_string(i) + R"(":["U8",[0],[0,0]])";
  }
  EXPECT_EQ(read_json(same + '}', 0).value().tensors.size(), 1U);
  EXPECT_EQ(read_json(numbered + '}', 0).value().tensors.size(), std::size_t{count});
  EXPECT_FALSE(read_json(same, 0).ok());
  EXPECT_FALSE(read_json(R"({"a":["U8",[1],[0,)" + std::string(1'000'000, '9')).ok());
}

TEST(TensorBytes, counts_bits) {
  EXPECT_EQ(tensor_bytes(DType::f32, {}).value(), 4U);
  EXPECT_EQ(tensor_bytes(DType::f6_e2m3, std::vector<std::uint64_t>{2, 2}).value(), 3U);
  EXPECT_EQ(tensor_bytes(DType::u8, std::vector<std::uint64_t>{0, UINT64_MAX}).value(), 0U);
  EXPECT_EQ(tensor_bytes(DType::f6_e2m3, std::vector<std::uint64_t>{3}).error().code(), EINVAL);
  EXPECT_EQ(tensor_bytes(DType::u8, std::vector<std::uint64_t>{UINT64_MAX}).error().code(), EINVAL);
}

}  // namespace
}  // namespace tensorferry::checkpoint
