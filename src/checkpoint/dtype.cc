// The element types of safetensors: names and sizes.
#include <algorithm>
#include <array>
#include <cstddef>

#include "tensorferry/checkpoint.h"

namespace tensorferry {

namespace {

struct Kind {
  std::string_view name;
  unsigned bits;
};

// In the order of DType.
constexpr std::array<Kind, 22> kinds{{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};
static_assert(static_cast<std::size_t>(DType::u64) + 1 == kinds.size());

}  // namespace

std::string_view to_string(DType dtype) noexcept {
  return kinds[static_cast<std::size_t>(dtype)].name;
}

std::optional<DType> dtype_named(std::string_view name) noexcept {
  const auto found = std::ranges::find(kinds, name, &Kind::name);
  if (found == kinds.end()) return std::nullopt;
  return static_cast<DType>(found - kinds.begin());
}

unsigned bits_of(DType dtype) noexcept { return kinds[static_cast<std::size_t>(dtype)].bits; }

}  // namespace tensorferry
