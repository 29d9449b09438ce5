// The one seam to the operating system: every system call of the library that liburing or libaio
// does not make goes through here, so that a test can replace it and make it fail.
//
// Each call returns what the kernel returned, or -errno; callers never use errno itself. Nothing
// here retries a call or judges an error (handle/retry does both). Thread-safe.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>
#include <sys/vfs.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tensorferry::os {

// A NUMA node that is online: its number, and the processors next to its memory.
struct NumaNode {
  int number = 0;
  std::vector<unsigned> processors = {};
};

class System {
 public:
  System() = default;
  virtual ~System() = default;
  System(const System&) = delete;
  System& operator=(const System&) = delete;

  virtual int open(const char* path, int flags, mode_t mode);
  virtual int close(int fd);
  virtual int duplicate(int fd);  // close-on-exec
  virtual int flags(int fd);      // F_GETFL
  // F_SETFL: sets O_DIRECT, O_NONBLOCK and O_APPEND, for every descriptor of this open file.
  virtual int set_flags(int fd, int flags);

  virtual ssize_t pread(int fd, std::byte* memory, std::size_t bytes, std::uint64_t offset);
  virtual ssize_t pwrite(int fd, const std::byte* memory, std::size_t bytes, std::uint64_t offset);
  virtual int fdatasync(int fd);
  virtual int fsync(int fd);
  virtual int set_mode(int fd, mode_t mode);  // fchmod
  virtual int truncate(int fd, std::uint64_t bytes);
  virtual int fallocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes);

  virtual int statx(int fd, unsigned mask, struct statx* facts);
  virtual int stat_path(const char* path, unsigned mask, struct statx* facts);
  virtual int statfs(int fd, struct statfs* facts);
  virtual int block_device_bytes(int fd, std::uint64_t* bytes);

  // Names in an open directory.
  virtual int open_at(int directory, const char* name, int flags, mode_t mode);
  virtual int stat_at(int directory, const char* name, unsigned mask, struct statx* facts);
  virtual int make_directory_at(int directory, const char* name, mode_t mode);
  virtual int remove_at(int directory, const char* name, int flags);  // unlinkat
  // Gives the file another name in the same directory; a file of that name is replaced.
  virtual int rename_at(int directory, const char* name, const char* new_name);
  // Gives an open file that has a name another one, in a directory of the same file system. Needs
  // /proc.
  virtual int link_file(int fd, int directory, const char* name);
  // Locks the file until this process, and every child that it has forked meanwhile, closes it: 0,
  // or -EWOULDBLOCK if another process holds the lock.
  virtual int lock_file(int fd);
  // The same, for any number of processes at once.
  virtual int share_file(int fd);
  // Ends that lock at once, whoever still has the descriptor.
  virtual int unlock_file(int fd);

  // Maps private anonymous memory, zeroed. Returns nullptr if the system has too little.
  virtual std::byte* map(std::size_t bytes);
  // Maps a file over that memory; writes to the memory stay private. 0 or -errno.
  virtual int map_file(std::byte* memory, std::size_t bytes, int fd, std::uint64_t offset);
  virtual int unmap(std::byte* memory, std::size_t bytes);
  virtual int lock(std::byte* memory, std::size_t bytes);
  virtual int advise(std::byte* memory, std::size_t bytes, int advice);
  // The number of `bytes` that are in huge pages, or -errno (ENOTTY before Linux 6.7).
  virtual std::int64_t huge_bytes(std::byte* memory, std::size_t bytes);
  // Whether the page at `page` is in memory: 1 or 0, or -errno.
  virtual int resident(std::byte* page);

  // The NUMA nodes, ordered by number: those of read_numa_nodes(), never none.
  virtual std::vector<NumaNode> numa_nodes();
  // The processors that the calling thread may run on, in order.
  virtual int affinity(std::vector<unsigned>& processors);
  virtual int set_affinity(const std::vector<unsigned>& processors);
  // The mode of the calling thread's memory policy: MPOL_DEFAULT or another, or -errno.
  virtual int memory_policy();
  // Takes new pages from a node as long as it has some (MPOL_PREFERRED): those that the calling
  // thread touches first, or those of a mapping.
  virtual int prefer_node_for_thread(int node);
  virtual int prefer_node_for_memory(std::byte* memory, std::size_t bytes, int node);

  // The real system. Never destroyed.
  static System& real();
};

// The text of a small file of the system (sysfs, procfs); empty if it cannot be read.
[[nodiscard]] std::string read_text(const std::string& path);

// The size of the last cache before memory, from the sysfs folder of a processor; 32 MiB if that
// does not tell.
[[nodiscard]] std::size_t last_level_cache_bytes(
    const std::string& folder = "/sys/devices/system/cpu/cpu0/cache");

// Writes all of the text at an offset of a file. 0 or -errno.
[[nodiscard]] int write_all(int fd, std::string_view text, std::uint64_t offset);

// Replaces the file at `path` by one with this text: readers see the old file or the new one.
// Writes the text to a new file beside it first, under a name that nobody can predict. 0 or -errno;
// after a failure the old file is unchanged.
[[nodiscard]] int replace_file(const std::string& path, std::string_view text, mode_t mode);

// Opens an empty file for writing that only this user can access (mode 0600): creates it, or
// empties a regular file that belongs to this user and has one name. Does not follow links. Returns
// the descriptor or -errno: ELOOP for a link, EINVAL if it is not a regular file, EPERM if it
// belongs to another user, EMLINK if it has several names. Such files stay unchanged.
[[nodiscard]] int open_own_file(const std::string& path);

// The target of a symbolic link; empty if it cannot be read.
[[nodiscard]] std::string read_link(const std::string& path);

// The path without links and dots; empty if it does not exist.
[[nodiscard]] std::string real_path(const std::string& path);

// The names in an open directory, without . and .., in any order.
[[nodiscard]] std::vector<std::string> list_directory(int directory);

// RLIMIT_MEMLOCK.
[[nodiscard]] std::uint64_t memlock_limit_bytes() noexcept;

// Counts the forks, since the library was loaded, that led to this process. An object that was made
// in another generation belongs to the parent.
[[nodiscard]] std::uint64_t fork_generation() noexcept;

// A deleter that deletes only objects that this process has made. A child of fork() leaks those
// that it inherits: a thread of the parent may have been changing them, their locks may stay locked
// for ever, and a condition variable cannot be destroyed while threads wait for it.
struct DeleteOwn {
  std::uint64_t generation = fork_generation();
  template <class Made>
  void operator()(Made* made) const {
    if (generation == fork_generation()) delete made;
  }
};

}  // namespace tensorferry::os
