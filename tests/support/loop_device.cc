#include "support/loop_device.h"

#include <fcntl.h>
#include <linux/loop.h>
#include <sched.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <utility>
#include <vector>

extern char** environ;

namespace tensorferry::support {

namespace {

constexpr unsigned long ext4_shutdown = 0x8004587d;  // EXT4_IOC_SHUTDOWN, in no header

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

// Enters a new mount namespace: the mounts of this process end with it.
bool enter_own_mounts() {
  static const bool entered = ::unshare(CLONE_NEWNS) == 0 &&
                              ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
  return entered;
}

// Runs a program without output. Returns its exit status, or -1.
int run(const std::vector<std::string>& words) {
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  pid_t child = -1;
  const int spawned =
      ::posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  if (spawned != 0 || ::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

bool kernel_knows(const std::string& type) {
  std::ifstream list("/proc/filesystems");
  for (std::string word; list >> word;) {
    if (word == type) return true;
  }
  return false;
}

bool program_exists(const std::string& name) {
  for (const char* folder : {"/usr/sbin/", "/sbin/", "/usr/bin/", "/bin/"}) {
    if (::access((folder + name).c_str(), X_OK) == 0) return true;
  }
  return false;
}

// Configures a free loop device over `backing` and returns its open descriptor. Another process may
// take the free one first, hence the loop.
int configure(int backing, unsigned sector_bytes, std::string* device) {
  const int control = ::open("/dev/loop-control", O_RDWR | O_CLOEXEC);
  if (control < 0) fail("open /dev/loop-control");
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int number = ::ioctl(control, LOOP_CTL_GET_FREE);
    if (number < 0) break;
    *device = "/dev/loop" + std::to_string(number);
    const int fd = ::open(device->c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) {
      ::usleep(1000);
      continue;
    }
    loop_config config{};
    config.fd = static_cast<__u32>(backing);
    config.block_size = sector_bytes;
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
    if (::ioctl(fd, LOOP_CONFIGURE, &config) == 0) {
      ::close(control);
      return fd;
    }
    ::close(fd);
    ::usleep(1000);
  }
  ::close(control);
  fail("no free loop device");
}

}  // namespace

std::string mounts_unavailable_reason() {
  if (::geteuid() != 0) return "mounting needs root";
  if (!enter_own_mounts()) return "this process cannot enter a new mount namespace";
  return {};
}

Mount::Mount(const std::string& type, const std::string& options) {
  if (const std::string reason = mounts_unavailable_reason(); !reason.empty()) {
    throw std::runtime_error(reason);
  }
  path_ = dir_.file("mnt");
  ::mkdir(path_.c_str(), 0755);
  std::string all = options;
  if (type == "overlay") {
    for (const char* name : {"lower", "upper", "work"}) ::mkdir(dir_.file(name).c_str(), 0755);
    all = "lowerdir=" + dir_.file("lower") + ",upperdir=" + dir_.file("upper") +
          ",workdir=" + dir_.file("work");
  }
  if (::mount(type.c_str(), path_.c_str(), type.c_str(), 0, all.c_str()) != 0) {
    fail("mount " + type);
  }
}

Mount::~Mount() { ::umount2(path_.c_str(), MNT_DETACH); }

std::string LoopDevice::unavailable_reason(const std::string& type) {
  if (std::string reason = mounts_unavailable_reason(); !reason.empty()) return reason;
  if (::access("/dev/loop-control", R_OK | W_OK) != 0)
    return "/dev/loop-control is missing or closed to this process";
  if (type.empty()) return {};
  if (!kernel_knows(type)) return "this kernel has no " + type;
  if (!program_exists("mkfs." + type)) return "mkfs." + type + " is not installed";
  return {};
}

LoopDevice::LoopDevice(std::uint64_t bytes, unsigned sector_bytes) : sector_bytes_(sector_bytes) {
  if (const std::string reason = unavailable_reason(); !reason.empty()) {
    throw std::runtime_error(reason);
  }
  backing_ = dir_.file("disk");
  mount_point_ = dir_.file("mnt");
  ::mkdir(mount_point_.c_str(), 0755);
  const int backing = ::open(backing_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (backing < 0 || ::ftruncate(backing, static_cast<off_t>(bytes)) != 0) fail(backing_);
  ::close(backing);
  attach();
}

void LoopDevice::attach() {
  const int backing = ::open(backing_.c_str(), O_RDWR | O_CLOEXEC);
  if (backing < 0) fail("open " + backing_);
  fd_ = configure(backing, sector_bytes_, &device_);
  ::close(backing);
}

LoopDevice::~LoopDevice() {
  if (mounted_) ::umount2(mount_point_.c_str(), MNT_DETACH);
  if (fd_ >= 0) ::close(fd_);
}

void LoopDevice::make_file_system(const std::string& type, const std::string& options) {
  std::vector<std::string> words{"mkfs." + type, "-q", type == "ext4" ? "-F" : "-f"};
  if (!options.empty()) {
    words.emplace_back("-O");
    words.push_back(options);
  }
  words.push_back(device_);
  if (run(words) != 0) throw std::runtime_error("mkfs." + type + " " + device_ + " failed");
  type_ = type;
}

void LoopDevice::mount() {
  if (fd_ < 0) attach();
  if (::mount(device_.c_str(), mount_point_.c_str(), type_.c_str(), 0, nullptr) != 0) {
    fail("mount " + device_ + " as " + type_);
  }
  mounted_ = true;
  ::close(std::exchange(fd_, -1));
}

void LoopDevice::unmount() {
  // A process that has just ended may hold it for a moment.
  for (int attempt = 0; ::umount(mount_point_.c_str()) != 0; ++attempt) {
    if (errno != EBUSY || attempt >= 2000) fail("umount " + mount_point_);
    ::usleep(1000);
  }
  mounted_ = false;
}

void LoopDevice::cut_power(PowerCut how) {
  const int fd = ::open(mount_point_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail("open " + mount_point_);
  auto flags = static_cast<std::uint32_t>(how);
  const int result = ::ioctl(fd, ext4_shutdown, &flags);
  ::close(fd);
  if (result != 0) fail("shutdown of " + mount_point_);
}

void LoopDevice::lose_everything_from(std::uint64_t bytes) {
  if (::truncate(backing_.c_str(), static_cast<off_t>(bytes)) != 0) fail("truncate " + backing_);
}

}  // namespace tensorferry::support
