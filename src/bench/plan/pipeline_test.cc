// Compares with what can be worked out by hand.
#include "bench/plan/pipeline.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace tensorferry::bench {
namespace {

// Reads and writes 100 bytes a second, and so much of both together.
Pipeline pipeline_of(std::size_t stages, Stage stage, double both = 100) {
  Pipeline pipeline{.loads_max = 4, .buffer_bytes = 1000, .drive = {100, 100, both}};
  pipeline.stages.assign(stages, stage);
  return pipeline;
}

TEST(pipeline, a_channel_has_the_speeds_that_it_was_given) {
  const Channel channel{.read = 80, .write = 40, .both = 90};
  EXPECT_DOUBLE_EQ(channel.rate(1), 80);
  EXPECT_DOUBLE_EQ(channel.rate(0), 40);
  EXPECT_NEAR(channel.rate(0.5), 90, 1e-9);
}

TEST(pipeline, one_stage_is_read_computed_and_written_in_turn) {
  Pipeline pipeline = pipeline_of(
      1, {.read_bytes = 200, .compute_seconds = 3, .write_bytes = 100, .held_bytes = 200});
  pipeline.start_seconds = 0.25;
  const Course course = run(pipeline);
  EXPECT_NEAR(course.seconds, 2.25 + 3 + 1.25, 1e-9);
  EXPECT_NEAR(course.compute_seconds, 3, 1e-9);
  EXPECT_NEAR(course.timings[0].read_end, 2.25, 1e-9);
  EXPECT_NEAR(course.timings[0].write_end, 6.5, 1e-9);
}

TEST(pipeline, computation_hides_the_drive_but_for_both_ends) {
  const Course course = run(pipeline_of(
      10, {.read_bytes = 100, .compute_seconds = 5, .write_bytes = 100, .held_bytes = 100}));
  // Four reads share the drive, so the first one arrives with the last.
  EXPECT_NEAR(course.seconds, 4 + 10 * 5 + 1, 0.01);
}

TEST(pipeline, a_drive_that_is_the_limit_moves_all_bytes_at_its_speed) {
  const Course course = run(pipeline_of(
      50, {.read_bytes = 100, .compute_seconds = 0.01, .write_bytes = 100, .held_bytes = 100}));
  EXPECT_NEAR(course.seconds, 100, 2);
}

TEST(pipeline, a_drive_that_does_both_at_once_takes_half_the_time) {
  const Course course = run(pipeline_of(
      50, {.read_bytes = 100, .compute_seconds = 0.01, .write_bytes = 100, .held_bytes = 100},
      200));
  EXPECT_NEAR(course.seconds, 52, 4);
}

TEST(pipeline, one_buffer_does_everything_in_turn) {
  Pipeline pipeline = pipeline_of(
      10, {.read_bytes = 100, .compute_seconds = 2, .write_bytes = 100, .held_bytes = 100});
  pipeline.buffer_bytes = 100;
  EXPECT_NEAR(run(pipeline).seconds, 10 * (1 + 2 + 1), 1e-6);
}

TEST(pipeline, what_stays_in_place_moves_nothing) {
  const Course course = run(pipeline_of(10, {.compute_seconds = 2, .way = Way::in_place}));
  EXPECT_NEAR(course.seconds, 20, 1e-9);
  EXPECT_NEAR(course.waited_seconds, 0, 1e-9);
}

TEST(pipeline, copies_do_not_wait_for_the_drive) {
  Pipeline pipeline = pipeline_of(
      20, {.read_bytes = 100, .compute_seconds = 0.01, .write_bytes = 100, .held_bytes = 100});
  for (std::size_t i = 0; i < pipeline.stages.size(); i += 2) {
    pipeline.stages[i].way = Way::copies;
  }
  pipeline.copies = {1000, 1000, 1000};
  EXPECT_NEAR(run(pipeline).seconds, 20, 3);
}

TEST(pipeline, a_channel_without_speed_is_an_error_and_no_endless_wait) {
  Pipeline pipeline = pipeline_of(3, {.read_bytes = 100, .held_bytes = 100});
  pipeline.drive = {};
  EXPECT_THROW((void)run(pipeline), std::logic_error);
}

TEST(pipeline, no_stages_take_no_time) { EXPECT_EQ(run(pipeline_of(0, {})).seconds, 0); }

}  // namespace
}  // namespace tensorferry::bench
