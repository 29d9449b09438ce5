#include "tensorferry/error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <type_traits>

#include "base/result.h"

namespace tensorferry {
namespace {

Error::Details read_failure() {
  return {.operation = "read",
          .path = "weights.bin",
          .offset = 4096,
          .length = 1048576,
          .code = EIO,
          .hint = "the drive could not read it"};
}

TEST(Error, says_everything_it_knows) {
  EXPECT_STREQ(Error(read_failure()).what(),
               "read: weights.bin: offset 4096, length 1048576: Input/output error (EIO): the "
               "drive could not read it");
}

TEST(Error, leaves_out_what_it_does_not_know) {
  Error::Details details = read_failure();
  details.hint.clear();
  details.offset.reset();
  EXPECT_STREQ(Error(details).what(),
               "read: weights.bin: length 1048576: Input/output error (EIO)");
  details.length.reset();
  details.path.clear();
  EXPECT_STREQ(Error(details).what(), "read: Input/output error (EIO)");
  details.code = 0;
  EXPECT_STREQ(Error(details).what(), "read");
}

TEST(Error, tells_an_offset_of_zero_from_no_offset) {
  Error::Details details = read_failure();
  details.offset = 0;
  details.length.reset();
  details.hint.clear();
  EXPECT_STREQ(Error(details).what(), "read: weights.bin: offset 0: Input/output error (EIO)");
}

TEST(Error, names_a_code_that_the_system_does_not_know_by_its_number) {
  Error::Details details;
  details.operation = "read";
  details.code = 98765;
  EXPECT_STREQ(Error(details).what(), "read: unknown error (98765)");
}

TEST(Error, gives_back_its_details) {
  const Error error(read_failure());
  EXPECT_EQ(error.operation(), "read");
  EXPECT_EQ(error.path(), "weights.bin");
  EXPECT_EQ(error.offset(), 4096u);
  EXPECT_EQ(error.length(), 1048576u);
  EXPECT_EQ(error.code(), EIO);
  EXPECT_EQ(error.hint(), "the drive could not read it");
}

TEST(Error, copies_without_throwing_and_outlives_the_original) {
  static_assert(std::is_nothrow_copy_constructible_v<Error>);
  static_assert(std::is_nothrow_copy_assignable_v<Error>);
  Error kept{{.operation = "open", .code = 0}};
  {
    const Error original(read_failure());
    kept = original;
  }
  EXPECT_EQ(kept.path(), "weights.bin");
}

TEST(Error, is_caught_as_a_standard_exception) {
  try {
    throw Error(read_failure());
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("EIO"), std::string::npos);
  }
}

TEST(Result, holds_a_value_or_an_error) {
  const Result<int> value(7);
  ASSERT_TRUE(value.ok());
  EXPECT_EQ(value.value(), 7);
  const Result<int> failure(Error{read_failure()});
  ASSERT_FALSE(failure.ok());
  EXPECT_EQ(failure.error().code(), EIO);
}

TEST(Result, turns_its_error_into_an_exception_at_the_door) {
  EXPECT_EQ(Result<int>(7).or_throw(), 7);
  EXPECT_THROW(static_cast<void>(Result<int>(Error{read_failure()}).or_throw()), Error);
}

}  // namespace
}  // namespace tensorferry
