// A block device made of a file, and file systems to order: what the tests of real EIO, power cuts,
// full disks and foreign file systems stand on. Needs root.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "support/temp_dir.h"

namespace tensorferry::support {

// Why mounts and loop devices cannot be had here; empty where they can. For GTEST_SKIP.
[[nodiscard]] std::string mounts_unavailable_reason();

// A mounted file system without a device of its own ("tmpfs", "ramfs", "overlay"); unmounted at the
// end. The mount is seen by this process and its children only, so a killed test leaves none.
class Mount {
 public:
  // Throws std::runtime_error. `options` as in mount -o; overlay makes its own.
  explicit Mount(const std::string& type, const std::string& options = "");
  ~Mount();
  Mount(const Mount&) = delete;
  Mount& operator=(const Mount&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  TempDir dir_;
  std::string path_;
};

enum class PowerCut : std::uint32_t { journal_flushed = 1, journal_lost = 2 };

// A loop device over a sparse file. It frees itself when its last user is gone, also when the test
// is killed. While a file system is mounted nothing else keeps the device, and each mount makes a
// new one over the same file: like a drive after a power cycle, it remembers nothing but its bytes.
class LoopDevice {
 public:
  // Throws std::runtime_error.
  explicit LoopDevice(std::uint64_t bytes, unsigned sector_bytes = 512);
  ~LoopDevice();
  LoopDevice(const LoopDevice&) = delete;
  LoopDevice& operator=(const LoopDevice&) = delete;

  // Why loop devices, or a file system on one ("ext4", "xfs", "btrfs"), cannot be had here.
  [[nodiscard]] static std::string unavailable_reason(const std::string& type = "");

  // Changes with each mount.
  [[nodiscard]] const std::string& device() const noexcept { return device_; }

  // All throw std::runtime_error. One file system at a time.
  void make_file_system(const std::string& type, const std::string& options = "");
  void mount();
  void unmount();
  [[nodiscard]] const std::string& mount_point() const noexcept { return mount_point_; }
  [[nodiscard]] std::string file(const std::string& name) const {
    return mount_point_ + "/" + name;
  }

  // ext4 and xfs: from now on nothing reaches the device any more, as if power were lost.
  void cut_power(PowerCut how);

  // Reads and writes beyond `bytes` of the device give EIO from now on.
  void lose_everything_from(std::uint64_t bytes);

 private:
  void attach();

  TempDir dir_;
  unsigned sector_bytes_;
  std::string backing_;
  std::string device_;
  std::string mount_point_;
  std::string type_;
  int fd_ = -1;  // of the device, while it is not mounted
  bool mounted_ = false;
};

}  // namespace tensorferry::support
