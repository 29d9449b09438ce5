#include "bench/run/process.h"

#include <gtest/gtest.h>

namespace tensorferry::bench {
namespace {

TEST(process, tells_how_it_ended) {
  EXPECT_EQ(run_process({"true"}), 0);
  EXPECT_EQ(run_process({"sh", "-c", "exit 3"}), 3);
  EXPECT_EQ(run_process({"sh", "-c", "kill -9 $$"}), 128 + 9);
  EXPECT_EQ(run_process({"no-such-program-anywhere"}), 127);
}

TEST(process, words_become_a_line_that_a_shell_reads_back) {
  EXPECT_EQ(shell_line({"tensorferry", "point", "--io_size", "4M"}),
            "tensorferry point --io_size 4M");
  EXPECT_EQ(shell_line({"a b", "", "it's"}), R"('a b' '' 'it'\''s')");
}

}  // namespace
}  // namespace tensorferry::bench
