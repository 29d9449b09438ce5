#include "bench/measure/sweep.h"

#include <gtest/gtest.h>

#include <set>

#include "tensorferry/error.h"

namespace tensorferry::bench {
namespace {

TEST(sweep, the_default_space_is_the_one_promised) {
  const auto points = points_of(SweepSpace{});
  EXPECT_EQ(points.size(), 4U * 4 * 2 * 3);
  std::set<std::string> names;
  for (const Point& point : points) names.insert(log_name(Direction::read, point));
  EXPECT_EQ(names.size(), points.size());
  EXPECT_TRUE(names.contains("read_block_overlap_t1_p8_d64_bs1M.txt"));
  EXPECT_TRUE(names.contains("read_block_sequential_t1_p1_d4_bs128K.txt"));
}

TEST(sweep, the_space_of_the_seed_is_read) {
  const SweepSpace space = parse_space(Json::parse(R"({
    "block_size": ["128K", "256K", "512K", "1M"], "queue_depth": [4, 8, 16, 32, 64],
    "overlap_events": [true, false], "io_parallel": [1, 2, 4, 8], "single_submit": [false]})"));
  EXPECT_EQ(points_of(space).size(), 4U * 5 * 2 * 4);
  EXPECT_EQ(space.block_bytes.back(), MiB);
  EXPECT_EQ(space.submit, std::vector{Submit::batch});
}

TEST(sweep, a_space_of_deepspeeds_own_may_say_that_there_is_one_thread) {
  EXPECT_EQ(
      points_of(parse_space(Json::parse(R"({"threads": [1], "queue_depth": [1, 2]})"))).size(), 2U);
}

TEST(sweep, what_is_not_named_has_one_value) {
  const SweepSpace space = parse_space(Json::parse(R"({"queue_depth": 8, "engine": ["libaio"]})"));
  ASSERT_EQ(points_of(space).size(), 1U);
  EXPECT_EQ(points_of(space).front().queue_depth, 8U);
  EXPECT_EQ(points_of(space).front().overlap, Overlap::off);
  EXPECT_EQ(space.engines, std::vector{EngineKind::libaio});
}

TEST(sweep, sequential_requests_is_the_other_way_round) {
  const SweepSpace space = parse_space(Json::parse(R"({"sequential_requests": [true, false]})"));
  EXPECT_EQ(space.overlap, (std::vector{Overlap::off, Overlap::on}));
}

TEST(sweep, nonsense_is_refused_by_name) {
  for (const char* text :
       {R"({"blok_size": ["1M"]})", R"({"block_size": ["1X"]})", R"({"queue_depth": [0]})",
        R"({"queue_depth": ["four"]})", R"({"overlap_events": [1]})", R"({"io_parallel": []})",
        R"({"io_parallel": [-1]})", R"({"engine": ["warp"]})", R"([1])", R"({"block_size": [0]})",
        R"({"queue_depth": [5000]})", R"({"block_size": ["2G"]})", R"({"threads": [2]})"}) {
    EXPECT_THROW((void)parse_space(Json::parse(text)), Error) << text;
  }
}

TEST(sweep, an_earlier_one_is_read_whatever_its_file_has) {
  for (const char* text : {R"([])", R"({"command": 5, "points": []})", R"({"command": "sweep"})",
                           R"({"command": "sweep", "points": {}})", R"("sweep")"}) {
    EXPECT_FALSE(earlier_sweep(Json::parse(text)).has_value()) << text;
  }
  const auto earlier =
      earlier_sweep(Json::parse(R"({"command": "sweep", "complete": "yes", "points": [
      7, {"log": 5, "status": ["ok"]}, {"log": "a.txt", "status": "ok", "gb_per_second": null},
      {"log": "b.txt", "status": "ok", "gb_per_second": 1.5}]})"));
  ASSERT_TRUE(earlier.has_value());
  EXPECT_FALSE(earlier->complete);
  ASSERT_EQ(earlier->points.size(), 4U);
  EXPECT_EQ(earlier->points[1].log, "");
  EXPECT_EQ(earlier->points[2].log, "a.txt");
  EXPECT_FALSE(earlier->points[2].measured);
  EXPECT_TRUE(earlier->points[3].measured);
}

TEST(sweep, several_engines_and_directories_get_a_folder_each) {
  SweepOptions options;
  options.directories = {"/tmp"};
  options.log_directory = "logs";
  options.space = parse_space(Json::object());
  EXPECT_EQ(jobs_of(options).front().log, "logs/read/read_block_sequential_t1_p1_d32_bs1M.txt");
  options.engines = {EngineKind::io_uring, EngineKind::libaio};
  options.directories = {"/tmp", "/"};
  std::set<std::string> logs;
  for (const Job& job : jobs_of(options)) logs.insert(job.log);
  EXPECT_EQ(logs.size(), 2U * 2 * 2);
  EXPECT_TRUE(logs.contains("logs/tmp/libaio/write/write_block_sequential_t1_p1_d32_bs1M.txt"));
  EXPECT_TRUE(logs.contains("logs/root/io_uring/read/read_block_sequential_t1_p1_d32_bs1M.txt"));
}

TEST(sweep, an_entry_is_recognised_and_no_other) {
  SweepOptions options;
  options.directories = {"/tmp"};
  const auto jobs = jobs_of(options);
  Json entry = to_json(jobs[3].point);
  entry["directory"] = "/tmp";
  entry["engine"] = "auto";
  entry["direction"] = "read";
  for (std::size_t i = 0; i < jobs.size(); ++i) EXPECT_EQ(describes(entry, jobs[i]), i == 3);
}

TEST(sweep, cells_with_commas_are_quoted) {
  const Json points = Json::array({{{"directory", "/a,\"b\""}, {"gb_per_second", 1.5}}});
  EXPECT_EQ(to_csv(points),
            "directory,engine,direction,block_bytes,queue_depth,overlap,workers,submit,status,"
            "gb_per_second,log\n\"/a,\"\"b\"\"\",,,,,,,,,1.5,\n");
}

}  // namespace
}  // namespace tensorferry::bench
