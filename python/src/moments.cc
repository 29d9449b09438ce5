// Moments of Adam in 8 bits: each block of 256 elements has a scale in fp32, and each element the
// code of the number nearest to it, divided by the scale, in a map of 256 numbers. The maps are the
// dynamic ones of bitsandbytes (Dettmers, arXiv 1511.04561 and 2110.02861): seven decades, each
// with twice the numbers of the one below it.
//
// python/tensorferry/optim/quantized_moments.py does the same by torch's operations on a GPU, to
// the same bits: an IEEE division, and comparisons. Change both.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "buffer.h"
#include "elements.h"
#include "gil_release.h"

// Two versions of a function, of which the processor gets the better one when the module is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TENSORFERRY_AVX2_TOO __attribute__((target_clones("avx2", "default")))
#else
#define TENSORFERRY_AVX2_TOO
#endif

namespace tensorferry::python {

namespace {

constexpr std::size_t block_elements = 256;
// Fewer blocks are not worth a thread.
constexpr std::size_t thread_blocks = 1024;
constexpr std::size_t codes = 256;
constexpr std::size_t last_code = codes - 1;

constexpr std::int32_t infinity_bits = 0x7F800000;
constexpr std::int32_t least_normal_bits = 0x00800000;

// Whether a moment may be negative.
enum class Sign : std::uint8_t { either, never };

// The numbers that codes stand for, and the code of any number.
class Map {
 public:
  explicit Map(Sign sign) : sign_(sign) {
    std::vector<double> numbers = {0.0, 1.0};
    for (int decade = 0; decade < 7; ++decade) {
      const int count = (sign == Sign::either ? 1 : 2) << decade;
      for (int i = 0; i < count; ++i) {
        const double number = (0.1 + 0.9 * (i + 0.5) / count) / std::pow(10.0, 6 - decade);
        numbers.push_back(number);
        if (sign == Sign::either) numbers.push_back(-number);
      }
    }
    std::sort(numbers.begin(), numbers.end());
    for (std::size_t code = 0; code < codes; ++code) {
      values_[code] = static_cast<float>(numbers[code]);
      bounds_[code] = code == last_code
                          ? std::numeric_limits<float>::infinity()
                          : static_cast<float>((numbers[code] + numbers[code + 1]) / 2);
    }
    // A second moment that is not zero must not become zero: the step divides by its root.
    if (sign == Sign::never) bounds_[0] = 0;
    for (std::uint32_t top = 0; top < first_.size(); ++top) {
      const auto least = std::bit_cast<float>(top < 0x8000U ? top << 16U : top << 16U | 0xFFFFU);
      first_[top] = static_cast<std::uint8_t>(std::count_if(
          bounds_.begin(), bounds_.end(), [&](float bound) { return bound < least; }));
    }
  }

  [[nodiscard]] const std::array<float, codes>& values() const noexcept { return values_; }
  [[nodiscard]] const std::array<float, codes>& bounds() const noexcept { return bounds_; }

  // The number of bounds below a number. The 16 bits that it begins with leave one of two.
  [[nodiscard]] std::uint8_t code(float number) const noexcept {
    const std::uint8_t least = first_[std::bit_cast<std::uint32_t>(number) >> 16U];
    return static_cast<std::uint8_t>(least + (number > bounds_[least] ? 1 : 0));
  }

  // The scale of a block whose bits are at most `highest` as integers, and at most `magnitude`
  // without their sign: the element that is furthest from zero, with its sign.
  [[nodiscard]] float scale(std::int32_t highest, std::int32_t magnitude) const noexcept {
    if (magnitude > infinity_bits) return std::numeric_limits<float>::quiet_NaN();
    if (sign_ == Sign::never && magnitude < infinity_bits) magnitude = std::max(highest, 0);
    if (magnitude < least_normal_bits) return 0;
    const auto size = std::bit_cast<float>(magnitude);
    return highest == magnitude ? size : -size;
  }

 private:
  Sign sign_;
  std::array<float, codes> values_{};
  std::array<float, codes> bounds_{};  // the largest number of each code
  std::array<std::uint8_t, 1U << 16U> first_{};
};

// The map of a moment. Throws ValueError for another name.
const Map& map_of(const std::string& moment) {
  static const Map first(Sign::either), second(Sign::never);
  if (moment == "exp_avg") return first;
  if (moment == "exp_avg_sq") return second;
  throw nb::value_error((moment + " is neither exp_avg nor exp_avg_sq").c_str());
}

// (highest, magnitude) of a block, for Map::scale().
TENSORFERRY_AVX2_TOO std::pair<std::int32_t, std::int32_t> extremes(const float* block) noexcept {
  std::int32_t highest = std::numeric_limits<std::int32_t>::min();
  std::int32_t magnitude = 0;
  for (std::size_t i = 0; i < block_elements; ++i) {
    const auto bits = std::bit_cast<std::int32_t>(block[i]);
    highest = bits > highest ? bits : highest;
    const std::int32_t size = bits & std::numeric_limits<std::int32_t>::max();
    magnitude = size > magnitude ? size : magnitude;
  }
  return {highest, magnitude};
}

TENSORFERRY_AVX2_TOO void divide(const float* block, float scale, float* quotients) noexcept {
  for (std::size_t i = 0; i < block_elements; ++i) quotients[i] = block[i] / scale;
}

// Fills the codes of a whole block. Returns its scale.
float quantize_block(const Map& map, const float* block, std::uint8_t* filled) noexcept {
  const auto [highest, magnitude] = extremes(block);
  const float scale = map.scale(highest, magnitude);
  if (!std::isfinite(scale) || scale == 0) {  // all of the block is what its scale is
    std::memset(filled, scale == 0 ? map.code(0) : static_cast<int>(last_code), block_elements);
    return scale;
  }
  std::array<float, block_elements> quotients;  // NOLINT(*-member-init): filled at once
  divide(block, scale, quotients.data());
#pragma GCC unroll 8
  for (std::size_t i = 0; i < block_elements; ++i) filled[i] = map.code(quotients[i]);
  return scale;
}

// A moment in fp32 and what it is in 8 bits.
class Moment {
 public:
  Moment(const Buffer& values, const Buffer& coded, const Buffer& scales)
      : values_(elements<float>(values, "values", values.bytes().size() / 4, "values")),
        coded_(elements<std::uint8_t>(coded, "codes", values_.size(), "values")),
        scales_(elements<float>(scales, "scales", blocks(), "values")) {}

