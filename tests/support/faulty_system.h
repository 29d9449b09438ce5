// The operating system with faults by rule: the Nth call fails, is short or slow. Calls without a
// rule are the real system calls. Counts every call.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <random>
#include <vector>

#include "os/system.h"

namespace tensorferry::support {

enum class Call : std::uint8_t {
  open,
  close,
  duplicate,
  set_flags,
  pread,
  pwrite,
  fdatasync,
  fsync,
  fallocate,
  statx,
  stat_path,
  stat_at,
  statfs,
  map,
  lock,
  advise,
};
inline constexpr std::size_t call_count = 16;

// Which calls a rule strikes, and what happens to them. Calls of one kind count from 0.
struct SystemRule {
  static constexpr std::uint64_t always = std::numeric_limits<std::uint64_t>::max();
  static constexpr std::size_t whole = std::numeric_limits<std::size_t>::max();

  Call call = Call::pread;
  std::uint64_t first = 0;      // the first call that it strikes
  std::uint64_t every = 1;      // and each `every`-th from there
  std::uint64_t times = 1;      // at most this often
  double probability = 1;       // and only if seeded dice agree
  int open_flags = 0;           // open: only calls that have one of these flags
  std::size_t bytes_above = 0;  // pread, pwrite: only transfers longer than this

  int error = 0;                     // fails with it and does nothing
  std::size_t short_bytes = whole;   // pread, pwrite: moves only these bytes, and overwrites the
                                     // rest of a read with garbage
  std::chrono::nanoseconds delay{};  // before the call
};

// Thread-safe. Must outlive everything that uses it.
class FaultySystem : public os::System {
 public:
  explicit FaultySystem(std::uint64_t seed = 1) : dice_(seed) {}

  void add(const SystemRule& rule);
  void clear_rules();

  [[nodiscard]] std::uint64_t calls(Call call) const noexcept;
  [[nodiscard]] std::uint64_t struck() const noexcept;  // calls that a rule changed

  int open(const char* path, int flags, mode_t mode) override;
  int close(int fd) override;
  int duplicate(int fd) override;
  int set_flags(int fd, int flags) override;
  ssize_t pread(int fd, std::byte* memory, std::size_t bytes, std::uint64_t offset) override;
  ssize_t pwrite(int fd, const std::byte* memory, std::size_t bytes, std::uint64_t offset) override;
  int fdatasync(int fd) override;
  int fsync(int fd) override;
  int fallocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) override;
  int statx(int fd, unsigned mask, struct statx* facts) override;
  int stat_path(const char* path, unsigned mask, struct statx* facts) override;
  int stat_at(int directory, const char* name, unsigned mask, struct statx* facts) override;
  int statfs(int fd, struct statfs* facts) override;
  std::byte* map(std::size_t bytes) override;
  int lock(std::byte* memory, std::size_t bytes) override;
  int advise(std::byte* memory, std::size_t bytes, int advice) override;
  std::int64_t huge_bytes(std::byte* memory, std::size_t bytes) override;
  int resident(std::byte* page) override;

  // Says that all memory has its pages, huge ones: every disk takes it in place, and a read makes
  // none. Set it before the first transfer.
  bool all_memory_is_huge = false;

 private:
  struct Armed {
    SystemRule rule;
    std::uint64_t struck = 0;
  };
  struct Verdict {
    int error = 0;
    std::size_t short_bytes = SystemRule::whole;
  };

  // Counts the call, waits out a delay and decides what happens to it.
  Verdict judge(Call call, int open_flags = 0, std::size_t bytes = 0);

  mutable std::mutex mutex_;
  std::mt19937_64 dice_;
  std::vector<Armed> rules_;
  std::array<std::atomic<std::uint64_t>, call_count> calls_{};
  std::atomic<std::uint64_t> struck_{0};
};

}  // namespace tensorferry::support
