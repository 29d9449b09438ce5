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

#if defined(__x86_64__)
#include <immintrin.h>
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

constexpr int decades = 7;

// Where a number lies in a map, computed rather than looked up: within a decade the codes are
// evenly spaced. The first entry is for numbers below all decades.
struct Ranks {
  std::array<float, decades> thresholds;  // the largest number below each decade
  // The rank of a number, counted from zero: factor * number + offset, rounded up, and not more
  // than this.
  alignas(32) std::array<float, decades + 1> factors;
  alignas(32) std::array<float, decades + 1> offsets;
  alignas(32) std::array<float, decades + 1> most;
};

// The numbers that codes stand for, and the code of any number.
class Map {
 public:
  explicit Map(Sign sign) : sign_(sign) {
    std::vector<double> numbers = {0.0, 1.0};
    for (int decade = 0; decade < decades; ++decade) {
      const int count = decade_count(decade);
      for (int i = 0; i < count; ++i) {
        const double number = (0.1 + 0.9 * (i + 0.5) / count) / std::pow(10.0, 6 - decade);
        numbers.push_back(number);
        if (sign == Sign::either) numbers.push_back(-number);
      }
    }
    std::sort(numbers.begin(), numbers.end());
    zero_ =
        static_cast<std::size_t>(std::find(numbers.begin(), numbers.end(), 0.0) - numbers.begin());
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
    set_ranks();
  }

  [[nodiscard]] const std::array<float, codes>& values() const noexcept { return values_; }
  [[nodiscard]] const std::array<float, codes>& bounds() const noexcept { return bounds_; }

  [[nodiscard]] const Ranks& ranks() const noexcept { return ranks_; }
  [[nodiscard]] Sign sign() const noexcept { return sign_; }
  [[nodiscard]] std::size_t zero() const noexcept { return zero_; }  // its code

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
  [[nodiscard]] int decade_count(int decade) const noexcept {
    return (sign_ == Sign::either ? 1 : 2) << decade;
  }

  void set_ranks() {
    ranks_.factors[0] = 0;
    ranks_.offsets[0] = -0.5;
    ranks_.most[0] = 0;
    int first = 1;  // rank of the decade
    for (int decade = 0; decade < decades; ++decade) {
      const auto at = static_cast<std::size_t>(decade);
      const int count = decade_count(decade);
      ranks_.thresholds[at] = bounds_[zero_ + static_cast<std::size_t>(first) - 1];
      ranks_.factors[at + 1] = static_cast<float>(count / 0.9 * std::pow(10.0, 6 - decade));
      ranks_.offsets[at + 1] = static_cast<float>(first - 1 - count / 9.0);
      ranks_.most[at + 1] = static_cast<float>(first + count - 1);
      first += count;
    }
    if (sign_ == Sign::never) {  // its lowest decade goes on down to zero
      ranks_.factors[1] = 1 / bounds_[1];
      ranks_.offsets[1] = 0;
    }
  }

  Sign sign_;
  std::size_t zero_ = 0;
  Ranks ranks_{};
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
std::pair<std::int32_t, std::int32_t> extremes(const float* block) noexcept {
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

void fill_codes_plain(const Map& map, const float* block, float scale,
                      std::uint8_t* filled) noexcept {
  for (std::size_t i = 0; i < block_elements; ++i) filled[i] = map.code(block[i] / scale);
}

#if defined(__x86_64__)

// NOLINTBEGIN(portability-simd-intrinsics): fill_codes_plain serves other processors
// Eight at a time, by their ranks. Rounding makes a rank wrong by far less than `margin`: closer to
// a bound than that, the map is asked.
__attribute__((target("avx2"))) void fill_codes_avx2(const Map& map, const float* block,
                                                     float scale, std::uint8_t* filled) noexcept {
  constexpr float margin = 1e-3F;
  const Ranks& ranks = map.ranks();
  const bool negates = map.sign() == Sign::either;
  const __m256 sign_bit = _mm256_set1_ps(-0.0F);
  const __m256 divisor = _mm256_set1_ps(scale);
  const __m256 top = _mm256_set1_ps(map.bounds()[last_code - 1]);
  const __m256 top_rank = _mm256_set1_ps(static_cast<float>(last_code - map.zero()));
  const __m256 factors = _mm256_load_ps(ranks.factors.data());
  const __m256 offsets = _mm256_load_ps(ranks.offsets.data());
  const __m256 most = _mm256_load_ps(ranks.most.data());
  const __m256i zero = _mm256_set1_epi32(static_cast<int>(map.zero()));
  for (std::size_t i = 0; i < block_elements; i += 8) {
    const __m256 number = _mm256_div_ps(_mm256_loadu_ps(block + i), divisor);
    const __m256 size =
        negates ? _mm256_andnot_ps(sign_bit, number) : _mm256_max_ps(number, _mm256_setzero_ps());
    __m256i decade = _mm256_setzero_si256();
    for (const float threshold : ranks.thresholds) {
      const __m256 above = _mm256_cmp_ps(size, _mm256_set1_ps(threshold), _CMP_GT_OQ);
      decade = _mm256_sub_epi32(decade, _mm256_castps_si256(above));  // true is -1
    }
    const __m256 place =
        _mm256_add_ps(_mm256_mul_ps(size, _mm256_permutevar8x32_ps(factors, decade)),
                      _mm256_permutevar8x32_ps(offsets, decade));
    const __m256 nearest = _mm256_round_ps(place, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 distance = _mm256_andnot_ps(sign_bit, _mm256_sub_ps(place, nearest));
    const __m256 is_top = _mm256_cmp_ps(number, top, _CMP_GT_OQ);
    const __m256 is_close = _mm256_cmp_ps(distance, _mm256_set1_ps(margin), _CMP_LT_OQ);
    if (_mm256_movemask_ps(_mm256_andnot_ps(is_top, is_close)) != 0) {
      alignas(32) std::array<float, 8> numbers;  // NOLINT(*-member-init): filled at once
      _mm256_store_ps(numbers.data(), number);
      for (std::size_t j = 0; j < numbers.size(); ++j) filled[i + j] = map.code(numbers[j]);
      continue;
    }
    const __m256 rank = _mm256_blendv_ps(
        _mm256_min_ps(_mm256_ceil_ps(place), _mm256_permutevar8x32_ps(most, decade)), top_rank,
        is_top);
    __m256i coded = _mm256_cvttps_epi32(rank);
    if (negates) coded = _mm256_sign_epi32(coded, _mm256_castps_si256(number));
    coded = _mm256_add_epi32(coded, zero);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(coded), _mm256_extracti128_si256(coded, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(filled + i), _mm_packus_epi16(words, words));
  }
}
// NOLINTEND(portability-simd-intrinsics)

bool has_avx2() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") != 0;
}

const auto fill_codes = has_avx2() ? fill_codes_avx2 : fill_codes_plain;

#else

constexpr auto fill_codes = fill_codes_plain;

#endif

// Fills the codes of a whole block. Returns its scale.
float quantize_block(const Map& map, const float* block, std::uint8_t* filled) noexcept {
  const auto [highest, magnitude] = extremes(block);
  const float scale = map.scale(highest, magnitude);
  if (!std::isfinite(scale) || scale == 0) {  // all of the block is what its scale is
    std::memset(filled, scale == 0 ? map.code(0) : static_cast<int>(last_code), block_elements);
    return scale;
  }
  fill_codes(map, block, scale, filled);
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
