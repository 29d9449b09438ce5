#include "checkpoint/slices.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <numeric>

namespace tensorferry::checkpoint {
namespace {

TensorInfo tensor_of(DType dtype, std::vector<std::uint64_t> shape) {
  std::uint64_t bits = bits_of(dtype);
  for (const std::uint64_t size : shape) bits *= size;
  return {.name = "t", .dtype = dtype, .shape = std::move(shape), .bytes = bits / 8};
}

// The bytes of a slice, by the definition: element after element.
std::vector<std::uint64_t> expected(const TensorInfo& tensor, std::vector<IndexRange> ranges) {
  ranges.resize(tensor.shape.size());
  const std::uint64_t element = bits_of(tensor.dtype) / 8;
  std::vector<std::uint64_t> bytes;
  const auto walk = [&](const auto& self, std::size_t dimension, std::uint64_t index) -> void {
    if (dimension == tensor.shape.size()) {
      for (std::uint64_t i = 0; i < element; ++i) bytes.push_back(index * element + i);
      return;
    }
    const std::uint64_t end = std::min(ranges[dimension].end, tensor.shape[dimension]);
    for (std::uint64_t i = ranges[dimension].begin; i < end; ++i) {
      self(self, dimension + 1, index * tensor.shape[dimension] + i);
    }
  };
  walk(walk, 0, 0);
  return bytes;
}

std::vector<std::uint64_t> found(const Slices& slices) {
  std::vector<std::uint64_t> bytes;
  slices.for_each([&](std::uint64_t offset) {
    for (std::uint64_t i = 0; i < slices.bytes; ++i) bytes.push_back(offset + i);
  });
  return bytes;
}

TEST(SlicesTest, are_the_bytes_that_the_ranges_name_in_order) {
  const TensorInfo tensor = tensor_of(DType::i16, {4, 5, 6});
  std::size_t cases = 0;
  const std::vector<IndexRange> choices{{0, 4}, {1, 3}, {2, 2}, {3}, {}, {0, 1}, {0, 99}};
  for (const IndexRange& a : choices) {
    for (const IndexRange& b : choices) {
      for (const IndexRange& c : choices) {
        const std::vector<IndexRange> ranges{a, b, c};
        for (std::size_t given = 0; given <= 3; ++given) {
          const auto slices = slices_of(tensor, std::span(ranges).first(given));
          ASSERT_TRUE(slices.ok()) << slices.error().what();
          const auto bytes =
              expected(tensor, {ranges.begin(), ranges.begin() + static_cast<long>(given)});
          ASSERT_EQ(found(slices.value()), bytes);
          EXPECT_EQ(slices.value().total_bytes(), bytes.size());
          EXPECT_EQ(slices.value().whole, bytes.size() == tensor.bytes);
          ++cases;
        }
      }
    }
  }
  EXPECT_EQ(cases, 7U * 7U * 7U * 4U);
}

TEST(SlicesTest, rows_are_one_run) {
  const auto slices =
      slices_of(tensor_of(DType::f32, {100, 20, 3}), std::vector<IndexRange>{{7, 9}});
  ASSERT_TRUE(slices.ok());
  EXPECT_TRUE(slices.value().dimensions.empty());
  EXPECT_EQ(slices.value().offset, 7U * 240U);
  EXPECT_EQ(slices.value().bytes, 2U * 240U);
}

TEST(SlicesTest, a_scalar_and_an_empty_tensor_are_whole) {
  const auto scalar = slices_of(tensor_of(DType::f64, {}), {});
  ASSERT_TRUE(scalar.ok());
  EXPECT_EQ(found(scalar.value()).size(), 8U);
  EXPECT_TRUE(scalar.value().whole);
  const auto empty = slices_of(tensor_of(DType::f64, {0, 3}), {});
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ(found(empty.value()).size(), 0U);
  EXPECT_TRUE(empty.value().whole);
}

TEST(SlicesTest, ranges_that_the_tensor_does_not_have_are_refused) {
  const TensorInfo tensor = tensor_of(DType::f32, {4, 5});
  for (const std::vector<IndexRange>& ranges :
       {std::vector<IndexRange>{{5}}, {{3, 2}}, {{0, 4}, {6}}, {{}, {}, {}}}) {
    const auto slices = slices_of(tensor, ranges);
    ASSERT_FALSE(slices.ok());
    EXPECT_EQ(slices.error().code(), EINVAL);
    EXPECT_NE(slices.error().hint().find("'t'"), std::string::npos) << slices.error().what();
  }
}

TEST(SlicesTest, packed_elements_are_cut_between_bytes_only) {
  const TensorInfo tensor = tensor_of(DType::f4, {4, 6});
  EXPECT_TRUE(slices_of(tensor, std::vector<IndexRange>{{1, 2}}).ok());
  EXPECT_TRUE(slices_of(tensor, std::vector<IndexRange>{{}, {2, 4}}).ok());
  EXPECT_FALSE(slices_of(tensor, std::vector<IndexRange>{{}, {1, 3}}).ok());
  EXPECT_FALSE(slices_of(tensor, std::vector<IndexRange>{{}, {0, 3}}).ok());
  const TensorInfo odd = tensor_of(DType::f4, {4, 5});
  EXPECT_FALSE(slices_of(odd, std::vector<IndexRange>{{0, 1}}).ok());
  EXPECT_TRUE(slices_of(odd, std::vector<IndexRange>{{2, 4}}).ok());
}

}  // namespace
}  // namespace tensorferry::checkpoint
