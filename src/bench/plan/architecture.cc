#include "bench/plan/architecture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <map>

#include "tensorferry/error.h"

namespace tensorferry::bench {

namespace {

// Reads keys of a config.json.
class Keys {
 public:
  Keys(const Json& config, const std::string& path) : config_(config), path_(path) {}

  [[nodiscard]] bool has(const char* key) const {
    const auto found = config_.find(key);
    return found != config_.end() && !found->is_null();
  }

  [[nodiscard]] double number(const char* key) const {
    const auto found = config_.find(key);
    if (found == config_.end() || found->is_null()) {
      throw failure(fmt::format("{} is missing", key));
    }
    return checked(key, *found, 1);
  }

  [[nodiscard]] double number(const char* key, double otherwise) const {
    const auto found = config_.find(key);
    return found == config_.end() || found->is_null() ? otherwise : checked(key, *found, 0);
  }

  [[nodiscard]] bool flag(const char* key, bool otherwise) const {
    const auto found = config_.find(key);
    return found == config_.end() || !found->is_boolean() ? otherwise : found->get<bool>();
  }

  [[nodiscard]] std::string text(const char* key) const {
    const auto found = config_.find(key);
    return found == config_.end() || !found->is_string() ? "" : found->get<std::string>();
  }

  [[nodiscard]] std::vector<double> numbers(const char* key) const {
    std::vector<double> found;
    if (!has(key)) return found;
    for (const Json& one : config_.at(key)) found.push_back(checked(key, one, 0));
    return found;
  }

 private:
  // Hostile files have long values.
  static std::string shortened(const std::string& text) {
    constexpr std::size_t most = 60;
    return text.size() <= most ? text : text.substr(0, most) + "...";
  }

  [[nodiscard]] double checked(const char* key, const Json& value, double least) const {
    constexpr double most = 1e9;
    const double number = value.is_number() ? value.get<double>() : -1;
    if (number < least || number > most || number != std::floor(number)) {
      throw failure(fmt::format("{} is {}: it must be a whole number from {:.0f} to a billion", key,
                                shortened(value.dump()), least));
    }
    return number;
  }

  [[nodiscard]] Error failure(const std::string& hint) const {
    return Error({.operation = "read", .path = path_, .code = EBADMSG, .hint = hint});
  }

  const Json& config_;
  const std::string& path_;
};

// A model as it is built.
struct Builder {
  Model model;

