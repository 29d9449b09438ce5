// The choices of the tuner, without a drive. tests/command runs it on a drive.
#include "bench/measure/tune.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tensorferry/error.h"

namespace tensorferry::bench {
namespace {

Candidate candidate(unsigned depth, std::vector<double> scores) {
  Candidate made;
  made.point.queue_depth = depth;
  made.scores = std::move(scores);
  return made;
}

TEST(tune, at_most_half_is_kept_and_it_is_the_better_half) {
  Round round;
  for (unsigned i = 1; i <= 7; ++i) {
    const double score = 1 + 0.001 * i;
    round.candidates.push_back(candidate(i, {score - 0.2, score + 0.2}));
  }
  const auto kept = keep(round);
  ASSERT_EQ(kept.size(), 4U);
  EXPECT_EQ(kept.front().queue_depth, 7U);
  EXPECT_EQ(kept.back().queue_depth, 4U);
  EXPECT_TRUE(round.candidates.front().kept);
  EXPECT_FALSE(round.candidates.back().kept);
}

TEST(tune, one_whose_interval_lies_below_the_best_is_dropped_at_once) {
  Round round;
  round.candidates = {candidate(1, {1.0, 1.01, 0.99}), candidate(2, {0.5, 0.51, 0.49}),
                      candidate(3, {0.4, 0.41, 0.39}), candidate(4, {0.3, 0.31, 0.29})};
  EXPECT_EQ(keep(round).size(), 1U);
}

TEST(tune, of_equals_the_usual_one_is_chosen_and_else_the_cheapest) {
  Round round;
  round.candidates = {candidate(64, {1.0, 1.0}), candidate(32, {0.995, 0.995}),
                      candidate(8, {0.992, 0.992}), candidate(4, {0.9, 0.9})};
  Point usual;
  usual.queue_depth = 32;
  EXPECT_EQ(choose(round, usual).point.queue_depth, 32U);
  usual.queue_depth = 1000;
  EXPECT_EQ(choose(round, usual).point.queue_depth, 8U);
  round.candidates.front().scores = {1.2, 1.2};
  EXPECT_EQ(choose(round, usual).point.queue_depth, 64U) << "a real difference counts";
}

TEST(tune, tries_polling_where_it_is_asked_for_or_the_drive_has_queues_for_it) {
  Volume plain;
  Volume polled;
  polled.device.polled_queues = true;
  const TuneOptions asked{.polling = {Polling::submission}};
  EXPECT_EQ(polling_for(plain, {}), std::vector<Polling>{});
  EXPECT_EQ(polling_for(plain, asked), std::vector{Polling::submission});
  EXPECT_EQ(polling_for(polled, {}), std::vector{Polling::completion});
  EXPECT_EQ(polling_for(polled, asked), (std::vector{Polling::submission, Polling::completion}));
}

TEST(tune, the_block_for_deepspeed_has_real_booleans) {
  const Json block = aio_block({.block_bytes = 512 * KiB,
                                .queue_depth = 16,
                                .overlap = Overlap::on,
                                .workers = 2,
                                .submit = Submit::batch,
                                .engine = EngineKind::io_uring});
  EXPECT_EQ(block.dump(), R"({"block_size":524288,"queue_depth":16,"intra_op_parallelism":2,)"
                          R"("single_submit":false,"overlap_events":true})");
}

TEST(tune, a_profile_has_the_settings_and_the_median_speed_of_each_direction_measured) {
  Candidate best = candidate(16, {1.0});
  best.point.workers = 2;
  best.read_speeds = {3e9, 5e9, 4e9};
  const Profile profile = profile_of(best);
  EXPECT_EQ(profile.queue_depth, 16U);
  EXPECT_EQ(profile.workers, 2U);
  EXPECT_EQ(profile.read_bytes_per_second, 4'000'000'000U);
  EXPECT_EQ(profile.write_bytes_per_second, 0U) << "not measured";
}

class Config : public testing::Test {
 protected:
  Config() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tune_test.XXXXXX").string();
    volume_ = mkdtemp(pattern.data());
  }
  ~Config() override {
    std::error_code ignored;
    std::filesystem::remove_all(volume_, ignored);
  }
  [[nodiscard]] std::string path() const { return volume_ / "ds_config.json"; }
  void write(const char* text) const { std::ofstream(path()) << text; }
  [[nodiscard]] std::string text() const {
    std::ostringstream out;
    out << std::ifstream(path()).rdbuf();
    return out.str();
  }
  std::filesystem::path volume_;
};

TEST_F(Config, keeps_the_rest_and_its_order) {
  write(R"({"zero_optimization": {"stage": 3}, "aio": {"use_gds": true, "block_size": 1},
            "bf16": {"enabled": true}})");
  write_config(path(), {});
  const Json config = Json::parse(text());
  EXPECT_EQ(config["zero_optimization"]["stage"], 3);
  EXPECT_EQ(config["aio"]["use_gds"], true);
  EXPECT_EQ(config["aio"]["block_size"], MiB);
  EXPECT_EQ(config["aio"]["overlap_events"], true);
  EXPECT_LT(text().find("zero_optimization"), text().find("aio"));
  EXPECT_LT(text().find("aio"), text().find("bf16"));
}

TEST_F(Config, a_missing_file_is_made) {
  write_config(path(), {});
  EXPECT_EQ(Json::parse(text()).size(), 1U);
}

TEST_F(Config, a_file_that_is_not_json_stays_as_it_was) {
  for (const char* bad : {"{oops", "[1]", R"({"aio": 3})"}) {
    write(bad);
    EXPECT_THROW(check_config(path()), Error);
    EXPECT_THROW(write_config(path(), {}), Error);
    EXPECT_EQ(text(), bad);
  }
}

}  // namespace
}  // namespace tensorferry::bench
