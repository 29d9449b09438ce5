#include "os/system.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <memory>

#include "base/alignment.h"
#include "os/numa.h"

namespace tensorferry::os {

namespace {

template <class T>
T or_errno(T result) noexcept {
  return result < 0 ? static_cast<T>(-errno) : result;
}

// ioctl PAGEMAP_SCAN of Linux 6.7, which older headers lack.
struct PageRegion {
  std::uint64_t start, end, categories;
};
struct PageScan {
  std::uint64_t size = sizeof(PageScan);
  std::uint64_t flags, start, end, walk_end, found, found_count, pages_max;
  std::uint64_t categories_inverted, categories_all, categories_any, categories_returned;
};
constexpr std::uint64_t page_is_huge = 1 << 6;
constexpr unsigned long page_scan_request = _IOWR('f', 16, PageScan);

// What sched_getaffinity() and sched_setaffinity() take. One cpu_set_t is too small for the largest
// machines.
using Processors = std::array<cpu_set_t, processors_max / CPU_SETSIZE>;

// What set_mempolicy() and mbind() take: a bit for each node. They ignore the last of the bits that
// they are told of.
struct NodeMask {
  static constexpr std::size_t word_bits = 8 * sizeof(unsigned long);
  static constexpr std::size_t bits = numa_nodes_max + 1;

  explicit NodeMask(int node) {
    const auto bit = static_cast<std::size_t>(node);
    if (bit < numa_nodes_max) words[bit / word_bits] |= 1UL << (bit % word_bits);
  }
  std::array<unsigned long, numa_nodes_max / word_bits> words{};
};

std::atomic<std::uint64_t> generation{0};

// Counts from the moment the library is loaded, so that no Handle is older than the counter.
[[maybe_unused]] const int generation_fork_watch =
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

int System::open(const char* path, int flags, mode_t mode) {
  return or_errno(::open(path, flags, mode));
}

int System::close(int fd) { return or_errno(::close(fd)); }

int System::duplicate(int fd) { return or_errno(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

int System::flags(int fd) { return or_errno(::fcntl(fd, F_GETFL)); }

int System::set_flags(int fd, int flags) { return or_errno(::fcntl(fd, F_SETFL, flags)); }

ssize_t System::pread(int fd, std::byte* memory, std::size_t bytes, std::uint64_t offset) {
  return or_errno(::pread(fd, memory, bytes, static_cast<off_t>(offset)));
}

ssize_t System::pwrite(int fd, const std::byte* memory, std::size_t bytes, std::uint64_t offset) {
  return or_errno(::pwrite(fd, memory, bytes, static_cast<off_t>(offset)));
}

int System::fdatasync(int fd) { return or_errno(::fdatasync(fd)); }

int System::fsync(int fd) { return or_errno(::fsync(fd)); }

int System::truncate(int fd, std::uint64_t bytes) {
  return or_errno(::ftruncate(fd, static_cast<off_t>(bytes)));
}

int System::fallocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) {
  return or_errno(::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes)));
}

int System::statx(int fd, unsigned mask, struct statx* facts) {
  return or_errno(::statx(fd, "", AT_EMPTY_PATH, mask, facts));
}

int System::stat_path(const char* path, unsigned mask, struct statx* facts) {
  return or_errno(::statx(AT_FDCWD, path, 0, mask, facts));
}

int System::statfs(int fd, struct statfs* facts) { return or_errno(::fstatfs(fd, facts)); }

int System::block_device_bytes(int fd, std::uint64_t* bytes) {
  return or_errno(::ioctl(fd, BLKGETSIZE64, bytes));
}

int System::open_at(int directory, const char* name, int flags, mode_t mode) {
  return or_errno(::openat(directory, name, flags, mode));
}

int System::stat_at(int directory, const char* name, unsigned mask, struct statx* facts) {
  return or_errno(::statx(directory, name, AT_SYMLINK_NOFOLLOW, mask, facts));
}

int System::make_directory_at(int directory, const char* name, mode_t mode) {
  return or_errno(::mkdirat(directory, name, mode));
}

int System::remove_at(int directory, const char* name, int flags) {
  return or_errno(::unlinkat(directory, name, flags));
}

int System::rename_at(int directory, const char* name, const char* new_name) {
  return or_errno(::renameat(directory, name, directory, new_name));
}

int System::link_file(int fd, int directory, const char* name) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return or_errno(::linkat(AT_FDCWD, path.c_str(), directory, name, AT_SYMLINK_FOLLOW));
}

