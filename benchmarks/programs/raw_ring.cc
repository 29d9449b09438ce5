// The speed of a drive with io_uring and nothing else: one thread, O_DIRECT, fixed buffers on huge
// pages, a full queue. For machines without fio.
//   raw_ring read|write FILE BYTES BLOCK_BYTES DEPTH
// Prints the seconds.
#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

[[noreturn]] void give_up(const char* what) {
  std::perror(what);
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: raw_ring read|write FILE BYTES BLOCK_BYTES DEPTH\n");
    return 2;
  }
  const bool writes = std::string(argv[1]) == "write";
  const std::uint64_t bytes = std::strtoull(argv[3], nullptr, 10);
  const std::uint64_t block = std::strtoull(argv[4], nullptr, 10);
  const unsigned depth = static_cast<unsigned>(std::strtoul(argv[5], nullptr, 10));
  const int fd = open(argv[2], (writes ? O_WRONLY | O_CREAT : O_RDONLY) | O_DIRECT, 0600);
  if (fd < 0) give_up("open");
  const std::size_t huge = std::size_t{2} << 20;
  const std::size_t room = (block * depth + huge - 1) / huge * huge;
  void* mapped =
      mmap(nullptr, room + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) give_up("mmap");
  auto* memory =
      reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(mapped) + huge - 1) / huge * huge);
  madvise(memory, room, MADV_HUGEPAGE);
  for (std::size_t i = 0; i < room; i += 4096) memory[i] = static_cast<char>(i >> 12);

  io_uring ring{};
  io_uring_params params{};
  params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  if (io_uring_queue_init_params(depth, &ring, &params) < 0) give_up("io_uring_setup");
  const iovec all{memory, room};
  if (io_uring_register_buffers(&ring, &all, 1) < 0) give_up("io_uring_register_buffers");

  const std::uint64_t blocks = (bytes + block - 1) / block;
  std::uint64_t begun = 0;
  std::uint64_t ended = 0;
  const auto begin = std::chrono::steady_clock::now();
  const auto prepare = [&](unsigned slot) {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring);
    char* at = memory + slot * block;
    const auto size = static_cast<unsigned>(std::min(block, bytes - begun * block));
    if (writes) {
      io_uring_prep_write_fixed(sqe, fd, at, size, begun * block, 0);
    } else {
      io_uring_prep_read_fixed(sqe, fd, at, size, begun * block, 0);
    }
    io_uring_sqe_set_data64(sqe, slot);
    ++begun;
  };
  for (unsigned slot = 0; slot < depth && begun < blocks; ++slot) prepare(slot);
  std::vector<io_uring_cqe*> completions(16);
  while (ended < blocks) {
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
      if (begun < blocks) prepare(slot);
    }
    io_uring_cq_advance(&ring, count);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%.6f\n", took.count());
  return 0;
}
