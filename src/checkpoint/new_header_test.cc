#include "checkpoint/new_header.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <vector>

namespace tensorferry::checkpoint {
namespace {

const std::vector<NewTensor> some{{.name = "b", .dtype = DType::u8, .shape = {3}},
                                  {.name = "é\n", .dtype = DType::f32, .shape = {2, 1}},
                                  {.name = "a", .dtype = DType::u8, .shape = {}},
                                  {.name = "z", .dtype = DType::i64, .shape = {0}}};

int refusal_code(std::vector<NewTensor> tensors, const Metadata& metadata = {},
                 std::size_t to = 8) {
  const Result<NewHeader> header = make_header(tensors, metadata, to);
  return header.ok() ? 0 : header.error().code();
}

TEST(NewHeader, tensors_come_by_falling_dtype_and_then_by_name) {
  const NewHeader header = make_header(some, Metadata{{"k", "\"v\""}}, 8).or_throw();
  const std::string json = R"({"__metadata__":{"k":"\"v\""},)"
                           R"("z":{"dtype":"I64","shape":[0],"data_offsets":[0,0]},)"
                           R"("é\n":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
                           R"("a":{"dtype":"U8","shape":[],"data_offsets":[8,9]},)"
                           R"("b":{"dtype":"U8","shape":[3],"data_offsets":[9,12]}})";
  EXPECT_EQ(header.bytes.substr(8, json.size()), json);
  EXPECT_EQ(header.bytes.find_first_not_of(' ', 8 + json.size()), std::string::npos);
  EXPECT_EQ(header.bytes.size() % 8, 0U);
  EXPECT_LT(header.bytes.size(), 8 + json.size() + 8);
  EXPECT_EQ(header.order, (std::vector<std::size_t>{3, 1, 2, 0}));
  EXPECT_EQ(header.data_bytes, 12U);
}

TEST(NewHeader, is_padded_to_any_power_of_two) {
  for (const std::size_t alignment : {1U, 8U, 64U, 512U, 4096U, 1U << 20U}) {
    const NewHeader header = make_header(some, std::nullopt, alignment).or_throw();
    EXPECT_EQ(header.bytes.size() % alignment, 0U);
    const auto bytes = std::as_bytes(std::span(header.bytes));
    const std::uint64_t length = header_json_bytes(bytes.first(8), bytes.size(), "").or_throw();
    EXPECT_EQ(length, header.bytes.size() - 8);
    const Header read = parse_header(bytes.subspan(8), header.data_bytes, "").or_throw();
    ASSERT_EQ(read.tensors.size(), some.size());
    for (std::size_t i = 0; i < some.size(); ++i) {
      EXPECT_EQ(read.tensors[i].name, some[header.order[i]].name);
      EXPECT_EQ(read.tensors[i].dtype, some[header.order[i]].dtype);
      EXPECT_EQ(read.tensors[i].shape, some[header.order[i]].shape);
    }
  }
}

TEST(NewHeader, without_tensors_is_an_empty_object) {
  EXPECT_EQ(make_header({}, std::nullopt, 8).or_throw().bytes.substr(8), "{}      ");
  EXPECT_EQ(make_header({}, Metadata{}, 8).or_throw().bytes.substr(8),
            R"({"__metadata__":{}}     )");
}

TEST(NewHeader, what_nobody_could_read_is_refused) {
  EXPECT_EQ(refusal_code(some), 0);
  EXPECT_EQ(refusal_code({some[0], some[1], some[0]}), EINVAL);
  EXPECT_EQ(refusal_code({{.name = "__metadata__"}}), EINVAL);
  EXPECT_EQ(refusal_code({{.name = "\xff"}}), EINVAL);
  EXPECT_EQ(refusal_code({{.name = "a", .dtype = DType::f4, .shape = {3}}}), EINVAL);
  EXPECT_EQ(refusal_code({{.name = "a", .dtype = DType::u8, .shape = {UINT64_MAX}}}), EINVAL);
  EXPECT_EQ(refusal_code(some, {{"\xff", ""}}), EINVAL);
  EXPECT_EQ(refusal_code(some, {{"", "\xff"}}), EINVAL);
  EXPECT_EQ(refusal_code(some, {{"", std::string(header_json_bytes_max, 'x')}}), EINVAL);
  for (const std::size_t alignment : {0U, 3U, 4095U, 1U << 31U}) {
    EXPECT_EQ(refusal_code(some, {}, alignment), EINVAL) << alignment;
  }
}

TEST(NewHeader, more_bytes_than_a_file_can_have_are_refused) {
  std::vector<NewTensor> tensors;
  for (int i = 0; i < 5; ++i) {
    tensors.push_back(
        {.name = std::to_string(i), .dtype = DType::u8, .shape = {(std::uint64_t{1} << 61U) - 1}});
  }
  EXPECT_EQ(refusal_code(tensors), EINVAL);
}

}  // namespace
}  // namespace tensorferry::checkpoint