  [[nodiscard]] std::size_t blocks() const noexcept {
    return (values_.size() + block_elements - 1) / block_elements;
  }

  void quantize(const Map& map, std::size_t block) const noexcept {
    const std::size_t begin = block * block_elements;
    const std::size_t count = std::min(values_.size() - begin, block_elements);
    if (count == block_elements) {
      scales_[block] = quantize_block(map, values_.data() + begin, coded_.data() + begin);
      return;
    }
    std::array<float, block_elements> padded{};
    std::array<std::uint8_t, block_elements> filled{};
    std::copy_n(values_.begin() + static_cast<std::ptrdiff_t>(begin), count, padded.begin());
    scales_[block] = quantize_block(map, padded.data(), filled.data());
    std::copy_n(filled.begin(), count, coded_.begin() + static_cast<std::ptrdiff_t>(begin));
  }

  void dequantize(const Map& map, std::size_t block) const noexcept {
    const std::size_t begin = block * block_elements;
    const std::size_t end = std::min(begin + block_elements, values_.size());
    const float scale = scales_[block];
    const float* const numbers = map.values().data();
#pragma GCC unroll 8
    for (std::size_t i = begin; i < end; ++i) values_[i] = numbers[coded_[i]] * scale;
  }

 private:
  std::span<float> values_;
  std::span<std::uint8_t> coded_;
  std::span<float> scales_;
};

void quantize_moment(const std::string& name, nb::handle values, nb::handle filled,
                     nb::handle scales, unsigned threads) {
  const Map& map = map_of(name);
  const Buffer taken(values, Use::take), coded(filled, Use::fill), scaled(scales, Use::fill);
  const Moment moment(taken, coded, scaled);
  const GilRelease released;
  in_threads(moment.blocks(), thread_blocks, threads,
             [&](std::size_t, std::size_t at, std::size_t end) {
               for (; at < end; ++at) moment.quantize(map, at);
             });
}

void dequantize_moment(const std::string& name, nb::handle values, nb::handle taken,
                       nb::handle scales, unsigned threads) {
  const Map& map = map_of(name);
  const Buffer filled(values, Use::fill), coded(taken, Use::take), scaled(scales, Use::take);
  const Moment moment(filled, coded, scaled);
  const GilRelease released;
  in_threads(moment.blocks(), thread_blocks, threads,
             [&](std::size_t, std::size_t at, std::size_t end) {
               for (; at < end; ++at) moment.dequantize(map, at);
             });
}

nb::bytes bytes_of(const std::array<float, codes>& numbers) {
  return nb::bytes(numbers.data(), sizeof(numbers));
}

}  // namespace

void bind_moments(nb::module_& module) {
  module.attr("MOMENT_BLOCK") = block_elements;
  module.def(
      "moment_map",
      [](const std::string& name) {
        const Map& map = map_of(name);
        return nb::make_tuple(bytes_of(map.values()), bytes_of(map.bounds()));
      },
      nb::arg("name"), nb::sig("def moment_map(name: str) -> tuple[bytes, bytes]"),
      "Returns the numbers in fp32 that the codes of a moment stand for, and the largest number "
      "that has each code. `name` is exp_avg or exp_avg_sq.");
  module.def("quantize_moment", &quantize_moment, nb::arg("name"), nb::arg("values"),
             nb::arg("codes"), nb::arg("scales"), nb::arg("threads"),
             nb::sig("def quantize_moment(name: str, values: object, codes: object, scales: "
                     "object, threads: int) -> None"),
             "Fills the codes of a moment in fp32, a byte for each element, and the scales of its "
             "blocks.");
  module.def("dequantize_moment", &dequantize_moment, nb::arg("name"), nb::arg("values"),
             nb::arg("codes"), nb::arg("scales"), nb::arg("threads"),
             nb::sig("def dequantize_moment(name: str, values: object, codes: object, scales: "
                     "object, threads: int) -> None"),
             "Fills a moment in fp32 from its codes and the scales of its blocks.");
}

}  // namespace tensorferry::python
