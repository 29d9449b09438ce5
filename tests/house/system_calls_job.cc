// Jobs whose system calls and traces the tests of the house look at. The part that counts lies
// between two marks that no real program would make.
//
//   system_calls_job read ENGINE batch|single on|off DEPTH BLOCKS PATH   blocks of 64 KiB
//   system_calls_job now aligned|ragged|write|path PATH                  inline
//   system_calls_job mixed PATH PATH                                     some of everything
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "tensorferry/tensorferry.h"

namespace {

using namespace tensorferry;

constexpr std::size_t block_bytes = std::size_t{64} << 10;

void mark(const char* place) { (void)!::access(place, F_OK); }
void begin() { mark("/mark/begin"); }
void end() { mark("/mark/end"); }

void read_blocks(const std::vector<std::string>& words) {
  HandleOptions options;
  options.engine = parse_engine_kind(words.at(0));
  options.submit = words.at(1) == "single" ? Submit::single : Submit::batch;
  options.overlap = words.at(2) == "off" ? Overlap::off : Overlap::on;
  options.queue_depth = static_cast<unsigned>(std::stoul(words.at(3)));
  options.workers = 1;
  options.block_bytes = block_bytes;
  Handle handle(options);
  const File file = File::open(words.at(5), Access::read);
  PinnedBuffer memory(std::stoul(words.at(4)) * block_bytes);
  handle.read(memory.bytes().first(1), file).wait();  // everything that is done once
  begin();
  handle.read(memory.bytes(), file).wait();
  end();
}

void transfer_now(const std::string& how, const std::string& path) {
  Handle handle;
  const File file = File::open(path, Access::read_write);
  PinnedBuffer memory(2 * 4096);
  const auto page = memory.bytes().first(4096);
  const auto once = [&] {
    if (how == "aligned") handle.read_now(page, file, 4096);
    if (how == "ragged") handle.read_now(memory.bytes().subspan(1, 1000), file, 777);
    if (how == "write") handle.write_now(page, file, 4096);
    if (how == "path") handle.read_now(page, path, 4096);
  };
  once();
  begin();
  once();
  end();
}

// Successes, failures, cancellations; inline, queued, many, durable; strange names.
void mix(const std::string& path, const std::string& other) {
  Handle handle;
  PinnedBuffer memory(std::size_t{4} << 20);
  handle.write(memory.bytes(), path, 0, Durability::full).wait();
  handle.read(memory.bytes().first(100'000), path, 17).wait();
  handle.write_now(memory.bytes().first(100), other, 3);
  handle.read_now(memory.bytes().first(50), other, 3);
  const File file = File::open(path, Access::read_write);
  std::vector<ReadTransfer> many;
  for (std::uint64_t i = 0; i < 10; ++i) many.push_back({memory.bytes().first(10), file, i * 10});
  handle.read_many(many).wait();
  handle.sync(file, Durability::data).wait();
  const Operation too_long = handle.read(memory.bytes(), other);
  const Operation doomed = handle.read(memory.bytes(), file);
  doomed.cancel();
  for (const Operation& operation : {too_long, doomed}) {
    try {
      operation.wait();
    } catch (const Error&) {
      continue;  // both may fail, as meant
    }
  }
}

}  // namespace

int main(int count, char** values) try {
  const std::vector<std::string> words(values + 1, values + count);
  const std::string& job = words.at(0);
  if (job == "read") read_blocks({words.begin() + 1, words.end()});
  if (job == "now") transfer_now(words.at(1), words.at(2));
  if (job == "mixed") mix(words.at(1), words.at(2));
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