int System::set_mode(int fd, mode_t mode) { return or_errno(::fchmod(fd, mode)); }

int System::lock_file(int fd) { return or_errno(::flock(fd, LOCK_EX | LOCK_NB)); }
int System::share_file(int fd) { return or_errno(::flock(fd, LOCK_SH | LOCK_NB)); }

int System::unlock_file(int fd) { return or_errno(::flock(fd, LOCK_UN)); }

std::byte* System::map(std::size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

int System::map_file(std::byte* memory, std::size_t bytes, int fd, std::uint64_t offset) {
  void* mapped = ::mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd,
                        static_cast<off_t>(offset));
  return mapped == MAP_FAILED ? -errno : 0;
}

int System::unmap(std::byte* memory, std::size_t bytes) {
  return or_errno(::munmap(memory, bytes));
}

int System::lock(std::byte* memory, std::size_t bytes) { return or_errno(::mlock(memory, bytes)); }

int System::advise(std::byte* memory, std::size_t bytes, int advice) {
  return or_errno(::madvise(memory, bytes, advice));
}

std::int64_t System::huge_bytes(std::byte* memory, std::size_t bytes) {
  const int fd = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -errno;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  std::array<PageRegion, 64> found{};
  PageScan scan{};
  scan.start = begin;
  scan.end = begin + bytes;
  scan.found = reinterpret_cast<std::uintptr_t>(found.data());
  scan.found_count = found.size();
  scan.categories_all = scan.categories_returned = page_is_huge;
  std::int64_t sum = 0;
  int got = 0;
  while (scan.start < scan.end) {
    got = ::ioctl(fd, page_scan_request, &scan);
    if (got < 0) break;
    for (int i = 0; i < got; ++i) {
      const PageRegion& region = found.at(static_cast<std::size_t>(i));
      sum += static_cast<std::int64_t>(region.end - region.start);
    }
    scan.start = scan.walk_end;
  }
  const int code = errno;
  ::close(fd);
  return got < 0 ? -code : sum;
}

int System::resident(std::byte* page) {
  unsigned char state = 0;
  const int got = ::mincore(page, 1, &state);
  return got < 0 ? -errno : state & 1;
}

std::vector<NumaNode> System::numa_nodes() { return read_numa_nodes("/sys/devices/system/node"); }

int System::affinity(std::vector<unsigned>& processors) {
  Processors set{};
  if (::sched_getaffinity(0, sizeof(set), set.data()) < 0) return -errno;
  processors.clear();
  for (unsigned i = 0; i < processors_max; ++i) {
    if (CPU_ISSET_S(i, sizeof(set), set.data())) processors.push_back(i);
  }
  return 0;
}

int System::set_affinity(const std::vector<unsigned>& processors) {
  Processors set{};
  for (const unsigned i : processors) CPU_SET_S(i, sizeof(set), set.data());
  return or_errno(::sched_setaffinity(0, sizeof(set), set.data()));
}

// glibc has no wrappers for these three.
int System::memory_policy() {
  int mode = MPOL_DEFAULT;
  const long got = ::syscall(SYS_get_mempolicy, &mode, nullptr, 0UL, nullptr, 0UL);
  return got < 0 ? -errno : mode;
}

int System::prefer_node_for_thread(int node) {
  const NodeMask mask(node);
  const long set = ::syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask.words.data(), NodeMask::bits);
  return set < 0 ? -errno : 0;
}

int System::prefer_node_for_memory(std::byte* memory, std::size_t bytes, int node) {
  const NodeMask mask(node);
  const long bound =
      ::syscall(SYS_mbind, memory, bytes, MPOL_PREFERRED, mask.words.data(), NodeMask::bits, 0U);
  return bound < 0 ? -errno : 0;
}

System& System::real() {
  static System& system = *new System();  // never destroyed: threads may outlive main()
  return system;
}

std::size_t last_level_cache_bytes(const std::string& folder) {
  std::size_t largest = 0;
  for (char index = '0'; index <= '9'; ++index) {
    const std::string text = read_text(folder + "/index" + index + "/size");  // "32768K"
    std::size_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end == text.data() + text.size()) continue;
    if (*end == 'K') largest = std::max(largest, value * KiB);
    if (*end == 'M') largest = std::max(largest, value * MiB);
  }
  return largest > 0 ? largest : 32 * MiB;
}

