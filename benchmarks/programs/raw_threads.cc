// The speed of a drive with pread and nothing else: threads that read blocks at random offsets of
// one file with O_DIRECT, each into its own buffer on huge pages. For machines without fio.
//   raw_threads FILE FILE_BYTES BLOCK_BYTES COUNT THREADS
// Every thread makes COUNT reads, after as many untimed ones. Prints the seconds.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace {

[[noreturn]] void give_up(const char* what) {
  std::perror(what);
  std::exit(1);
}

constexpr std::size_t huge = std::size_t{2} << 20;

struct Work {
  int fd = -1;
  std::uint64_t blocks = 0;  // of the file
  std::size_t block = 0;
  std::uint64_t count = 0;
};

void read_blocks(const Work& work, char* memory, std::mt19937_64& random) {
  std::uniform_int_distribution<std::uint64_t> pick(0, work.blocks - 1);
  for (std::uint64_t n = 0; n < work.count; ++n) {
    const auto offset = static_cast<off_t>(pick(random) * work.block);
    const ssize_t got = pread(work.fd, memory, work.block, offset);
    if (got != static_cast<ssize_t>(work.block)) give_up("pread");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: raw_threads FILE FILE_BYTES BLOCK_BYTES COUNT THREADS\n");
    return 2;
  }
  const auto number = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  Work work{open(argv[1], O_RDONLY | O_DIRECT), 0, number(3), number(4)};
  if (work.fd < 0) give_up("open");
  work.blocks = number(2) / work.block;
  const auto threads = static_cast<unsigned>(number(5));
  if (work.blocks == 0 || threads == 0) {
    std::fprintf(stderr, "raw_threads: the file has no block, or there is no thread\n");
    return 2;
  }

  std::barrier gate(static_cast<std::ptrdiff_t>(threads) + 1);
  std::vector<std::jthread> all;
  for (unsigned i = 0; i < threads; ++i) {
    all.emplace_back([&work, &gate, i] {
      const std::size_t bytes = (work.block + huge - 1) / huge * huge;
      auto* memory = static_cast<char*>(std::aligned_alloc(huge, bytes));
      if (memory == nullptr) give_up("aligned_alloc");
      madvise(memory, bytes, MADV_HUGEPAGE);
      std::memset(memory, 1, bytes);
      std::mt19937_64 random(i);
      read_blocks(work, memory, random);
      gate.arrive_and_wait();
      read_blocks(work, memory, random);
      gate.arrive_and_wait();
      std::free(memory);
    });
  }
  gate.arrive_and_wait();
  const auto begin = std::chrono::steady_clock::now();
  gate.arrive_and_wait();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%.6f\n", took.count());
  return 0;
}
