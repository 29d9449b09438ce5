// Makes one of the calls that have a budget of instructions, COUNT times. figures/hot_paths.py runs
// it under callgrind.
//   hot_paths submit|inline|copied|many|neighbours FILE COUNT ENGINE
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "tensorferry/tensorferry.h"

namespace {

using namespace tensorferry;

constexpr std::size_t bytes = 4096;
constexpr std::size_t elements = 10'000;  // of one read_many

// Elements that are `stride` bytes apart in the file and side by side in memory.
std::vector<ReadTransfer> transfers_of(const PinnedBuffer& memory, const File& file,
                                       std::size_t stride) {
  std::vector<ReadTransfer> transfers;
  transfers.reserve(elements);
  for (std::size_t i = 0; i < elements; ++i) {
    transfers.push_back({memory.bytes().subspan(i * bytes, bytes), file, i * stride});
  }
  return transfers;
}

void run(const std::string& path, const std::string& name, unsigned count, EngineKind engine) {
  HandleOptions options;
  options.engine = engine;
  options.block_bytes = std::size_t{1} << 20;
  options.queue_depth = 32;
  options.workers = 1;
  Handle handle(options);
  File file = File::open(path, Access::read_write);
  file.resize(2 * elements * bytes);
  const PinnedBuffer memory(elements * bytes);
  const auto page = memory.bytes().first(bytes);
  std::vector<std::byte> ordinary(bytes + 1);
  const auto odd = std::span(ordinary).last(bytes);
  const auto transfers = transfers_of(memory, file, name == "neighbours" ? bytes : 2 * bytes);
  for (unsigned i = 0; i < count; ++i) {
    if (name == "submit") {
      handle.read(page, file, i % elements * bytes).wait();
    } else if (name == "inline") {
      handle.read_now(page, file, i % elements * bytes);
    } else if (name == "copied") {
      handle.read_now(odd, file, i % elements * bytes);
    } else if (name == "many" || name == "neighbours") {
      handle.read_many(transfers).wait();
    } else {
      throw std::invalid_argument("unknown path: " + name);
    }
  }
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count != 5) {
    std::fputs("usage: hot_paths submit|inline|copied|many|neighbours FILE COUNT ENGINE\n", stderr);
    return 2;
  }
  try {
    run(arguments[2], arguments[1], static_cast<unsigned>(std::stoul(arguments[3])),
        parse_engine_kind(arguments[4]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hot_paths: %s\n", error.what());
    return 1;
  }
}
