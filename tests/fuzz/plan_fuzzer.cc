// Any memory, offset, length, alignment and limits make a plan that keeps its promises.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "handle/plan_check.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider provider(data, size);
  const auto input =
      tensorferry::handle::make_plan_case([&provider](std::uint64_t low, std::uint64_t high) {
        return provider.ConsumeIntegralInRange<std::uint64_t>(low, high);
      });
  const std::string fault = tensorferry::handle::check_plan(input);
  if (!fault.empty()) {
    std::fprintf(stderr, "does not hold: %s\n", fault.c_str());
    std::abort();
  }
  return 0;
}
