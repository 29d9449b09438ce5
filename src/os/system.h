// The one seam to the operating system: every system call of the library that liburing or libaio
// does not make goes through here, so a test can replace one and let it fail.
//
// Each call returns what the kernel returned, or -errno; none sets or reads errno at its callers.
// No call is retried here and no error is judged here (handle/retry does both). Thread-safe.
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
  // F_SETFL: which of O_DIRECT, O_NONBLOCK and O_APPEND are on, for all who share the description.
  virtual int set_flags(int fd, int flags);

  virtual ssize_t pread(int fd, std::byte* memory, std::size_t bytes, std::uint64_t offset);
  virtual ssize_t pwrite(int fd, const std::byte* memory, std::size_t bytes, std::uint64_t offset);
  virtual int fdatasync(int fd);
  virtual int fsync(int fd);
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
  // Makes the file this process's own, until it is closed: 0, or -EWOULDBLOCK if it is another's.
  virtual int lock_file(int fd);

  // Private anonymous memory, zeroed. nullptr when there is none.
  virtual std::byte* map(std::size_t bytes);
  // A file in place of that much memory; what is written to it stays private. 0 or -errno.
  virtual int map_file(std::byte* memory, std::size_t bytes, int fd, std::uint64_t offset);
  virtual int unmap(std::byte* memory, std::size_t bytes);
  virtual int lock(std::byte* memory, std::size_t bytes);
  virtual int advise(std::byte* memory, std::size_t bytes, int advice);
  // How many of `bytes` are in huge pages, or -errno (ENOTTY before Linux 6.7).
  virtual std::int64_t huge_bytes(std::byte* memory, std::size_t bytes);
  // Whether the page at `page` is in memory: 1 or 0, or -errno.
  virtual int resident(std::byte* page);

  // The real one, alive for the whole process.
  static System& real();
};

// The text of a small file of the system (sysfs, procfs), or empty when it cannot be read.
[[nodiscard]] std::string read_text(const std::string& path);

// The size of the last cache before memory, as the processors below `folder` have it; 32 MiB where
// that is not told.
[[nodiscard]] std::size_t last_level_cache_bytes(
    const std::string& folder = "/sys/devices/system/cpu/cpu0/cache");

// Writes all of the text to a place in a file. 0 or -errno.
[[nodiscard]] int write_all(int fd, std::string_view text, std::uint64_t offset);

// Puts a file with this text in place of whatever is at `path`: readers see the old one or the new
// one. The text is first written beside it, to a file that is made for it under a name that nobody
// can foresee. 0 or -errno; after a failure everything is as it was.
[[nodiscard]] int replace_file(const std::string& path, std::string_view text, mode_t mode);

// A file to write to, from its beginning, that is this user's alone, with mode 0600: one that is
// made now, or a regular one that belongs to this user and has one name, which is emptied. Links
// are not followed. The descriptor or -errno: ELOOP for a link, EINVAL for what is no regular file,
// EPERM for one of another user's, EMLINK for one with several names; all of them stay as they
// were.
[[nodiscard]] int open_own_file(const std::string& path);

// Where a symbolic link points, or empty.
[[nodiscard]] std::string read_link(const std::string& path);

// The path without links and dots, or empty where nothing is there.
[[nodiscard]] std::string real_path(const std::string& path);

// The names in an open directory, without . and .., in no order.
[[nodiscard]] std::vector<std::string> list_directory(int directory);

// RLIMIT_MEMLOCK.
[[nodiscard]] std::uint64_t memlock_limit_bytes() noexcept;

// Counts the forks that led to this process: 0 in a process that never was a child of a user of
// this library. What was made under another number belongs to the parent.
[[nodiscard]] std::uint64_t fork_generation() noexcept;

// Deletes what this process has made. What a child of fork() has inherited it leaves as it is:
// threads of the parent may have been in the middle of it, may hold its locks for ever, and a
// condition variable does not end before those who wait for it do.
struct DeleteOwn {
  std::uint64_t generation = fork_generation();
  template <class Made>
  void operator()(Made* made) const {
    if (generation == fork_generation()) delete made;
  }
};

}  // namespace tensorferry::os
