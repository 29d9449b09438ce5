// read_stamp() recognizes a stamped block, and never one that was changed, cut or mixed.
#include <fuzzer/FuzzedDataProvider.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bench/verify/stamp.h"
#include "fuzz/promise.h"

using namespace tensorferry;

namespace {

bench::Stamp any_stamp(FuzzedDataProvider& provider) {
  return {.offset = provider.ConsumeIntegral<std::uint64_t>() % (std::uint64_t{1} << 62),
          .generation = provider.ConsumeIntegral<std::uint64_t>(),
          .seed = provider.ConsumeIntegral<std::uint64_t>(),
          .file_bytes = provider.ConsumeIntegral<std::uint64_t>()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider provider(data, size);
  const bench::Stamp expected = any_stamp(provider);
  const bench::Stamp other = provider.ConsumeBool() ? any_stamp(provider) : expected;
  std::array<std::byte, bench::stamped_block_bytes> wanted{};
  std::array<std::byte, bench::stamped_block_bytes> block{};
  bench::write_stamp(wanted, expected);
  bench::write_stamp(block, other);
  fuzz::promise(bench::read_stamp(block) == other, "a whole block gives its stamp");

  const std::size_t place = provider.ConsumeIntegralInRange<std::size_t>(0, block.size() - 1);
  const std::vector<std::uint8_t> bytes = provider.ConsumeRemainingBytes<std::uint8_t>();
  for (std::size_t i = 0; i < bytes.size() && place + i < block.size(); ++i) {
    block[place + i] = std::byte{bytes[i]};
  }
  const auto bad = bench::check_block(block, expected);
  fuzz::promise(bad.has_value() == (block != wanted), "a block is bad if and only if it differs");
  if (!bad) return 0;
  fuzz::promise(!bad->explanation.empty(), "a bad block is explained");
  fuzz::promise(bad->length > 0 && bad->offset >= expected.offset &&
                    bad->offset - expected.offset + bad->length <= block.size(),
                "the bad bytes are in the block");
  return 0;
}