std::string read_text(const std::string& path) {
  System& system = System::real();
  // Does not wait if somebody has put a FIFO there.
  const int fd = system.open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
  if (fd < 0) return {};
  std::string text;
  std::array<char, 4096> chunk{};
  for (;;) {
    const ssize_t got = ::read(fd, chunk.data(), chunk.size());
    if (got <= 0) break;
    text.append(chunk.data(), static_cast<std::size_t>(got));
  }
  system.close(fd);
  return text;
}

int write_all(int fd, std::string_view text, std::uint64_t offset) {
  while (!text.empty()) {
    const ssize_t wrote = System::real().pwrite(fd, reinterpret_cast<const std::byte*>(text.data()),
                                                text.size(), offset);
    if (wrote == -EINTR) continue;
    if (wrote <= 0) return wrote < 0 ? static_cast<int>(wrote) : -EIO;
    text.remove_prefix(static_cast<std::size_t>(wrote));
    offset += static_cast<std::uint64_t>(wrote);
  }
  return 0;
}

int replace_file(const std::string& path, std::string_view text, mode_t mode) {
  System& system = System::real();
  std::string fresh;
  int fd = -EEXIST;
  for (int attempt = 0; attempt < 100 && fd == -EEXIST; ++attempt) {
    std::array<unsigned char, 8> random{};
    if (::getrandom(random.data(), random.size(), 0) < 0) return -errno;
    fresh = path + ".new-";
    for (const unsigned char byte : random) {
      fresh += "0123456789abcdef"[byte >> 4U];
      fresh += "0123456789abcdef"[byte & 15U];
    }
    fd = system.open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
  }
  if (fd < 0) return fd;
  int done = write_all(fd, text, 0);
  const int closed = system.close(fd);
  if (done == 0) done = closed;
  if (done == 0) done = or_errno(::rename(fresh.c_str(), path.c_str()));
  if (done < 0) ::unlink(fresh.c_str());
  return done;
}

int open_own_file(const std::string& path) {
  System& system = System::real();
  constexpr int flags = O_WRONLY | O_NOFOLLOW | O_CLOEXEC | O_NOCTTY;
  int fd = system.open(path.c_str(), flags | O_CREAT | O_EXCL, 0600);
  if (fd != -EEXIST) return fd;
  fd = system.open(path.c_str(), flags | O_NONBLOCK, 0);  // does not wait for a FIFO
  if (fd < 0) return fd;
  struct statx facts{};
  int problem = system.statx(fd, STATX_TYPE | STATX_NLINK | STATX_UID, &facts);
  if (problem == 0 && !S_ISREG(facts.stx_mode)) problem = -EINVAL;
  if (problem == 0 && facts.stx_uid != ::geteuid()) problem = -EPERM;
  if (problem == 0 && facts.stx_nlink != 1) problem = -EMLINK;
  if (problem == 0) (void)::fchmod(fd, 0600);  // some file systems have no modes
  if (problem == 0) problem = system.truncate(fd, 0);
  if (problem == 0) return fd;
  system.close(fd);
  return problem;
}

std::string read_link(const std::string& path) {
  std::array<char, 4096> target{};
  const ssize_t got = ::readlink(path.c_str(), target.data(), target.size());
  return got < 0 ? std::string{} : std::string(target.data(), static_cast<std::size_t>(got));
}

std::string real_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr),
                                                         &std::free);
  return real == nullptr ? std::string{} : std::string(real.get());
}

std::vector<std::string> list_directory(int directory) {
  std::vector<std::string> names;
  // A descriptor of its own: closedir() closes it, and the position is not shared.
  const int fd = ::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return names;
  DIR* const stream = ::fdopendir(fd);
  if (stream == nullptr) {
    ::close(fd);
    return names;
  }
  while (const dirent* entry = ::readdir(stream)) {  // NOLINT(concurrency-mt-unsafe): own stream
    const std::string name = static_cast<const char*>(entry->d_name);
    if (name != "." && name != "..") names.push_back(name);
  }
  ::closedir(stream);
  return names;
}

std::uint64_t memlock_limit_bytes() noexcept {
  rlimit limit{};
  return ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 ? limit.rlim_cur : 0;
}

std::uint64_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

}  // namespace tensorferry::os
