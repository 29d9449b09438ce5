// tests/command/test_plan.py counts against models that transformers builds.
#include "bench/plan/architecture.h"

#include <gtest/gtest.h>

#include "tensorferry/error.h"

namespace tensorferry::bench {
namespace {

TEST(architecture, a_number_of_parameters_is_kept) {
  for (const double parameters : {1e6, 7e9, 70e9, 1e12}) {
    EXPECT_NEAR(model_of(parameters, 0).parameters(), parameters, parameters * 1e-9);
  }
  const Model seventy = model_of(70e9, 0);
  EXPECT_NEAR(seventy.layers, 71, 1);
  EXPECT_NEAR(seventy.hidden, 9070, 100);
  EXPECT_EQ(model_of(70e9, 80).layers, 80);
}

TEST(architecture, experts_that_are_not_chosen_do_not_compute) {
  Model model;
  model.tensors = {{100, 1, false}, {800, 1, true}};
  model.experts = 8;
  model.experts_chosen = 2;
  EXPECT_EQ(model.parameters(), 900);
  EXPECT_EQ(model.active_parameters(), 300);
}

TEST(architecture, other_architectures_are_refused_with_a_way_out) {
  try {
    (void)model_of(Json{{"model_type", "whisper"}}, "config.json");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(error.hint().find("whisper"), std::string::npos);
    EXPECT_NE(error.hint().find("--parameters"), std::string::npos);
  }
  EXPECT_THROW((void)model_of(Json::array(), "config.json"), Error);
  EXPECT_THROW((void)model_of(Json{{"model_type", "llama"}}, "config.json"), Error);
  EXPECT_THROW((void)model_of(Json{{"model_type", "gpt2"}, {"vocab_size", "x"}}, "config.json"),
               Error);
  EXPECT_THROW((void)model_of(Json{{"model_type", "gpt2"}, {"vocab_size", -1}}, "config.json"),
               Error);
  EXPECT_THROW((void)model_of(Json{{"model_type", "gpt2"}, {"vocab_size", 10.5}}, "config.json"),
               Error);
}

TEST(architecture, layers_of_qwen_may_have_no_experts) {
  Json config{
      {"model_type", "qwen3_moe"}, {"vocab_size", 1000},       {"hidden_size", 64},
      {"num_hidden_layers", 6},    {"intermediate_size", 200}, {"num_attention_heads", 4},
      {"num_experts", 8},          {"num_experts_per_tok", 2}, {"moe_intermediate_size", 16}};
  const double expert = 8 * 3 * 16 * 64 + 64 * 8;
  const double ordinary = 3 * 200 * 64;
  const double all = model_of(config, "config.json").parameters();
  config["decoder_sparse_step"] = 2;  // layers 1, 3 and 5
  EXPECT_EQ(all - model_of(config, "config.json").parameters(), 3 * (expert - ordinary));
  config["mlp_only_layers"] = {0, 3, 17};  // of which 3 had some
  EXPECT_EQ(all - model_of(config, "config.json").parameters(), 4 * (expert - ordinary));
  config["decoder_sparse_step"] = 7;
  EXPECT_EQ(model_of(config, "config.json").experts, 0);
}

TEST(architecture, sizes_of_no_model_are_refused) {
  Json config{{"model_type", "gpt2"}, {"vocab_size", 1}, {"n_embd", 0}};
  EXPECT_THROW((void)model_of(config, "config.json"), Error);
  config["vocab_size"] = config["n_embd"] = 1e9;
  EXPECT_THROW((void)model_of(config, "config.json"), Error);
}

}  // namespace
}  // namespace tensorferry::bench