  void add(double elements, double count = 1, bool expert = false) {
    if (elements > 0 && count > 0) model.tensors.push_back({elements, count, expert});
  }
  void add_linear(double in, double out, bool has_bias, double count) {
    add(in * out, count);
    if (has_bias) add(out, count);
  }
};

void add_head(Builder& to, const Keys& keys, double width, bool tied) {
  to.model.vocabulary = keys.number("vocab_size");
  to.add(to.model.vocabulary * width);
  if (!tied) to.add(to.model.vocabulary * width);
}

struct Family {
  bool attention_bias = false;  // of query, key and value
  bool output_bias = false;
  bool head_norms = false;  // of each head: qwen3
  bool ties = false;        // by default
};

// Llama and those that follow it: attention with groups of heads, a gated perceptron, two norms.
void add_attention(Builder& to, const Keys& keys, const Family& family) {
  const double width = to.model.hidden;
  const double layers = to.model.layers;
  const double heads = keys.number("num_attention_heads");
  const double groups = keys.number("num_key_value_heads", heads);
  const double head = keys.number("head_dim", heads > 0 ? std::floor(width / heads) : 0);
  to.add_linear(width, heads * head, family.attention_bias, layers);
  to.add_linear(width, groups * head, family.attention_bias, 2 * layers);
  to.add_linear(heads * head, width, family.output_bias, layers);
  if (family.head_norms) to.add(head, 2 * layers);
  to.add(width, 2 * layers);  // norms
}

void add_perceptron(Builder& to, const Keys& keys, bool has_bias, double layers) {
  const double inner = keys.number("intermediate_size");
  to.add_linear(to.model.hidden, inner, has_bias, 2 * layers);
  to.add_linear(inner, to.model.hidden, has_bias, layers);
}

// Layers that have experts: Qwen may leave some with an ordinary perceptron.
double layers_with_experts(const Keys& keys, double layers) {
  const double step = std::max(keys.number("decoder_sparse_step", 1), 1.0);
  double found = std::floor(layers / step);
  for (const double one : keys.numbers("mlp_only_layers")) {
    if (one < layers && std::fmod(one + 1, step) == 0) --found;
  }
  return std::max(found, 0.0);
}

// transformers has given this key two names.
double experts_of(const Keys& keys) {
  return keys.number(keys.has("num_local_experts") ? "num_local_experts" : "num_experts");
}

// A router and experts, each a gated perceptron. transformers keeps those of a layer in two
// tensors.
void add_experts(Builder& to, double experts, double chosen, double inner, double layers) {
  to.model.experts = experts;
  to.model.experts_chosen = std::min(chosen, experts);
  to.add(to.model.hidden * experts, layers);
  to.add(experts * 2 * inner * to.model.hidden, layers, true);
  to.add(experts * inner * to.model.hidden, layers, true);
}

void begin_decoder(Builder& to, const Keys& keys) {
  to.model.hidden = keys.number("hidden_size");
  to.model.layers = keys.number("num_hidden_layers");
}

void add_decoder(Builder& to, const Keys& keys, const std::string& kind) {
  begin_decoder(to, keys);
  Family family;
  const bool qwen2 = kind == "qwen2" || kind == "qwen2_moe";
  const bool qwen3 = kind == "qwen3" || kind == "qwen3_moe";
  const bool asks = kind == "llama" || qwen3;
  family.attention_bias =
      (qwen2 && keys.flag("qkv_bias", true)) || (asks && keys.flag("attention_bias", false));
  family.output_bias = asks && keys.flag("attention_bias", false);
  family.head_norms = qwen3;
  add_attention(to, keys, family);
  if (kind == "mixtral") {
    add_experts(to, experts_of(keys), keys.number("num_experts_per_tok"),
                keys.number("intermediate_size"), to.model.layers);
  } else if (kind == "qwen2_moe" || kind == "qwen3_moe") {
    const double experts = experts_of(keys);
    const double layers = layers_with_experts(keys, to.model.layers);
    if (layers > 0) {
      add_experts(to, experts, keys.number("num_experts_per_tok"),
                  keys.number("moe_intermediate_size"), layers);
    }
    if (kind == "qwen2_moe") {  // and one for all tokens, with a gate
      const double inner = keys.number("shared_expert_intermediate_size");
      to.add(to.model.hidden * inner, 3 * layers);
      to.add(to.model.hidden, layers);
    }
    if (layers < to.model.layers) add_perceptron(to, keys, false, to.model.layers - layers);
  } else {
    add_perceptron(to, keys, kind == "llama" && keys.flag("mlp_bias", false), to.model.layers);
  }
  to.add(to.model.hidden);  // the last norm
  add_head(to, keys, to.model.hidden, keys.flag("tie_word_embeddings", false));
}

void add_gpt2(Builder& to, const Keys& keys) {
  const double width = keys.number("n_embd", 768);
  const double layers = keys.number("n_layer", 12);
  to.model.hidden = width;
  to.model.layers = layers;
  const double inner = keys.number("n_inner", 4 * width);
  to.add(keys.number("n_positions", 1024) * width);
  to.add_linear(width, 3 * width, true, layers);
  to.add_linear(width, width, true, layers);
  to.add_linear(width, inner, true, layers);
  to.add_linear(inner, width, true, layers);
  to.add(width, 4 * layers + 2);  // norms, weight and bias
  add_head(to, keys, width, keys.flag("tie_word_embeddings", true));
}

void add_t5(Builder& to, const Keys& keys) {
  const double width = keys.number("d_model");
  const double inner = keys.number("d_ff");
  const double heads = keys.number("num_heads");
  const double all_heads = heads * keys.number("d_kv");
  const double below = keys.number("num_layers");
  const double above = keys.number("num_decoder_layers", below);
  to.model.hidden = width;
  to.model.layers = below + above;
  const std::string act = keys.text("feed_forward_proj");
  const double ins = act.starts_with("gated") ? 2 : 1;
  to.add(width * all_heads, 4 * (below + 2 * above));  // the decoder attends twice
  to.add(width * inner, (ins + 1) * (below + above));
  to.add(width, 2 * below + 3 * above + 2);  // norms
  to.add(keys.number("relative_attention_num_buckets", 32) * heads, 2);
  add_head(to, keys, width, keys.flag("tie_word_embeddings", true));
}

using Add = void (*)(Builder&, const Keys&, const std::string&);

const std::map<std::string, Add>& families() {
  static const std::map<std::string, Add> known{
      {"llama", add_decoder},
      {"mistral", add_decoder},
      {"mixtral", add_decoder},
      {"qwen2", add_decoder},
      {"qwen2_moe", add_decoder},
      {"qwen3", add_decoder},
      {"qwen3_moe", add_decoder},
      {"gpt2", [](Builder& to, const Keys& keys, const std::string&) { add_gpt2(to, keys); }},
      {"t5", [](Builder& to, const Keys& keys, const std::string&) { add_t5(to, keys); }},
  };
  return known;
}

}  // namespace

const char* to_string(Precision precision) noexcept {
  switch (precision) {
    case Precision::fp32:
      return "fp32";
    case Precision::bf16:
      return "bf16";
    case Precision::fp16:
      return "fp16";
  }
  return "";
}

const char* to_string(OptimizerKind kind) noexcept {
  switch (kind) {
    case OptimizerKind::adamw:
      return "adamw";
    case OptimizerKind::adam:
      return "adam";
    case OptimizerKind::sgd:
      return "sgd";
  }
  return "";
}

double bytes_of(Precision precision) noexcept { return precision == Precision::fp32 ? 4 : 2; }

double Model::parameters() const {
  double sum = 0;
  for (const Tensors& one : tensors) sum += one.elements * one.count;
  return sum;
}

double Model::expert_parameters() const {
  double sum = 0;
  for (const Tensors& one : tensors) sum += one.expert ? one.elements * one.count : 0;
  return sum;
}

double Model::active_parameters() const {
  if (experts < 1) return parameters();
  return parameters() - expert_parameters() * (1 - experts_chosen / experts);
}

Model model_of(double parameters, double layers) {
  constexpr double width_per_layer = 128;
  constexpr double per_layer = 12;  // tensors of width x width
  Model model;
  model.layers = layers;
  if (layers <= 0) {
    const double whole = std::cbrt(parameters / (per_layer * width_per_layer * width_per_layer));
    model.layers = std::max(std::round(whole), 1.0);
  }
  model.hidden = std::round(std::sqrt(parameters / model.layers / per_layer));
  // Four for attention, three of 8/3 of the width for the perceptron.
  const double square = parameters / model.layers / per_layer;
  model.tensors = {{square, 4 * model.layers, false}, {square * 8 / 3, 3 * model.layers, false}};
  return model;
}

Model model_of(const Json& config, const std::string& path) {
  static const Json nothing = Json::object();
  const Keys keys(config.is_object() ? config : nothing, path);
  const std::string kind = keys.text("model_type");
  const auto found = families().find(kind);
  if (found == families().end()) {
    std::string known;
    for (const std::string& name : known_architectures())
      known += (known.empty() ? "" : ", ") + name;
    throw Error({.operation = "read",
                 .path = path,
                 .code = ENOTSUP,
                 .hint = fmt::format(
                     "{}; this counts the parameters of {}: give --parameters "
                     "instead",
                     kind.empty() ? "it has no model_type" : "its model_type is " + kind, known)});
  }
  Builder builder;
  builder.model.name = kind;
  found->second(builder, keys, kind);
  const double parameters = builder.model.parameters();
  if (parameters < 1 || parameters > parameters_max) {
    throw Error({.operation = "read",
                 .path = path,
                 .code = EBADMSG,
                 .hint = fmt::format("its sizes make {:.3g} parameters: no model has that many",
                                     parameters)});
  }
  return builder.model;
}

std::vector<std::string> known_architectures() {
  std::vector<std::string> names;
  for (const auto& [name, add] : families()) names.push_back(name);
  return names;
}

}  // namespace tensorferry::bench
