// The version: numbers for the preprocessor, text for people, and the version of the library.
#include "tensorferry/version.h"

#include <gtest/gtest.h>

#include <string>

#if TENSORFERRY_VERSION_NUMBER < 1000 || TENSORFERRY_VERSION_MAJOR > 1000
#error "the preprocessor cannot compare versions"
#endif

namespace tensorferry {
namespace {

TEST(Version, the_text_is_made_of_the_numbers) {
  EXPECT_EQ(std::string(TENSORFERRY_VERSION), std::to_string(TENSORFERRY_VERSION_MAJOR) + "." +
                                                  std::to_string(TENSORFERRY_VERSION_MINOR) + "." +
                                                  std::to_string(TENSORFERRY_VERSION_PATCH));
}

TEST(Version, the_one_number_grows_with_each_of_its_parts) {
  static_assert(TENSORFERRY_VERSION_MINOR < 1000 && TENSORFERRY_VERSION_PATCH < 1000,
                "they would run into each other");
  EXPECT_EQ(TENSORFERRY_VERSION_NUMBER / 1000000, TENSORFERRY_VERSION_MAJOR);
  EXPECT_EQ(TENSORFERRY_VERSION_NUMBER / 1000 % 1000, TENSORFERRY_VERSION_MINOR);
  EXPECT_EQ(TENSORFERRY_VERSION_NUMBER % 1000, TENSORFERRY_VERSION_PATCH);
}

TEST(Version, the_library_knows_its_own) {
  EXPECT_EQ(library_version(), TENSORFERRY_VERSION);
  EXPECT_EQ(library_version_number(), std::uint32_t{TENSORFERRY_VERSION_NUMBER});
}

}  // namespace
}  // namespace tensorferry
