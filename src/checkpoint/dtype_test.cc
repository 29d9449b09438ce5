#include <gtest/gtest.h>

#include <string>

#include "tensorferry/checkpoint.h"

namespace tensorferry {
namespace {

constexpr int dtype_count = 22;

TEST(DTypeNames, each_name_leads_back_to_its_dtype) {
  for (int i = 0; i < dtype_count; ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_named(to_string(dtype)), dtype) << to_string(dtype);
  }
}

TEST(DTypeNames, are_those_of_safetensors) {
  EXPECT_EQ(to_string(DType::boolean), "BOOL");
  EXPECT_EQ(to_string(DType::f6_e3m2), "F6_E3M2");
  EXPECT_EQ(to_string(DType::f8_e5m2fnuz), "F8_E5M2FNUZ");
  EXPECT_EQ(to_string(DType::bf16), "BF16");
  EXPECT_EQ(to_string(DType::u64), "U64");
}

TEST(DTypeNames, others_have_no_dtype) {
  for (const char* name : {"", "F32 ", "f32", "F128", "F3", "BOOLEAN"}) {
    EXPECT_EQ(dtype_named(name), std::nullopt) << name;
  }
}

TEST(DTypeNames, a_number_in_the_name_is_the_count_of_bits) {
  EXPECT_EQ(bits_of(DType::boolean), 8U);
  for (int i = 1; i < dtype_count; ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::string name(to_string(dtype));
    EXPECT_EQ(bits_of(dtype), std::stoul(name.substr(name.find_first_of("123468")))) << name;
  }
}

}  // namespace
}  // namespace tensorferry
