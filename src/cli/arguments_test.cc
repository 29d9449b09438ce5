#include "cli/arguments.h"

#include <gtest/gtest.h>

namespace tensorferry::cli {
namespace {

using Words = std::vector<std::string>;

TEST(arguments, underscores_in_names_become_dashes) {
  EXPECT_EQ(normalize({"sweep", "--nvme_dir", "/a_b", "--io_size=4_K", "-x_y", "a_b"}),
            (Words{"sweep", "--nvme-dir", "/a_b", "--io-size=4_K", "-x_y", "a_b"}));
  EXPECT_EQ(normalize({"--a_b", "--", "--c_d"}), (Words{"--a-b", "--", "--c_d"}));
}

TEST(arguments, the_nearest_name_is_found) {
  const Words known{"--block-size", "--queue-depth", "--json", "--sizes"};
  EXPECT_EQ(nearest("--blok-size", known), "--block-size");
  EXPECT_EQ(nearest("--size", known), "--sizes");
  EXPECT_EQ(nearest("--queue", known), "--queue-depth");
  EXPECT_EQ(nearest("--frobnicate-all", known), "");
  EXPECT_EQ(nearest("benhc", {"sweep", "bench", "tune"}), "bench");
  EXPECT_EQ(nearest("tnue", {"sweep", "bench", "tune"}), "tune");
}

TEST(arguments, sizes_are_read_and_bad_ones_refused) {
  CLI::App app;
  std::vector<std::uint64_t> sizes{1024};
  add_sizes(app, "--sizes", sizes, "");
  app.parse("--sizes 2M 4k");
  EXPECT_EQ(sizes, (std::vector<std::uint64_t>{2 << 20, 4096}));
  EXPECT_THROW(app.parse("--sizes 2Q"), CLI::ValidationError);
  EXPECT_THROW(app.parse("--sizes 0"), CLI::ValidationError);
}

}  // namespace
}  // namespace tensorferry::cli
