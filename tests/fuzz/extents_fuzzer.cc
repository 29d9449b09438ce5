// For any order of takes and returns, the allocator agrees with a model that counts every unit.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "swap/extents_model.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider provider(data, size);
  const auto choose = [&provider](std::uint64_t low, std::uint64_t high) {
    return provider.ConsumeIntegralInRange<std::uint64_t>(low, high);
  };
  const std::string fault =
      tensorferry::swap::check_extents(choose, static_cast<unsigned>(size / 2));
  if (!fault.empty()) {
    std::fprintf(stderr, "does not hold: %s\n", fault.c_str());
    std::abort();
  }
  return 0;
}
