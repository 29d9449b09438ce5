// The speed of drives with io_uring and nothing else: one thread, one ring, O_DIRECT, fixed buffers
// on huge pages, a full queue. For machines without fio.
//   raw_ring read|write FILE[,FILE...] BYTES BLOCK_BYTES DEPTH
// Moves BYTES of each file with DEPTH requests of each under way. Prints the seconds.
#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace {

[[noreturn]] void give_up(const char* what) {
  std::perror(what);
  std::exit(1);
}

struct Drive {
  int fd = -1;
  std::uint64_t begun = 0;  // blocks
};

std::vector<Drive> open_all(const std::string& names, bool writes) {
  std::vector<Drive> drives;
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    const int flags = (writes ? O_WRONLY | O_CREAT : O_RDONLY) | O_DIRECT;
    drives.push_back({open(name.c_str(), flags, 0600)});
    if (drives.back().fd < 0) give_up(name.c_str());
  }
  return drives;
}

// Returns `bytes` of touched memory that begin a huge page.
char* huge_pages(std::size_t bytes) {
  const std::size_t huge = std::size_t{2} << 20;
  void* mapped =
      mmap(nullptr, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) give_up("mmap");
  auto* memory =
      reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(mapped) + huge - 1) / huge * huge);
  madvise(memory, bytes, MADV_HUGEPAGE);
  for (std::size_t i = 0; i < bytes; i += 4096) memory[i] = static_cast<char>(i >> 12);
  return memory;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: raw_ring read|write FILE[,FILE...] BYTES BLOCK_BYTES DEPTH\n");
    return 2;
  }
  const bool writes = std::string(argv[1]) == "write";
  const std::uint64_t bytes = std::strtoull(argv[3], nullptr, 10);
  const std::uint64_t block = std::strtoull(argv[4], nullptr, 10);
  const unsigned depth = static_cast<unsigned>(std::strtoul(argv[5], nullptr, 10));
  std::vector<Drive> drives = open_all(argv[2], writes);
  const auto slots = static_cast<unsigned>(drives.size()) * depth;  // slot i is of drive i / depth
  char* memory = huge_pages(block * slots);

  io_uring ring{};
  io_uring_params params{};
  params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  if (io_uring_queue_init_params(slots, &ring, &params) < 0) give_up("io_uring_setup");
  const iovec all{memory, block * slots};
  if (io_uring_register_buffers(&ring, &all, 1) < 0) give_up("io_uring_register_buffers");

  const std::uint64_t blocks = (bytes + block - 1) / block;  // of each file
  std::uint64_t ended = 0;
  const auto begin = std::chrono::steady_clock::now();
  const auto prepare = [&](unsigned slot) {
    Drive& drive = drives[slot / depth];
    if (drive.begun == blocks) return;
    io_uring_sqe* sqe = io_uring_get_sqe(&ring);
    char* at = memory + slot * block;
    const auto size = static_cast<unsigned>(std::min(block, bytes - drive.begun * block));
    if (writes) {
      io_uring_prep_write_fixed(sqe, drive.fd, at, size, drive.begun * block, 0);
    } else {
      io_uring_prep_read_fixed(sqe, drive.fd, at, size, drive.begun * block, 0);
    }
    io_uring_sqe_set_data64(sqe, slot);
    ++drive.begun;
  };
  for (unsigned slot = 0; slot < slots; ++slot) prepare(slot);
  std::vector<io_uring_cqe*> completions(16);
  while (ended < blocks * drives.size()) {
    io_uring_submit_and_wait(&ring, 1);
    const unsigned count = io_uring_peek_batch_cqe(&ring, completions.data(),
                                                   static_cast<unsigned>(completions.size()));
    for (unsigned i = 0; i < count; ++i) {
      if (completions[i]->res < 0) {
        errno = -completions[i]->res;
        give_up(argv[1]);
      }
      const auto slot = static_cast<unsigned>(io_uring_cqe_get_data64(completions[i]));
      ++ended;
      prepare(slot);
    }
    io_uring_cq_advance(&ring, count);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%.6f\n", took.count());
  return 0;
}
