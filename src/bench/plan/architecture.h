// What is trained or run: how many parameters, in which tensors, with which optimizer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/run/json.h"

namespace tensorferry::bench {

enum class Precision : std::uint8_t { fp32, bf16, fp16 };
enum class OptimizerKind : std::uint8_t { adamw, adam, sgd };

[[nodiscard]] const char* to_string(Precision precision) noexcept;
[[nodiscard]] const char* to_string(OptimizerKind kind) noexcept;

// Bytes of a value.
[[nodiscard]] double bytes_of(Precision precision) noexcept;

// Tensors of one size.
struct Tensors {
  double elements = 0;  // of each
  double count = 0;
  bool expert = false;  // a token uses some of them only
};

// No model has more. Bytes of larger ones would leave 64 bits.
inline constexpr double parameters_max = 1e15;

struct Model {
  std::string name;  // "llama", or empty
  std::vector<Tensors> tensors;
  double layers = 0;
  double hidden = 0;
  double vocabulary = 0;
  double experts = 0;         // of a layer; 0: none
  double experts_chosen = 0;  // of them, by a token

  [[nodiscard]] double parameters() const;
  // Those that compute with one token.
  [[nodiscard]] double active_parameters() const;
  [[nodiscard]] double expert_parameters() const;
};

// A decoder of about as many parameters: layers of 12 x width^2, 128 of width for each layer, which
// is what models of transformers are like.
[[nodiscard]] Model model_of(double parameters, double layers);

// The tensors that transformers makes of a config.json. Throws Error (ENOTSUP) for an architecture
// that is not known here, and (EBADMSG) for a key that is missing or no size of a model.
[[nodiscard]] Model model_of(const Json& config, const std::string& path);

// The architectures whose parameters can be counted.
[[nodiscard]] std::vector<std::string> known_architectures();

}  // namespace tensorferry::bench
