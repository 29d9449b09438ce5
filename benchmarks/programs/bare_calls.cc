// 1 MiB writes and reads by the bare calls of the API: the base for the cost of the command. Prints
// the CPU time of one read.
//   bare_calls FILE COUNT ENGINE
#include <cstdio>
#include <ctime>
#include <exception>
#include <string>

#include "tensorferry/tensorferry.h"

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;
constexpr unsigned spread = 256;  // tensors in the file, as in bench

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

void run(const std::string& path, unsigned count, tensorferry::EngineKind engine) {
  using tensorferry::Access;
  tensorferry::HandleOptions options;
  options.engine = engine;
  options.block_bytes = MiB;
  options.queue_depth = 16;
  options.workers = 1;
  tensorferry::Handle handle(options);
  const tensorferry::File file = tensorferry::File::open(path, Access::read_write);
  const tensorferry::PinnedBuffer memory(MiB);
  for (unsigned i = 0; i < spread; ++i) handle.write(memory.bytes(), file, i * MiB).wait();
  handle.sync(file).wait();
  for (unsigned i = 0; i < count; ++i) handle.write(memory.bytes(), file, i % spread * MiB).wait();
  const double before = cpu_seconds();
  for (unsigned i = 0; i < count; ++i) handle.read(memory.bytes(), file, i % spread * MiB).wait();
  std::printf("{\"read_cpu_us\": %.4f}\n", (cpu_seconds() - before) / count * 1e6);
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count != 4) {
    std::fputs("usage: bare_calls FILE COUNT ENGINE\n", stderr);
    return 2;
  }
  try {
    run(arguments[1], static_cast<unsigned>(std::stoul(arguments[2])),
        tensorferry::parse_engine_kind(arguments[3]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bare_calls: %s\n", error.what());
    return 1;
  }
}
